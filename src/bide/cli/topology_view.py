"""What ``bide topology`` prints: a topology as a list, a difference, an itinerary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from bide.foreign_text import visible

_MANY: Final = 20

if TYPE_CHECKING:
    from bide.admin.live_topology import Comparison
    from bide.patterns.catalogue import Pattern
    from bide.topology import Binding, Exchange, Queue, Topology
    from bide.topology.itinerary import Itinerary, RouteDecision


def pattern_lines(patterns: tuple[Pattern, ...]) -> Iterator[str]:
    """All patterns, one a line."""
    width = max(len(one.name) for one in patterns)
    for pattern in patterns:
        number = "" if pattern.number is None else str(pattern.number)
        yield f"{number:>2}  {pattern.name:<{width}}  {pattern.title}"


def pattern_values(pattern: Pattern) -> dict[str, Any]:
    """A pattern as values that JSON has."""
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
    """A topology, one thing a line."""
    yield from (f"exchange  {_exchange(one)}" for one in topology.exchanges)
    yield from (f"queue     {_queue(one)}" for one in topology.queues)
    yield from (f"binding   {_binding(one)}" for one in topology.bindings)


def _exchange(exchange: Exchange) -> str:
    flags = [
        text
        for text, holds in (
            ("transient", not exchange.durable),
            ("auto-delete", exchange.auto_delete),
            ("internal", exchange.internal),
        )
        if holds
    ]
    return " ".join([exchange.name, f"({', '.join([exchange.type, *flags])})", *_arguments(exchange)])


def _queue(queue: Queue) -> str:
    flags = [
        text
        for text, holds in (
            ("transient", not queue.durable),
            ("auto-delete", queue.auto_delete),
            ("exclusive", queue.exclusive),
        )
        if holds
    ]
    return " ".join([queue.name, f"({', '.join([queue.type, *flags])})", *_arguments(queue)])


def _binding(binding: Binding) -> str:
    key = [f"key {binding.routing_key!r}"] if binding.routing_key else []
    to = f"{binding.source} -> {binding.destination_type} {binding.destination}"
    return " ".join([to, *key, *_arguments(binding)])


def _arguments(thing: Exchange | Queue | Binding) -> list[str]:
    return [f"{name}={value!r}" for name, value in thing.arguments.items() if name != "x-queue-type"]


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """What a broker lacks, what is there with other properties, and what others added."""
    diff = comparison.diff
    for line in topology_lines(diff.added):
        yield click.style(visible(f"- missing {line}"), fg="red")
    for change in diff.changed:
        for name, (found, wanted) in change.differences.items():
            line = f"~ {change.kind} {change.name}: {name} is {_value(found)}, {_value(wanted)} is wanted"
            yield click.style(visible(line), fg="yellow")
    for text in comparison.policies:
        yield click.style(visible(f"~ {text}"), fg="yellow")
    for binding in comparison.beside:
        yield visible(f"· of others: binding {_binding(binding)}")


def _value(value: object) -> str:
    return "absent" if value is None else repr(value)


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """A comparison as values that JSON has."""
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
        "of_others": [_binding(one) for one in comparison.beside],
    }


def itinerary_lines(way: Itinerary, *, every: bool = False) -> Iterator[str]:
    """The way of a message, one place a line.

    Args:
        every: also where it does not go, however many places these are.
    """
    for stop in way.stops:
        maybe = "" if stop.certain else ", if it comes here"
        yield visible(f"exchange {stop.exchange or '(default)'} ({stop.type}{maybe})")
        if not stop.looks:
            yield "  nothing is bound to it"
        refused = [one for one in stop.looks if one.goes is False]
        shown = stop.looks if every or len(refused) <= _MANY else [one for one in stop.looks if one.goes is not False]
        yield from (_look(one) for one in shown)
        if len(shown) < len(stop.looks):
            yield f"  ✗ {len(refused)} others do not match (--all: why)"
    yield visible(f"queues: {', '.join(way.queues) or 'none'}")
    if way.possible:
        yield visible(f"perhaps: {', '.join(way.possible)}")
    if not way.queues and not way.possible:
        yield "nothing takes it: the broker returns it if it is mandatory, and drops it otherwise"
    yield from map(visible, way.later)


def _look(look: RouteDecision) -> str:
    mark, colour = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}[look.goes]
    return f"  {click.style(mark, fg=colour)} " + visible(f"{look.kind} {look.name or '(default)'}: {look.reason}")
