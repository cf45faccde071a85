"""Explanation of a message's route: each exchange, and why other bindings do not match.

Whether a binding matches is decided by the very rules that the model routes by; here it only says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bide.durations import format_delay
from bide.errors import InvalidTopologyError, UnsupportedTargetError
from bide.topology import DEFAULT_EXCHANGE, Binding, DestinationType, Exchange, Topology
from bide.topology.exchange_types import RoutedMessage, binding_table
from bide.topology.routing import PREDECLARED, Arrival, Model

CHOOSERS: Final[Mapping[str, str]] = {
    "x-consistent-hash": "by the hash of",
    "x-modulus-hash": "by the hash of",
    "x-random": "at random, whatever",
    "x-local-random": "at random among those on the publisher's node, whatever",
}
"""Exchange types that send a message to one of their bindings, which only the broker knows."""

_INNER: Final = {"x-recent-history": "fanout"}
_MODELLED: Final = frozenset({"direct", "topic", "fanout", "headers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyView:
    """One place that an exchange may send the message to.

    Attributes:
        kind: ``"queue"`` or ``"exchange"``.
        goes: whether the message goes there; None if that cannot be known from outside.
        reason: why, or why not.
    """

    kind: DestinationType
    name: str
    goes: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One exchange that the message comes to.

    Attributes:
        certain: whether it comes there for sure.
    """

    exchange: str
    type: str
    certain: bool
    looks: tuple[TopologyView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Itinerary:
    """The way of one message.

    Attributes:
        stops: the exchanges, in the order in which the message comes to them.
        queues: those that get it for sure.
        possible: those that may get it, by the choice of an exchange.
        later: where it goes after that, for queues that pass it on: one sentence each.
    """

    stops: tuple[Stop, ...]
    queues: tuple[str, ...]
    possible: tuple[str, ...]
    later: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {
            "queues": list(self.queues),
            "possible": list(self.possible),
            "later": list(self.later),
            "stops": [
                {
                    "exchange": stop.exchange,
                    "type": stop.type,
                    "certain": stop.certain,
                    "looks": [
                        {"kind": one.kind, "name": one.name, "goes": one.goes, "reason": one.reason}
                        for one in stop.looks
                    ],
                }
                for stop in self.stops
            ],
        }


def plan(
    topology: Topology, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None
) -> Itinerary:
    """Where a message would go that is published to ``exchange``.

    Raises:
        TargetNotFoundError: there is no such exchange.
        AccessRefusedError: the exchange is internal.
        InvalidInputError: the CC or BCC header is not a list.
        InvalidTopologyError: a binding's source, or the exchange it leads to, is missing.
    """
    Model(topology).check_open(exchange)
    message = RoutedMessage.published(routing_key, headers)
    planned = _Planner(topology, message).plan(exchange)
    return replace(planned, later=tuple(_later(topology, exchange, routing_key, headers, planned)))


@dataclass(slots=True)
class _Planner:
    topology: Topology
    message: RoutedMessage
    stops: list[Stop] = field(default_factory=list)

    def plan(self, exchange: str) -> Itinerary:
        exchanges = {one.name: one for one in (*PREDECLARED, *self.topology.exchanges)}
        certain = self._walk(exchange, exchanges, maybe=False, seen=frozenset())
        doubtful = [
            look.name for stop in self.stops for look in stop.looks if look.goes is None and look.kind == "exchange"
        ]
        possible = {
            look.name for stop in self.stops for look in stop.looks if look.goes is None and look.kind == "queue"
        }
        for name in doubtful:
            visited = frozenset(stop.exchange for stop in self.stops)
            if name not in visited:
                possible |= self._walk(name, exchanges, maybe=True, seen=visited)
        return Itinerary(
            stops=tuple(self.stops), queues=tuple(sorted(certain)), possible=tuple(sorted(possible - certain))
        )

    def _walk(self, start: str, exchanges: Mapping[str, Exchange], *, maybe: bool, seen: frozenset[str]) -> set[str]:
        """Go on from an exchange; return the queues that the message comes to."""
        queues: set[str] = set()
        known = {start, *seen}
        ahead = [start]
        while ahead:
            name = ahead.pop(0)
            if name != DEFAULT_EXCHANGE and name not in exchanges:
                self.stops.append(Stop(exchange=name, type="(missing)", certain=not maybe, looks=()))
                continue
            stop = self._stop(name, exchanges, certain=not maybe)
            self.stops.append(stop)
            for look in stop.looks:
                if look.goes is False or (look.goes is None and not maybe):
                    continue
                if look.kind == "queue":
                    queues.add(look.name)
                elif look.name not in known:
                    known.add(look.name)
                    ahead.append(look.name)
        return queues

    def _stop(self, name: str, exchanges: Mapping[str, Exchange], *, certain: bool) -> Stop:
        if name == DEFAULT_EXCHANGE:
            looks = tuple(_default_looks(self.topology, self.message.keys))
            return Stop(exchange=name, type="direct", certain=certain, looks=looks)
        exchange = exchanges[name]
        bindings = [one for one in self.topology.bindings if one.source == name]
        looks = tuple(_looks(exchange, bindings, self.message))
        alternate = exchange.arguments.get("alternate-exchange")
        if alternate is not None:
            asked = all(one.goes is False for one in looks)
            why = "asked, because no binding matches" if asked else "not asked, because a binding matches"
            if asked and alternate == DEFAULT_EXCHANGE:
                asked, why = False, "the default exchange, which takes nothing as an alternate"
            look = TopologyView(kind="exchange", name=str(alternate), goes=asked, reason=f"alternate exchange: {why}")
            looks = (*looks, look)
        return Stop(exchange=name, type=exchange.type, certain=certain, looks=looks)


def _default_looks(topology: Topology, keys: Sequence[str]) -> Iterator[TopologyView]:
    names = {one.name for one in topology.queues}
    names |= {one.destination for one in topology.bindings if one.destination_type == "queue"}
    for key in keys:
        there = key in names
        reason = f"the key {key!r} is its name" if there else f"no queue has the name {key!r}, which is the key"
        yield TopologyView(kind="queue", name=key, goes=there, reason=reason)


def _looks(exchange: Exchange, bindings: Sequence[Binding], message: RoutedMessage) -> Iterator[TopologyView]:
    kind = exchange.type
    delayed = ""
    if kind == "x-delayed-message":
        kind = str(exchange.arguments.get("x-delayed-type", "direct"))
        delayed = "after the delay in x-delay: "
    kind = _INNER.get(kind, kind)
    if kind not in _MODELLED:
        alone = len(bindings) == 1
        for binding in bindings:
            yield TopologyView(
                kind=binding.destination_type,
                name=binding.destination,
                goes=True if alone and kind in CHOOSERS else None,
                reason=_choice(exchange, kind, alone=alone),
            )
        return
    twin = replace(exchange, type=kind)
    for binding in bindings:
        goes = bool(binding_table(twin, [binding]).matches(message))
        reason = delayed + _REASONS[kind](binding, message, goes)
        yield TopologyView(kind=binding.destination_type, name=binding.destination, goes=goes, reason=reason)


def _choice(exchange: Exchange, kind: str, *, alone: bool) -> str:
    chooser = CHOOSERS.get(kind)
    if chooser is None:
        return f"how an exchange of type {kind!r} chooses is not known here"
    if alone:
        return "the only one that there is"
    arguments = exchange.arguments
    what = "the routing key"
    if "hash-header" in arguments:
        what = f"the header {arguments['hash-header']!r}"
    elif "hash-property" in arguments:
        what = f"the property {arguments['hash-property']}"
    return f"one of these, which the broker chooses {chooser} {what}"


def _keys(message: RoutedMessage) -> str:
    first, *others = message.keys
    return f"the key {first!r}" + (f" and the CC and BCC keys {', '.join(map(repr, others))}" if others else "")


def _direct(binding: Binding, message: RoutedMessage, goes: bool) -> str:
    if goes:
        return f"its binding key is {binding.routing_key!r}" + _by_copy(binding.routing_key in message.keys[:1])
    return f"its binding key is {binding.routing_key!r}, which is not {_keys(message)}"


def _by_copy(by_routing_key: bool) -> str:
    return "" if by_routing_key else ", which is a CC or BCC key"


def _fanout(binding: Binding, message: RoutedMessage, goes: bool) -> str:
    return "a fanout exchange asks for nothing"


def _topic(binding: Binding, message: RoutedMessage, goes: bool) -> str:
    pattern = binding.routing_key
    if goes:
        return f"its pattern {pattern!r} matches {_keys(message)}"
    return f"its pattern {pattern!r} does not match: " + "; ".join(
        f"{key!r} {_topic_difference(pattern.split('.') if pattern else [], words)}"
        for key, words in zip(message.keys, message.words, strict=True)
    )


def _topic_difference(pattern: list[str], words: list[str]) -> str:
    if "#" in pattern:
        missing = [word for word in pattern if word not in ("#", "*") and word not in words]
        if missing:
            return f"lacks the word {missing[0]!r}"
        needed = sum(word != "#" for word in pattern)
        if len(words) < needed:
            return f"has {_count(len(words))}, and {needed} at least are wanted"
        return "has its words in other places"
    if len(words) != len(pattern):
        return f"has {_count(len(words))}, and {len(pattern)} are wanted"
    for number, (wanted, word) in enumerate(zip(pattern, words, strict=True), start=1):
        if wanted not in ("*", word):
            return f"has {word!r} as word {number}, and {wanted!r} is wanted"
    return "differs"


def _count(words: int) -> str:
    return f"{words} word{'' if words == 1 else 's'}"


def _headers(binding: Binding, message: RoutedMessage, goes: bool) -> str:
    match = str(binding.arguments.get("x-match", "all"))
    wanted = [
        (name, value)
        for name, value in binding.arguments.items()
        if name != "x-match" and (match.endswith("-with-x") or not name.startswith("x-"))
    ]
    shown = ", ".join(f"{name}={value!r}" for name, value in wanted)
    one_is_enough = match.startswith("any")
    if not wanted:
        return "it asks for no header" + (", and x-match any finds none" if one_is_enough else "")
    if goes:
        return f"it asks for {'one' if one_is_enough else 'all'} of {shown}"
    differences = [text for name, value in wanted if (text := _header_difference(name, value, message.headers))]
    return f"it asks for {'one' if one_is_enough else 'all'} of {shown}, but {' and '.join(differences)}"


def _header_difference(name: str, wanted: object, headers: Mapping[str, Any]) -> str:
    if name not in headers:
        return f"there is no header {name}"
    value = headers[name]
    if type(value) is type(wanted):
        return "" if value == wanted else f"{name} is {value!r}"
    return f"{name} is {value!r}, {_type_name(value)} rather than {_type_name(wanted)}"


def _type_name(value: object) -> str:
    match value:
        case bool():
            return "a truth value"
        case int():
            return "a whole number"
        case float():
            return "a number with decimals"
        case str():
            return "a text"
        case _:
            return f"of type {type(value).__name__}"


_REASONS: Final = {"direct": _direct, "fanout": _fanout, "topic": _topic, "headers": _headers}


def _later(
    topology: Topology,
    exchange: str,
    routing_key: str,
    headers: Mapping[str, Any] | None,
    planned: Itinerary,
) -> Iterator[str]:
    """What queues do with it that pass messages on after a time."""
    held = {
        one.name
        for one in topology.queues
        if "x-message-ttl" in one.arguments and "x-dead-letter-exchange" in one.arguments
    }
    if not held.intersection(planned.queues):
        return
    try:
        arrivals = Model(topology).travel(exchange, routing_key, headers)
    except (InvalidTopologyError, UnsupportedTargetError) as error:
        yield f"its route after the wait is unknown: {error}"
        return
    for one in arrivals:
        if not one.hops:
            continue
        waited = f"after {format_delay(one.at)} in {', '.join(map(repr, one.hops))}"
        match one.fate:
            case "arrived":
                yield f"{waited}: in the queue {one.queue!r}, with the key {one.routing_key!r}"
            case "stuck":
                yield f"{waited}: {_nobody(topology, one)}, and the queue {one.queue!r} keeps it"
            case _:
                yield f"{waited}: {_nobody(topology, one)}, and it is lost"


def _nobody(topology: Topology, arrival: Arrival) -> str:
    """Why a message that has waited goes nowhere."""
    if arrival.exchange == DEFAULT_EXCHANGE:
        return f"it is for the queue {arrival.routing_key!r}, which is not here"
    if arrival.exchange not in {one.name for one in (*PREDECLARED, *topology.exchanges)}:
        return f"it is for the exchange {arrival.exchange!r}, which is not here"
    return f"the exchange {arrival.exchange!r} has no match for it"
