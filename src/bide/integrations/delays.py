"""Delayed publishes for the clients of other libraries, without I/O.

A framework keeps its own connection, pool and confirms. :class:`Delays` computes what it has to declare and publish::

    delays = Delays(bide.Clock())
    publish = delays.route(
        bide.QueueTarget("mail", isolated=True),
        delay="5m",
        server_properties=connection.server_properties,
        properties={"headers": {...}, "priority": 3},  # by their AMQP names
    )
    for declaration in delays.declarations(publish, connection=connection):  # nothing, for most messages
        declaration.call(channel)
    delays.declared(publish, connection=connection)
    channel.basic_publish(publish.exchange, publish.routing_key, body, publish.properties)

If a publish fails because an exchange does not exist, call :meth:`Delays.forget`, and publish again from the start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, Final
from weakref import WeakKeyDictionary

from bide.admin.apply import MINIMUM_RELEASE
from bide.amqp.handshake import release_of
from bide.delay.clock import Clock
from bide.delay.protocol import Target
from bide.delay.received import SentMessage, restore
from bide.durations import DelayLike, DueTimeLike, parse_delay, parse_due_time, sending_time
from bide.errors import InvalidDueTimeError, InvalidInputError, UnsupportedBrokerError
from bide.integrations.declarations import Declaration, declarations_of
from bide.messages.prepared import PreparedMessage, checked_headers
from bide.runtime.bounded_cache import BoundedCache
from bide.topology import Binding, Queue, Topology

REBIND_AFTER: Final = 30.0
"""Seconds after which the queues and bindings that a message needs are declared again, in case they were deleted."""

_PRIORITY_HOLDS_BACK: Final = ((4, 0), (4, 3))
"""From the first release up to the last before the second, a waiting message with a priority holds back others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedPublish:
    """What to publish for one delayed message.

    Attributes:
        exchange: the exchange to publish to; empty for the default exchange.
        routing_key: the routing key to publish with.
        properties: the properties to send, headers included, by their AMQP names.
        due: the due time.
        hops: the number of queues that the message passes before its target; zero if it is already due.
        requires: the queues and bindings that the message needs, besides the infrastructure's core.
    """

    exchange: str
    routing_key: str
    properties: Mapping[str, Any]
    due: datetime
    hops: int
    requires: Topology


class _Declared:
    """The queues and bindings that a connection has declared after the infrastructure's core, with the times."""

    def __init__(self) -> None:
        self._items = BoundedCache[Queue | Binding, float]()

    def add(self, topology: Topology) -> None:
        """Remember a topology that was declared."""
        now = time.monotonic()
        self._items.update(dict.fromkeys((*topology.queues, *topology.bindings), now))

    def missing(self, needed: Topology) -> Topology:
        """The part of a topology of queues and bindings that was not declared recently."""
        since = time.monotonic() - REBIND_AFTER
        return Topology(
            queues=(one for one in needed.queues if self._items.get(one, -inf) <= since),
            bindings=(one for one in needed.bindings if self._items.get(one, -inf) <= since),
        )


class Delays:
    """Routes of delayed messages, and what each connection still has to declare for them.

    One object serves all connections and threads of a process.

    Args:
        infrastructure: the delay infrastructure; ``Clock()`` by default.

    Raises:
        InvalidInputError: the infrastructure is not a ``Clock``.
    """

    def __init__(self, infrastructure: Clock | None = None) -> None:
        if infrastructure is not None and not isinstance(infrastructure, Clock):
            raise InvalidInputError(
                f"adapters delay messages in Clock only, not in {infrastructure!r}: give a bide.Clock(...)"
            )
        self.infrastructure = infrastructure if infrastructure is not None else Clock()
        self._declared: WeakKeyDictionary[object, _Declared] = WeakKeyDictionary()
        self._settled = BoundedCache[str, None]()
        self._lock = threading.Lock()

    def route(
        self,
        target: Target,
        *,
        delay: DelayLike | None = None,
        due: DueTimeLike | None = None,
        server_properties: Mapping[str, Any],
        properties: Mapping[str, Any] | None = None,
    ) -> DelayedPublish:
        """Compute what to publish now, so that the message reaches its target after the delay or at the due time.

        With a due time in the past, the message goes straight to its target.

        Args:
            target: an exchange with a routing key, or a queue. An isolated queue gets the message with the default
                exchange and the queue's name as its exchange and routing key, as if it had not been delayed.
            delay: the time from now to the delivery. Give either this or ``due``.
            due: the due time.
            server_properties: the properties that the broker sent when the connection was opened.
            properties: the message's properties by their AMQP names. Headers of an earlier delay are removed.

        Raises:
            InvalidDelayError: the delay is negative, or too long.
            InvalidDueTimeError: the due time has no time zone, or both or none of delay and due time were given.
            InvalidNameError: the target's name or key is too long or invalid.
            ReservedHeaderError: the message has a header CC or BCC.
            UnsupportedBrokerError: the broker is older than RabbitMQ 3.10.
            UnsupportedTargetError: the infrastructure cannot reach the target.
        """
        if (delay is None) == (due is None):
            raise InvalidDueTimeError("a delayed message needs one of delay= and due=: give one")
        now = sending_time()
        release = release_of(server_properties)
        if release and release < MINIMUM_RELEASE:
            raise UnsupportedBrokerError(
                f"the broker is RabbitMQ {server_properties['version']}, older than 3.10: upgrade it; quorum queues "
                "dead-letter without losing messages only since 3.10"
            )
        infrastructure = self.infrastructure.for_release(release)
        at = now + parse_delay(delay) if delay is not None else parse_due_time(due)  # type: ignore[arg-type]  # one of them is set
        values = dict(properties or {})
        # A message that is sent again, as retries are, has headers of its earlier delay.
        cleaned = restore("", "", {"headers": values.get("headers")}).values["headers"]
        values["headers"] = checked_headers(cleaned or {}, delayed=True)
        message_id = values.get("message_id") or ""
        message = PreparedMessage(target=target, body=b"", message_id=message_id, due=at, values=values)
        route = message.route(infrastructure, now)
        assert route is not None
        sent = message.wire_values(route, now)
        first, last = _PRIORITY_HOLDS_BACK
        if "priority" in values and not first <= release < last:
            sent["priority"] = values["priority"]
        return DelayedPublish(
            exchange=route.exchange,
            routing_key=route.routing_key,
            properties=sent,
            due=at,
            hops=route.hops,
            requires=infrastructure.digit_topology(route.digits) | route.requires,
        )

    def declarations(self, publish: DelayedPublish, *, connection: object) -> Iterator[Declaration]:
        """The calls that declare what a message needs and this connection has not declared recently, in order.

        Args:
            connection: a key for the connection to the broker: any object that can be weakly referenced, and lives as
                long as the connection, or until :meth:`forget`.
        """
        if not publish.hops:
            return iter(())
        with self._lock:
            known = self._declared.get(connection)
            missing = publish.requires if known is None else known.missing(publish.requires)
            is_new = any(one.name not in self._settled for one in missing.queues)
        if known is None:
            missing = self.infrastructure.core_topology() | missing
        return declarations_of(missing, settle=self.infrastructure.delivery_exchange if is_new else "")

    def declared(self, publish: DelayedPublish, *, connection: object) -> None:
        """Remember that a connection has declared what a message needs."""
        with self._lock:
            known = self._declared.setdefault(connection, _Declared())
            known.add(known.missing(publish.requires))
            self._settled.update(dict.fromkeys(one.name for one in publish.requires.queues))

    def forget(self, connection: object) -> None:
        """Declare everything again before the next message of a connection."""
        with self._lock:
            self._declared.pop(connection, None)
            self._settled.clear()

    def owns(self, name: str) -> bool:
        """Whether an exchange or queue of this name belongs to the delay infrastructure."""
        return self.infrastructure.owns(name)

    def restore(self, exchange: str, routing_key: str, properties: Mapping[str, Any]) -> SentMessage:
        """The exchange, routing key, properties and due time with which a received message was sent."""
        return restore(exchange, routing_key, properties)
