"""Explanation of a message's route: its exchanges, and why each binding matches or not.

The rules of :mod:`bide.topology.exchange_types` decide whether a binding matches; this module only gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bide.durations import format_delay
from bide.errors import InvalidTopologyError, UnsupportedTargetError
from bide.runtime.wording import quantity
from bide.topology import DEFAULT_EXCHANGE, Binding, DestinationType, Exchange, Topology
from bide.topology.exchange_types import RoutedMessage, binding_table
from bide.topology.routing import PREDECLARED, Arrival, Model

CHOOSERS: Final[Mapping[str, str]] = {
    "x-consistent-hash": "by the hash of",
    "x-modulus-hash": "by the hash of",
    "x-random": "at random, whatever",
    "x-local-random": "at random among those on the publisher's node, whatever",
}
"""Exchange types that choose one binding for each message, with the words that describe the choice."""

_INNER: Final = {"x-recent-history": "fanout"}
_MODELLED: Final = frozenset({"direct", "topic", "fanout", "headers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    """Whether and why an exchange routes the message to one destination.

    Attributes:
        kind: ``"queue"`` or ``"exchange"``.
        name: the name of the destination.
        routed: whether the message is routed there; None if only the broker knows.
        reason: why, or why not.
    """

    kind: DestinationType
    name: str
    routed: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedExchange:
    """An exchange on the route of a message.

    Attributes:
        name: the name of the exchange.
        type: the type of the exchange.
        certain: whether the message certainly reaches the exchange.
        decisions: the decisions about its destinations, one for each binding.
    """

    name: str
    type: str
    certain: bool
    decisions: tuple[RouteDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Itinerary:
    """The route of a message.

    Attributes:
        exchanges: the exchanges, in the order in which the message reaches them.
        queues: the queues that certainly get the message.
        possible: the queues that get the message only if an exchange chooses them.
        later: what happens after delays, one sentence for each copy.
    """

    exchanges: tuple[VisitedExchange, ...]
    queues: tuple[str, ...]
    possible: tuple[str, ...]
    later: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The itinerary as JSON."""
        return {
            "queues": list(self.queues),
            "possible": list(self.possible),
            "later": list(self.later),
            "exchanges": [
                {
                    "name": visit.name,
                    "type": visit.type,
                    "certain": visit.certain,
                    "decisions": [
                        {"kind": one.kind, "name": one.name, "routed": one.routed, "reason": one.reason}
                        for one in visit.decisions
                    ],
                }
                for visit in self.exchanges
            ],
        }


def plan(
    topology: Topology, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None
) -> Itinerary:
    """Explain where a message that is published to an exchange would go.

    Raises:
        TargetNotFoundError: the exchange does not exist.
        AccessRefusedError: the exchange is internal.
        InvalidInputError: the CC or BCC header is not a list.
        InvalidTopologyError: an exchange of a binding is missing.
    """
    Model(topology).check_open(exchange)
    message = RoutedMessage.published(routing_key, headers)
    planned = _Planner(topology, message).plan(exchange)
    return replace(planned, later=tuple(_after_delays(topology, exchange, routing_key, headers, planned)))


@dataclass(slots=True)
class _Planner:
    topology: Topology
    message: RoutedMessage
    visits: list[VisitedExchange] = field(default_factory=list)

    def plan(self, exchange: str) -> Itinerary:
        exchanges = {one.name: one for one in (*PREDECLARED, *self.topology.exchanges)}
        certain = self._walk(exchange, exchanges, maybe=False, seen=frozenset())
        doubtful = [
            decision.name
            for visit in self.visits
            for decision in visit.decisions
            if decision.routed is None and decision.kind == "exchange"
        ]
        possible = {
            decision.name
            for visit in self.visits
            for decision in visit.decisions
            if decision.routed is None and decision.kind == "queue"
        }
        for name in doubtful:
            known = frozenset(visit.name for visit in self.visits)
            if name not in known:
                possible |= self._walk(name, exchanges, maybe=True, seen=known)
        return Itinerary(
            exchanges=tuple(self.visits), queues=tuple(sorted(certain)), possible=tuple(sorted(possible - certain))
        )

    def _walk(self, start: str, exchanges: Mapping[str, Exchange], *, maybe: bool, seen: frozenset[str]) -> set[str]:
        """Follow the message from an exchange; return the queues that it reaches."""
        queues: set[str] = set()
        known = {start, *seen}
        pending = [start]
        while pending:
            name = pending.pop(0)
            if name != DEFAULT_EXCHANGE and name not in exchanges:
                self.visits.append(VisitedExchange(name=name, type="(missing)", certain=not maybe, decisions=()))
                continue
            visit = self._visit(name, exchanges, certain=not maybe)
            self.visits.append(visit)
            for decision in visit.decisions:
                if decision.routed is False or (decision.routed is None and not maybe):
                    continue
                if decision.kind == "queue":
                    queues.add(decision.name)
                elif decision.name not in known:
                    known.add(decision.name)
                    pending.append(decision.name)
        return queues

    def _visit(self, name: str, exchanges: Mapping[str, Exchange], *, certain: bool) -> VisitedExchange:
        if name == DEFAULT_EXCHANGE:
            decisions = tuple(_default_decisions(self.topology, self.message.keys))
            return VisitedExchange(name=name, type="direct", certain=certain, decisions=decisions)
        exchange = exchanges[name]
        bindings = [one for one in self.topology.bindings if one.source == name]
        decisions = tuple(_decisions(exchange, bindings, self.message))
        alternate = exchange.arguments.get("alternate-exchange")
        if alternate is not None:
            used = all(one.routed is False for one in decisions)
            why = "used, because no binding matches" if used else "not used, because a binding matches"
            if used and alternate == DEFAULT_EXCHANGE:
                used, why = False, "the default exchange, which routes nothing as an alternate"
            decision = RouteDecision(
                kind="exchange", name=str(alternate), routed=used, reason=f"alternate exchange: {why}"
            )
            decisions = (*decisions, decision)
        return VisitedExchange(name=name, type=exchange.type, certain=certain, decisions=decisions)


def _default_decisions(topology: Topology, keys: Sequence[str]) -> Iterator[RouteDecision]:
    names = {one.name for one in topology.queues}
    names |= {one.destination for one in topology.bindings if one.destination_type == "queue"}
    for key in keys:
        there = key in names
        reason = f"the key {key!r} is its name" if there else f"no queue has the name {key!r}, which is the key"
        yield RouteDecision(kind="queue", name=key, routed=there, reason=reason)


def _decisions(exchange: Exchange, bindings: Sequence[Binding], message: RoutedMessage) -> Iterator[RouteDecision]:
    kind = exchange.type
    delayed = ""
    if kind == "x-delayed-message":
        kind = str(exchange.arguments.get("x-delayed-type", "direct"))
        delayed = "after the delay in x-delay: "
    kind = _INNER.get(kind, kind)
    if kind not in _MODELLED:
        alone = len(bindings) == 1
        for binding in bindings:
            yield RouteDecision(
                kind=binding.destination_type,
                name=binding.destination,
                routed=True if alone and kind in CHOOSERS else None,
                reason=_choice(exchange, kind, alone=alone),
            )
        return
    twin = replace(exchange, type=kind)
    for binding in bindings:
        matches = bool(binding_table(twin, [binding]).matches(message))
        reason = delayed + _REASONS[kind](binding, message, matches)
        yield RouteDecision(kind=binding.destination_type, name=binding.destination, routed=matches, reason=reason)


def _choice(exchange: Exchange, kind: str, *, alone: bool) -> str:
    chooser = CHOOSERS.get(kind)
    if chooser is None:
        return f"the choice of an exchange of type {kind!r} is unknown"
    if alone:
        return "it is the only destination"
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


def _direct(binding: Binding, message: RoutedMessage, matches: bool) -> str:
    if matches:
        return f"its binding key is {binding.routing_key!r}" + _by_copy(binding.routing_key in message.keys[:1])
    return f"its binding key is {binding.routing_key!r}, which is not {_keys(message)}"


def _by_copy(by_routing_key: bool) -> str:
    return "" if by_routing_key else ", which is a CC or BCC key"


def _fanout(binding: Binding, message: RoutedMessage, matches: bool) -> str:
    return "a fanout exchange matches every message"


def _topic(binding: Binding, message: RoutedMessage, matches: bool) -> str:
    pattern = binding.routing_key
    if matches:
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
            return f"has {_count(len(words))}, but the pattern needs at least {needed}"
        return "has its words at other positions"
    if len(words) != len(pattern):
        return f"has {_count(len(words))}, but the pattern has {len(pattern)}"
    for number, (wanted, word) in enumerate(zip(pattern, words, strict=True), start=1):
        if wanted not in ("*", word):
            return f"has {word!r} as word {number}, but the pattern has {wanted!r}"
    return "differs"


def _count(words: int) -> str:
    return quantity(words, "word")


def _headers(binding: Binding, message: RoutedMessage, matches: bool) -> str:
    match = str(binding.arguments.get("x-match", "all"))
    wanted = [
        (name, value)
        for name, value in binding.arguments.items()
        if name != "x-match" and (match.endswith("-with-x") or not name.startswith("x-"))
    ]
    shown = ", ".join(f"{name}={value!r}" for name, value in wanted)
    any_matches = match.startswith("any")
    if not wanted:
        return "it requires no header" + (", so x-match any never matches" if any_matches else "")
    requirement = f"it requires {'one' if any_matches else 'all'} of {shown}"
    if matches:
        return requirement
    differences = [text for name, value in wanted if (text := _header_difference(name, value, message.headers))]
    return f"{requirement}, but {' and '.join(differences)}"


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
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a number with decimals"
        case str():
            return "text"
        case _:
            return f"of type {type(value).__name__}"


_REASONS: Final = {"direct": _direct, "fanout": _fanout, "topic": _topic, "headers": _headers}


def _after_delays(
    topology: Topology,
    exchange: str,
    routing_key: str,
    headers: Mapping[str, Any] | None,
    planned: Itinerary,
) -> Iterator[str]:
    """Describe what happens to the message after queues have delayed it."""
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
                yield f"{waited}: {_why_unroutable(topology, one)}, and the queue {one.queue!r} keeps it"
            case _:
                yield f"{waited}: {_why_unroutable(topology, one)}, and it is lost"


def _why_unroutable(topology: Topology, arrival: Arrival) -> str:
    """Why a delayed message reaches no queue."""
    if arrival.exchange == DEFAULT_EXCHANGE:
        return f"its queue {arrival.routing_key!r} is not in the topology"
    if arrival.exchange not in {one.name for one in (*PREDECLARED, *topology.exchanges)}:
        return f"its exchange {arrival.exchange!r} is not in the topology"
    return f"no binding of its exchange {arrival.exchange!r} matches"
