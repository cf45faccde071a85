"""The route of a delayed message, as a table, as data, or as a Mermaid diagram.

The route is computed from the infrastructure alone, without a broker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from bide.foreign_text import visible
from bide.runtime.wording import quantity

if TYPE_CHECKING:
    from bide.delay.protocol import DelayInfrastructure, Target
    from bide.delay.routes import Step
    from bide.topology import Topology

COLUMNS: Final = (
    "Exchange",
    "Routing Key Segment",
    "Routing Value",
    "Routed To",
    "Delay in Queue",
    "Dead-letter To",
)

_MAX_DRAWN_BINDINGS: Final = 3
"""The most bindings off the route that are drawn for an exchange. If there are more, only their number is drawn."""


@runtime_checkable
class Labelled(Protocol):
    """An infrastructure whose exchanges and queues have readable names besides those on the broker."""

    def label(self, name: str) -> str | None:
        """A readable name of an exchange or queue, such as ``Level 03``; None if another program owns it."""


def explain(infrastructure: DelayInfrastructure, delay: timedelta, target: Target) -> str:
    """A table with one row for each exchange on the route, in the format of the NServiceBus documentation.

    Raises:
        InvalidInputError: as :meth:`DelayInfrastructure.route` does.
    """
    return "\n".join(markdown(table(infrastructure, delay, target)))


def table(infrastructure: DelayInfrastructure, delay: timedelta, target: Target) -> list[tuple[str, ...]]:
    """The rows of the table, with its heading first.

    Raises:
        InvalidInputError: as :meth:`DelayInfrastructure.route` does.
    """
    label = _labels(infrastructure)
    steps = infrastructure.steps(delay, target)
    return [COLUMNS, *(tuple(map(visible, _cells(step, label))) for step in steps)]


def markdown(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table in Markdown, whose columns are aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def rows(infrastructure: DelayInfrastructure, delay: timedelta, target: Target) -> list[dict[str, Any]]:
    """The rows of the table as data for JSON, with the names on the broker.

    ``delay`` is the wait in seconds, and ``dead_letter_to`` the exchange after it. Both are None if the exchange routes
    the message to another exchange or to its target without a wait.

    Raises:
        InvalidInputError: as :meth:`DelayInfrastructure.route` does.
    """
    return [
        {
            "exchange": step.exchange,
            "segment": step.segment,
            "value": step.value,
            "routed_to": step.routed_to,
            "delay": None if step.dead_letter_to is None else _seconds_of(step.delay),
            "dead_letter_to": step.dead_letter_to,
        }
        for step in infrastructure.steps(delay, target)
    ]


def mermaid(infrastructure: DelayInfrastructure, delay: timedelta, target: Target) -> str:
    """A Mermaid flow chart of the exchanges that the message passes.

    Thick arrows show its route, dotted arrows other bindings. Queues in which it waits are coloured.

    Raises:
        InvalidInputError: as :meth:`DelayInfrastructure.route` does.
    """
    return _Chart(infrastructure.topology(), infrastructure.steps(delay, target), _labels(infrastructure)).text()


class _Labels(Protocol):
    def __call__(self, name: str) -> str | None: ...


def _labels(infrastructure: DelayInfrastructure) -> _Labels:
    return infrastructure.label if isinstance(infrastructure, Labelled) else lambda name: None


def _cells(step: Step, label: _Labels) -> tuple[str, ...]:
    name = label(step.exchange)
    after = label(step.dead_letter_to or "")
    to = label(step.routed_to)
    waits = step.dead_letter_to is not None
    kind = "Queue" if waits else "Exchange"
    return (
        step.exchange if name is None else f"{name} Exchange" if name == "Delivery" else name,
        step.segment,
        step.value,
        step.routed_to if to is None else f"{to} {kind}",
        _seconds_text(step.delay) if waits else "-",
        (step.dead_letter_to or "-") if after is None else f"{after} Exchange",
    )


def _seconds_of(delay: timedelta) -> int | float:
    seconds = delay.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds


def _seconds_text(delay: timedelta) -> str:
    number = _seconds_of(delay)
    return "1 second" if number == 1 else f"{number} seconds"


@dataclass(slots=True)
class _Chart:
    """A builder of a flow chart: nodes by kind and name, and arrows, each once."""

    topology: Topology
    steps: tuple[Step, ...]
    label: _Labels
    nodes: dict[tuple[str, str], str] = field(default_factory=dict)
    shapes: list[str] = field(default_factory=list)
    arrows: dict[str, None] = field(default_factory=dict)

    def text(self) -> str:
        for step in self.steps:
            self._exchange(step.exchange)
        for step, following in zip(self.steps, (*self.steps[1:], None), strict=True):
            self._draw_taken(step, following)
            self._draw_others(step, following)
        waits = {step.routed_to for step in self.steps if step.dead_letter_to is not None}
        exchanges = [node for (kind, _), node in self.nodes.items() if kind == "exchange"]
        used = [node for (kind, name), node in self.nodes.items() if kind == "queue" and name in waits]
        title = _quoted(f"Delay of {_seconds_text(sum((step.delay for step in self.steps), timedelta(0)))}")
        return "\n".join(
            [
                "graph LR",
                f"    subgraph route[{title}]",
                *(f"        {line}" for line in (*self.shapes, *self.arrows)),
                "    end",
                "    classDef exchangeClass stroke:#000000,stroke-width:2px;",
                f"    class {','.join(exchanges)} exchangeClass",
                *(["    classDef usedQueue fill:#11ff00;", f"    class {','.join(used)} usedQueue"] if used else []),
            ]
        )

    def _node(self, kind: str, name: str, shape: str) -> str:
        known = self.nodes.get((kind, name))
        if known is None:
            known = self.nodes[kind, name] = f"{kind}{sum(1 for one, _ in self.nodes if one == kind)}"
            self.shapes.append(f"{known}{shape}")
        return known

    def _exchange(self, name: str) -> str:
        return self._node("exchange", name, f"({_quoted(self.label(name) or name)})")

    def _queue(self, name: str, wait: timedelta) -> str:
        return self._node("queue", name, f"[{_quoted(f'⏳ {_seconds_of(wait)} s' if wait else name)}]")

    def _arrow(self, start: str, arrow: str, end: str) -> None:
        self.arrows[f"{start} {arrow} {end}"] = None

    def _draw_taken(self, step: Step, following: Step | None) -> None:
        """Draw the binding of one exchange that the message takes."""
        here = self._exchange(step.exchange)
        if step.dead_letter_to is not None:
            queue = self._queue(step.routed_to, step.delay)
            self._arrow(here, "==>", queue)
            self._arrow(queue, "==>", self._exchange(step.dead_letter_to))
        elif following is None:
            self._arrow(here, "==>", self._node("target", step.routed_to, f"[{_quoted(step.routed_to)}]"))
        elif following.exchange == step.routed_to:
            self._arrow(here, "==>", self._exchange(step.routed_to))
        else:
            # A consumer takes the message there and publishes it again.
            queue = self._queue(step.routed_to, step.delay)
            self._arrow(here, "==>", queue)
            self._arrow(queue, "==>", self._exchange(following.exchange))

    def _draw_others(self, step: Step, following: Step | None) -> None:
        """Draw the other bindings of one exchange, or their number."""
        goes_on = step.dead_letter_to is None and following is not None and following.exchange == step.routed_to
        taken = ("exchange" if goes_on else "queue", step.routed_to)
        bound = dict.fromkeys(
            (one.destination_type, one.destination) for one in self.topology.bindings if one.source == step.exchange
        )
        others = [one for one in bound if one != taken]
        here = self._exchange(step.exchange)
        if len(others) > _MAX_DRAWN_BINDINGS:
            counts = Counter(kind for kind, _ in others)
            text = ", ".join(quantity(count, f"more {kind}") for kind, count in counts.items())
            self._arrow(here, "-.->", self._node("more", step.exchange, f"[{_quoted(text)}]"))
            return
        for kind, name in others:
            if kind == "exchange":
                self._arrow(here, "-.->", self._exchange(name))
                continue
            found = self.topology.queue(name)
            arguments = {} if found is None else found.arguments
            queue = self._queue(name, timedelta(milliseconds=int(arguments.get("x-message-ttl", 0))))
            self._arrow(here, "-.->", queue)
            if "x-dead-letter-exchange" in arguments:
                self._arrow(queue, "-.->", self._exchange(str(arguments["x-dead-letter-exchange"])))


def _quoted(text: str) -> str:
    """The text of a node, with Mermaid's special characters as entities."""
    for sign, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(sign, entity)
    return f'"{visible(text)}"'
