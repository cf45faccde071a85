"""Output of ``bide topology``: topologies, comparisons with a broker, itineraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from bide.cli.output import echo

_MAX_REFUSED: Final = 20

if TYPE_CHECKING:
    from bide.admin.live_topology import Comparison
    from bide.patterns.catalogue import Pattern
    from bide.topology import Binding, Exchange, Queue, Topology
    from bide.topology.itinerary import Itinerary, RouteDecision


def print_patterns(patterns: tuple[Pattern, ...]) -> None:
    """Print all patterns, one per line."""
    width = max(len(one.name) for one in patterns)
    for pattern in patterns:
        number = "" if pattern.number is None else str(pattern.number)
        echo(f"{number:>2}  {pattern.name:<{width}}  {pattern.title}", hang=width + 6)


def pattern_values(pattern: Pattern) -> dict[str, Any]:
    """A pattern as values for JSON."""
    return {
        "number": pattern.number,
        "name": pattern.name,
        "title": pattern.title,
        "summary": pattern.summary,
        "caveat": pattern.caveat,
        "example": pattern.example,
        "options": [
            {
                "name": f"--{one.name}",
                "form": one.form,
                "required": one.required,
                "repeatable": one.repeatable,
                "help": one.help,
            }
            for one in pattern.options
        ],
    }


def topology_lines(topology: Topology) -> Iterator[str]:
    """A topology, with one exchange, queue or binding per line."""
    yield from (f"exchange  {_exchange_text(one)}" for one in topology.exchanges)
    yield from (f"queue     {_queue_text(one)}" for one in topology.queues)
    yield from (f"binding   {_binding_text(one)}" for one in topology.bindings)


def _exchange_text(exchange: Exchange) -> str:
    flags = [
        text
        for text, holds in (
            ("transient", not exchange.durable),
            ("auto-delete", exchange.auto_delete),
            ("internal", exchange.internal),
        )
        if holds
    ]
    return " ".join([exchange.name, f"({', '.join([exchange.type, *flags])})", *_argument_texts(exchange)])


def _queue_text(queue: Queue) -> str:
    flags = [
        text
        for text, holds in (
            ("transient", not queue.durable),
            ("auto-delete", queue.auto_delete),
            ("exclusive", queue.exclusive),
        )
        if holds
    ]
    return " ".join([queue.name, f"({', '.join([queue.type, *flags])})", *_argument_texts(queue)])


def _binding_text(binding: Binding) -> str:
    key = [f"key {binding.routing_key!r}"] if binding.routing_key else []
    to = f"{binding.source} -> {binding.destination_type} {binding.destination}"
    return " ".join([to, *key, *_argument_texts(binding)])


def _argument_texts(thing: Exchange | Queue | Binding) -> list[str]:
    return [f"{name}={value!r}" for name, value in thing.arguments.items() if name != "x-queue-type"]


def print_comparison(comparison: Comparison) -> None:
    """Print the items that a broker lacks, the items that differ, and bindings that other programs added."""
    diff = comparison.diff
    for line in topology_lines(diff.added):
        echo(f"- missing {line}", colour="red")
    for change in diff.changed:
        for name, (found, wanted) in change.differences.items():
            line = f"~ {change.kind} {change.name}: {name} is {_value_text(found)}, {_value_text(wanted)} is wanted"
            echo(line, colour="yellow")
    for text in comparison.policies:
        echo(f"~ {text}", colour="yellow")
    for binding in comparison.beside:
        echo(f"· of other programs: binding {_binding_text(binding)}")


def _value_text(value: object) -> str:
    return "absent" if value is None else repr(value)


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """A comparison as values for JSON."""
    diff = comparison.diff
    return {
        "same": not comparison,
        "missing": list(topology_lines(diff.added)),
        "different": [
            {
                "kind": change.kind,
                "name": change.name,
                "differences": {
                    name: {"found": found, "wanted": wanted} for name, (found, wanted) in change.differences.items()
                },
            }
            for change in diff.changed
        ],
        "policies": list(comparison.policies),
        "of_others": [_binding_text(one) for one in comparison.beside],
    }


def print_itinerary(itinerary: Itinerary, *, every: bool = False) -> None:
    """Print the itinerary of a message: each exchange that it passes, with a line for each binding.

    Args:
        every: list every binding that does not match; otherwise more than 20 are only counted.
    """
    for visit in itinerary.exchanges:
        maybe = "" if visit.certain else ", if it gets here"
        echo(f"exchange {visit.name or '(default)'} ({visit.type}{maybe})")
        if not visit.decisions:
            echo("  nothing is bound to it")
        refused = [one for one in visit.decisions if one.routed is False]
        shown = (
            visit.decisions
            if every or len(refused) <= _MAX_REFUSED
            else [one for one in visit.decisions if one.routed is not False]
        )
        for one in shown:
            _print_decision(one)
        if len(shown) < len(visit.decisions):
            echo(f"  ✗ {len(refused)} others do not match (--all lists them)")
    echo(f"queues: {', '.join(itinerary.queues) or 'none'}")
    if itinerary.possible:
        echo(f"perhaps: {', '.join(itinerary.possible)}")
    if not itinerary.queues and not itinerary.possible:
        echo("the message reaches no queue: the broker returns it if it is mandatory, and drops it otherwise")
    for later in itinerary.later:
        echo(later)


def _print_decision(decision: RouteDecision) -> None:
    mark, colour = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}[decision.routed]
    echo(f"{decision.kind} {decision.name or '(default)'}: {decision.reason}", mark=f"  {mark}", colour=colour)
