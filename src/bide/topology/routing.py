"""A model of RabbitMQ's routing: where a message goes, and when, without a broker.

The rules are those of RabbitMQ's exchange, dead-letter and message-container modules, the same from 3.10 to 4.3. The
model leaves out limits of queues (length, priority), policies, per-message expiration, consumers, and headers that the
broker adds (``x-death`` and similar). Two rules are easily forgotten:

* CC and BCC keys count at every exchange, exactly like the routing key. They survive dead-lettering unless the queue
  has a dead-letter routing key.
* An exchange uses its alternate exchange only if none of its bindings matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from bide.errors import AccessRefusedError, InvalidTopologyError, TargetNotFoundError
from bide.topology import DEFAULT_EXCHANGE, Argument, Binding, Exchange, Queue, Topology
from bide.topology.exchange_types import BindingTable, Destination, RoutedMessage, binding_table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PREDECLARED: Final = (
    Exchange("amq.direct", "direct"),
    Exchange("amq.fanout", "fanout"),
    Exchange("amq.topic", "topic"),
    Exchange("amq.headers", "headers"),
    Exchange("amq.match", "headers"),
    Exchange("amq.rabbitmq.trace", "topic", internal=True),
)
"""Exchanges of every virtual host, in addition to the default exchange."""

Fate = Literal["arrived", "unroutable", "stuck", "lost"]
"""The fate of a copy of a message; see :attr:`Arrival.fate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The queues that a message reaches from one exchange.

    Attributes:
        queues: the queues that get the message.
        unmatched: the exchanges on the route without a matching binding and without an alternate exchange.
    """

    queues: frozenset[str]
    unmatched: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The end of the route of one copy of a message.

    Attributes:
        queue: the last queue that the copy was in; empty if it reached none.
        at: time since the message was published.
        routing_key: the copy's routing key there.
        headers: the copy's headers there, as the receiver sees them: without BCC.
        hops: the queues that it waited in before, in order.
        exchange: the exchange that routed it last.
        fate: ``arrived``; ``unroutable`` when it was published (returned if mandatory); ``stuck`` if nothing matches
            after a delay and the last queue keeps it (dead-letter strategy at-least-once); ``lost`` if nothing matches
            after a delay and the last queue drops it (at-most-once).
    """

    queue: str
    at: timedelta
    routing_key: str
    headers: Mapping[str, Any] = field(hash=False)
    hops: tuple[str, ...] = ()
    exchange: str = DEFAULT_EXCHANGE
    fate: Fate = "arrived"


class Model:
    """The routing of one topology, indexed once.

    A queue that is bound but not in the topology is treated as existing, without arguments: the topology of a delay
    infrastructure mentions its targets only in bindings.

    Raises:
        InvalidTopologyError: an exchange of a binding is missing.
    """

    def __init__(self, topology: Topology) -> None:
        exchanges = {one.name: one for one in (*PREDECLARED, *topology.exchanges)}
        bindings: dict[str, list[Binding]] = {name: [] for name in exchanges}
        problems = []
        for binding in topology.bindings:
            if binding.source not in exchanges:
                problems.append(
                    f"{describe(binding)}: exchange {binding.source!r} is not in the topology: "
                    "add it, or remove the binding"
                )
            elif binding.destination_type == "exchange" and binding.destination not in exchanges:
                problems.append(
                    f"{describe(binding)}: exchange {binding.destination!r} is not in the topology, so its type is "
                    "unknown: add it, or remove the binding"
                )
            else:
                bindings[binding.source].append(binding)
        if problems:
            raise InvalidTopologyError(problems)
        self._exchanges = {
            name: _Node(one.internal, one.arguments.get("alternate-exchange"), binding_table(one, bindings[name]))
            for name, one in exchanges.items()
        }
        bound = (one.destination for one in topology.bindings if one.destination_type == "queue")
        self._queues = frozenset((*(one.name for one in topology.queues if one.name), *bound))
        self._holds = {one.name: hold for one in topology.queues if (hold := _hold(one)) is not None}

    def route(self, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None) -> Routed:
        """Compute which queues a message published to an exchange reaches.

        Raises:
            TargetNotFoundError: the exchange does not exist.
            AccessRefusedError: the exchange is internal.
            InvalidInputError: the CC or BCC header is not a list.
            UnsupportedTargetError: the message reaches an exchange whose type is not modelled.
        """
        self.check_open(exchange)
        return self._route(exchange, RoutedMessage.published(routing_key, headers))

    def travel(self, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None) -> list[Arrival]:
        """Follow a message to its end, through queues that delay it, on a virtual clock that starts at zero.

        A queue with both a TTL and a dead-letter exchange delays the message by the TTL and sends it on. Any other
        queue is an end of the route.

        Returns:
            one record for each copy, the earliest first; never empty.

        Raises:
            InvalidTopologyError: a dead-letter cycle returns the message to a queue (the broker drops it there).
            TargetNotFoundError, AccessRefusedError, InvalidInputError, UnsupportedTargetError: as for :meth:`route`.
        """
        self.check_open(exchange)
        arrivals: list[Arrival] = []
        origin = _Leg(exchange, RoutedMessage.published(routing_key, headers), timedelta(0), (), "unroutable")
        pending = [origin]
        while pending:
            leg = pending.pop()
            queues = self._route(leg.exchange, leg.message).queues
            if not queues:
                arrivals.append(leg.end(leg.hops[-1] if leg.hops else "", fate=leg.fate_if_unroutable))
            for queue in queues:
                hold = self._holds.get(queue)
                if hold is None:
                    arrivals.append(leg.end(queue, fate="arrived"))
                elif queue in leg.hops:
                    cycle = " -> ".join(repr(name) for name in (*leg.hops[leg.hops.index(queue) :], queue))
                    raise InvalidTopologyError(
                        [f"dead-letter cycle {cycle}: the broker drops a message that returns: break the cycle"]
                    )
                else:
                    pending.append(leg.after(queue, hold))
        return sorted(arrivals, key=lambda one: (one.at, one.queue, one.hops, one.exchange))

    def check_open(self, exchange: str) -> None:
        """Check that clients can publish to an exchange.

        Raises:
            TargetNotFoundError: the exchange does not exist.
            AccessRefusedError: the exchange is internal.
        """
        if exchange == DEFAULT_EXCHANGE:
            return
        found = self._exchanges.get(exchange)
        if found is None:
            raise TargetNotFoundError(f"exchange {exchange!r} is not in the topology: add it, or publish to another")
        if found.internal:
            raise AccessRefusedError(f"exchange {exchange!r} is internal: publish to an exchange that is bound to it")

    def _route(self, exchange: str, message: RoutedMessage) -> Routed:
        if exchange == DEFAULT_EXCHANGE:
            named = self._queues.intersection(message.keys)
            return Routed(queues=named, unmatched=() if named else (DEFAULT_EXCHANGE,))
        queues: set[str] = set()
        unmatched: list[str] = []
        seen = {exchange}
        pending = [exchange]
        while pending:
            name = pending.pop()
            here = self._exchanges.get(name)
            destinations: Collection[Destination] = () if here is None else here.table.matches(message)
            if not destinations:
                alternate = None if here is None else here.alternate
                # As an alternate, the default exchange routes nothing, because its bindings are implicit.
                if alternate in self._exchanges:
                    destinations = (("exchange", alternate),)
                else:
                    unmatched.append(name)
            for kind, destination in destinations:
                if kind == "queue":
                    queues.add(destination)
                elif destination not in seen:
                    seen.add(destination)
                    pending.append(destination)
        return Routed(queues=frozenset(queues), unmatched=tuple(sorted(unmatched)))


def route(topology: Topology, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None) -> Routed:
    """:meth:`Model.route` for a single message; build a :class:`Model` for several."""
    return Model(topology).route(exchange, routing_key, headers)


def travel(
    topology: Topology, exchange: str, routing_key: str = "", headers: Mapping[str, Any] | None = None
) -> list[Arrival]:
    """:meth:`Model.travel` for a single message; build a :class:`Model` for several."""
    return Model(topology).travel(exchange, routing_key, headers)


def describe(binding: Binding) -> str:
    """Describe a binding for an error message."""
    return (
        f"the binding from exchange {binding.source!r} to {binding.destination_type} {binding.destination!r} "
        f"with key {binding.routing_key!r}"
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """An exchange with its indexed bindings."""

    internal: bool
    alternate: Argument | None
    table: BindingTable


@dataclass(frozen=True, slots=True)
class _Hold:
    """How a queue delays a message, and where the message goes then."""

    ttl: timedelta
    exchange: str
    routing_key: str | None
    fate_if_unroutable: Fate


def _hold(queue: Queue) -> _Hold | None:
    ttl = queue.arguments.get("x-message-ttl")
    exchange = queue.arguments.get("x-dead-letter-exchange")
    if ttl is None or exchange is None:
        return None
    key = queue.arguments.get("x-dead-letter-routing-key")
    # Quorum queues dead-letter at most once if their overflow behaviour is not reject-publish.
    kept = (
        queue.type == "quorum"
        and queue.arguments.get("x-dead-letter-strategy") == "at-least-once"
        and queue.arguments.get("x-overflow") == "reject-publish"
    )
    return _Hold(
        timedelta(milliseconds=int(ttl)), str(exchange), None if key is None else str(key), "stuck" if kept else "lost"
    )


@dataclass(frozen=True, slots=True)
class _Leg:
    """A copy of a message on its way to an exchange."""

    exchange: str
    message: RoutedMessage
    at: timedelta
    hops: tuple[str, ...]
    fate_if_unroutable: Fate

    def after(self, queue: str, hold: _Hold) -> _Leg:
        return _Leg(
            hold.exchange,
            self.message if hold.routing_key is None else self.message.with_key(hold.routing_key),
            self.at + hold.ttl,
            (*self.hops, queue),
            hold.fate_if_unroutable,
        )

    def end(self, queue: str, *, fate: Fate) -> Arrival:
        return Arrival(
            queue=queue,
            at=self.at,
            routing_key=self.message.keys[0],
            headers=self.message.headers,
            hops=self.hops,
            exchange=self.exchange,
            fate=fate,
        )
