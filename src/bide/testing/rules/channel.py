"""A channel on the broker's side: consumers, unsettled deliveries, settlement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bide.testing.rules.consumers import BrokerConsumer
from bide.testing.rules.entry import Entry
from bide.testing.rules.errors import access_refused, channel_error, not_modelled, precondition_failed
from bide.testing.rules.queue import BrokerQueue
from bide.testing.rules.stream import StreamQueue
from bide.testing.rules.virtual_host import REPLY_TO, Published, VirtualHost

_LAST: Final = -(1 << 31)
"""The lowest consumer priority. A new consumer with it does not replace the single active one in any release."""


class Receiver(Protocol):
    """The client's end of a channel."""

    def delivered(self, delivery: BrokerDelivery) -> None:
        """Handle a delivery to a consumer."""

    def cancelled(self, tag: str) -> None:
        """Handle the deletion of a consumer's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDelivery:
    """A delivery to the client.

    Attributes:
        consumer_tag: the consumer tag; None for basic.get.
        delivery_tag: the delivery tag.
        redelivered: whether the message was delivered before.
        properties: the message's properties by AMQP name, with headers that the broker adds.
        left: number of messages left in the queue, for basic.get.
    """

    consumer_tag: str | None
    delivery_tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: Mapping[str, Any]
    body: bytes
    left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsettled:
    queue: BrokerQueue
    consumer: BrokerConsumer | None
    entry: Entry


class BrokerChannel:
    """A channel of a connection.

    Args:
        host: the virtual host.
        connection: identifies the connection, as owner of exclusive queues.
        receiver: the client's end.
    """

    def __init__(self, host: VirtualHost, connection: object, receiver: Receiver) -> None:
        self._host = host
        self._connection = connection
        self._receiver = receiver
        self._prefetch = 0
        self._deliveries = 0
        self._reply_queue: str | None = None
        self._unsettled: dict[int, _Unsettled] = {}
        self._consumers: dict[str, tuple[BrokerQueue, BrokerConsumer]] = {}

    @property
    def unsettled(self) -> Collection[int]:
        """The tags of unsettled deliveries."""
        return self._unsettled.keys()

    def qos(self, prefetch: int) -> None:
        """Set the prefetch of consumers that are started from now on; 0 means no limit."""
        self._prefetch = prefetch

    def consume(
        self, queue: str, tag: str, *, no_ack: bool, exclusive: bool, arguments: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Register a consumer. Deliveries begin when the returned function is called.

        Raises:
            BrokerError: the queue does not exist or is in exclusive use, or the tag is in use.
        """
        if queue == REPLY_TO:
            queue = self._make_reply_queue(no_ack=no_ack)
        found = self._host.queue(queue, owner=self._connection)
        if tag in self._consumers:
            raise channel_error(530, f"NOT_ALLOWED - attempt to reuse consumer tag '{tag}'")
        is_classic = found.definition.type == "classic"
        if is_classic and (found.consumers.is_exclusive or (exclusive and len(found.consumers))):
            raise access_refused(f"queue '{queue}' in vhost '{self._host.name}' in exclusive use")
        priority = arguments.get("x-priority", 0)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise precondition_failed(f"invalid arg 'x-priority' for consumer: {priority!r}")
        if priority not in (0, _LAST) and found.definition.arguments.get("x-single-active-consumer") is True:
            not_modelled("consumer priorities (x-priority) together with a single active consumer")
        consumer = BrokerConsumer(
            tag,
            self,
            prefetch=self._prefetch,
            no_ack=no_ack,
            exclusive=exclusive and is_classic,
            priority=priority,
            deliver=lambda consumer, entry: self._deliver(found, consumer, entry),
            cancelled=lambda consumer: self._cancelled(consumer),
        )
        if isinstance(found, StreamQueue):
            found.prepare(consumer, arguments)
        self._consumers[tag] = (found, consumer)

        def start() -> None:
            with self._host.turn():
                found.consume(consumer)

        return start

    def publish(self, exchange: str, routing_key: str, properties: Mapping[str, Any], body: bytes) -> Published:
        """Publish a message. If it asks for direct reply-to, replies come to this channel.

        Raises:
            BrokerError: the exchange does not exist, or refuses the message.
        """
        if properties.get("reply_to") == REPLY_TO:
            if self._reply_queue is None:
                raise precondition_failed("fast reply consumer does not exist")
            properties = {**properties, "reply_to": self._reply_queue}
        with self._host.turn():
            return self._host.publish(exchange, routing_key, properties, body, publisher=self)

    def _make_reply_queue(self, *, no_ack: bool) -> str:
        if not no_ack:
            raise precondition_failed("reply consumer cannot acknowledge")
        if self._reply_queue is not None:
            raise precondition_failed("reply consumer already set")
        self._reply_queue = self._host.make_reply_queue()
        return self._reply_queue

    def cancel(self, tag: str) -> None:
        """Cancel a consumer; its deliveries stay unsettled."""
        found = self._consumers.pop(tag, None)
        if found is not None:
            queue, consumer = found
            if queue.name == self._reply_queue:
                self._reply_queue = None
            with self._host.turn():
                queue.cancel(consumer)

    def get(self, queue: str, *, no_ack: bool) -> BrokerDelivery | None:
        """Take one message (basic.get); None if the queue is empty.

        Raises:
            BrokerError: the queue does not exist, or does not support basic.get.
        """
        found = self._host.queue(queue, owner=self._connection)
        arguments = found.definition.arguments
        if found.definition.type == "quorum" and arguments.get("x-single-active-consumer") is True:
            raise channel_error(
                405,
                f"RESOURCE_LOCKED - cannot obtain access to locked queue '{queue}' in vhost '{self._host.name}'. "
                "basic.get operations are not supported by quorum queues with single active consumer",
            )
        with self._host.turn():
            taken = found.get()
            if taken is None:
                return None
            entry, left = taken
            if not no_ack:
                return self._deliver_unsettled(found, None, entry, left=left)
            self._deliveries += 1
            return self._delivery(found, None, entry, left=left)

    def ack(self, delivery_tag: int, *, multiple: bool) -> None:
        """Acknowledge deliveries.

        Raises:
            BrokerError: the delivery tag is unknown.
        """
        with self._host.turn():
            for queue, _ in self._settle(delivery_tag, multiple=multiple):
                queue.acknowledge()

    def reject(self, delivery_tag: int, *, multiple: bool, requeue: bool, failed: bool) -> None:
        """Requeue deliveries, or dead-letter them.

        Args:
            failed: whether this counts as a failed attempt from 4.3 on.

        Raises:
            BrokerError: the delivery tag is unknown.
        """
        with self._host.turn():
            for queue, entries in self._settle(delivery_tag, multiple=multiple):
                if requeue:
                    queue.requeue(entries, failed=failed)
                else:
                    queue.discard(entries)

    def close(self) -> None:
        """Cancel the consumers, and requeue unsettled messages."""
        with self._host.turn():
            entries: dict[BrokerQueue, list[Entry]] = {}
            for one in self._unsettled.values():
                entries.setdefault(one.queue, []).append(one.entry)
            self._unsettled.clear()
            consumers: dict[BrokerQueue, list[BrokerConsumer]] = {}
            for queue, consumer in self._consumers.values():
                consumers.setdefault(queue, []).append(consumer)
            self._consumers.clear()
            for queue in {**consumers, **entries}:
                if not queue.is_gone:
                    queue.lose_channel(consumers.get(queue, []), entries.get(queue, []))

    def _settle(self, delivery_tag: int, *, multiple: bool) -> list[tuple[BrokerQueue, list[Entry]]]:
        """Remove deliveries from the unsettled ones, and return them by queue."""
        if multiple:
            tags = [tag for tag in self._unsettled if not delivery_tag or tag <= delivery_tag]
        else:
            tags = [delivery_tag] if delivery_tag in self._unsettled else []
        if not tags and not (multiple and not delivery_tag):
            raise precondition_failed(f"unknown delivery tag {delivery_tag}")
        by_queue: dict[BrokerQueue, list[Entry]] = {}
        for tag in tags:
            one = self._unsettled.pop(tag)
            by_queue.setdefault(one.queue, []).append(one.entry)
            if one.consumer is not None:
                one.queue.settled(one.consumer)
        return [(queue, entries) for queue, entries in by_queue.items() if not queue.is_gone]

    def _deliver(self, queue: BrokerQueue, consumer: BrokerConsumer, entry: Entry) -> None:
        if consumer.no_ack:
            self._deliveries += 1
            self._receiver.delivered(self._delivery(queue, consumer, entry))
        else:
            self._receiver.delivered(self._deliver_unsettled(queue, consumer, entry))

    def _deliver_unsettled(
        self, queue: BrokerQueue, consumer: BrokerConsumer | None, entry: Entry, *, left: int = 0
    ) -> BrokerDelivery:
        self._deliveries += 1
        self._unsettled[self._deliveries] = _Unsettled(queue=queue, consumer=consumer, entry=entry)
        return self._delivery(queue, consumer, entry, left=left)

    def _delivery(
        self, queue: BrokerQueue, consumer: BrokerConsumer | None, entry: Entry, *, left: int = 0
    ) -> BrokerDelivery:
        message = entry.message
        counts = queue.counts(entry, by_get=consumer is None)
        return BrokerDelivery(
            consumer_tag=None if consumer is None else consumer.tag,
            delivery_tag=self._deliveries,
            redelivered=entry.redelivered,
            exchange=message.exchange,
            routing_key=message.routing_key,
            properties=message.as_delivered(counts, release=self._host.release),
            body=message.body,
            left=left,
        )

    def _cancelled(self, consumer: BrokerConsumer) -> None:
        if self._consumers.pop(consumer.tag, None) is not None:
            self._receiver.cancelled(consumer.tag)
