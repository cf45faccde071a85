"""Rules that classic and quorum queues share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from bide.testing.rules.clock import Timer, VirtualClock
from bide.testing.rules.consumers import BrokerConsumer, Consumers
from bide.testing.rules.entry import Entry, EntryOrder
from bide.testing.rules.message import Reason, StoredMessage
from bide.topology import Queue

Release = tuple[int, ...]


class Surroundings(Protocol):
    """The virtual host, as a queue sees it.

    Attributes:
        name: the name of the virtual host.
        clock: the virtual clock.
        release: the release of RabbitMQ whose rules apply.
    """

    name: str
    clock: VirtualClock
    release: Release

    def run_later(self, work: Callable[[], None]) -> None:
        """Call a function after the current operation."""

    def call_at(self, microseconds: int, callback: Callable[[], None]) -> Timer:
        """See :meth:`bide.testing.rules.clock.VirtualClock.call_at`."""

    def dead_letter(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> None:
        """Publish a dead letter, at most once, after the current operation."""

    def dead_letter_of(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> StoredMessage:
        """Make the dead letter of a message."""

    def queues_for(self, queue: BrokerQueue, dead_letter: StoredMessage, reason: Reason) -> Sequence[BrokerQueue]:
        """The queues that a dead letter is routed to, without those in which it would loop."""

    def remove_queue(self, queue: BrokerQueue) -> None:
        """Delete a queue with its messages."""


class BrokerQueue(ABC):
    """A queue.

    Args:
        definition: the queue as declared.
        surroundings: its virtual host.
        owner: the connection that has exclusive use of it, or None.
        order: the order of ready messages.
        keeps_turn: see :class:`bide.testing.rules.consumers.Consumers`.

    Attributes:
        is_gone: whether the queue was deleted.
    """

    def __init__(
        self,
        definition: Queue,
        surroundings: Surroundings,
        *,
        owner: object | None,
        order: EntryOrder,
        keeps_turn: bool,
    ) -> None:
        arguments = definition.arguments
        self.definition = definition
        self.name = definition.name
        self.owner = owner
        self.is_gone = False
        self.consumers = Consumers(
            single_active=arguments.get("x-single-active-consumer") is True,
            largest_prefetch_first=definition.type == "quorum" and surroundings.release >= (4, 0),
            keeps_turn=keeps_turn,
        )
        self.dead_letter_exchange = _text(arguments.get("x-dead-letter-exchange"))
        self.dead_letter_key = _text(arguments.get("x-dead-letter-routing-key"))
        self._surroundings = surroundings
        self._clock = surroundings.clock
        self._ready = order
        self._numbers = count(1)
        self._message_ttl = _integer(arguments.get("x-message-ttl"))
        self._expires = _integer(arguments.get("x-expires"))
        self._max_length = _integer(arguments.get("x-max-length"))
        self._max_bytes = _integer(arguments.get("x-max-length-bytes"))
        self._overflow = str(arguments.get("x-overflow", "drop-head"))
        self._ready_bytes = 0
        self._expiry_timer: Timer | None = None
        self._idle_timer: Timer | None = None
        self.mark_used()

    # -- operations

    @property
    def message_count(self) -> int:
        """Number of ready messages."""
        return len(self._ready)

    @property
    def consumer_count(self) -> int:
        """Number of consumers that a declaration reports."""
        return len(self.consumers)

    @abstractmethod
    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """Add a message; False if the queue refuses it.

        Args:
            publisher: the channel or queue that waits for the confirm; None for an at-most-once dead letter.
        """

    @abstractmethod
    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """Requeue messages.

        Args:
            failed: whether this counts as a failed attempt, if the queue distinguishes that.
        """

    @abstractmethod
    def _return_from_lost(self, entries: Sequence[Entry]) -> None:
        """Requeue messages of a lost channel."""

    @abstractmethod
    def counts(self, entry: Entry, *, by_get: bool) -> dict[str, int]:
        """The headers with delivery counts that a delivered message gets.

        Args:
            by_get: whether it is delivered by basic.get instead of to a consumer.
        """

    def get(self) -> tuple[Entry, int] | None:
        """Remove one message; returns it with the number of messages left, or None if there is none."""
        self.mark_used()
        if not self.message_count:
            return None
        entry = self._take_first()
        entry.recipient = None
        return entry, self._count_after_get()

    def consume(self, consumer: BrokerConsumer) -> None:
        """Start to deliver messages to a consumer."""
        self.consumers.add(consumer)
        self.mark_used()
        self._changed()

    def cancel(self, consumer: BrokerConsumer) -> None:
        """Cancel a consumer; its messages stay unsettled."""
        if not self._remove_consumers([consumer]):
            self._changed()

    def lose_channel(self, consumers: Sequence[BrokerConsumer], entries: Sequence[Entry]) -> None:
        """Remove the consumers of a lost channel, and requeue its messages before other consumers get any."""
        if self._remove_consumers(consumers):
            return
        if entries:
            self._return_from_lost(entries)
        self._changed()

    def _remove_consumers(self, consumers: Sequence[BrokerConsumer]) -> bool:
        """Remove consumers; True if the queue was deleted with the last of them."""
        for one in consumers:
            self.consumers.remove(one)
        if consumers and not len(self.consumers):
            if self.definition.auto_delete:
                self._surroundings.remove_queue(self)
                return True
            self.mark_used()
        return False

    def settled(self, consumer: BrokerConsumer, number: int = 1) -> None:
        """Reduce a consumer's number of unsettled messages. Call this before the messages are requeued or discarded."""
        consumer.unsettled -= number
        self.consumers.on_settled(consumer)

    def acknowledge(self) -> None:
        """Deliver more messages after some were acknowledged."""
        self._changed()

    @abstractmethod
    def discard(self, entries: Sequence[Entry]) -> None:
        """Dead-letter rejected messages, and deliver more."""

    def purge(self) -> int:
        """Delete the ready messages; returns their number."""
        entries = self._clear()
        self._changed()
        return entries

    def remove(self) -> int:
        """Delete the queue, and notify its consumers; returns the number of deleted messages."""
        self.is_gone = True
        entries = self._clear()
        for timer in (self._expiry_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        for consumer in self.consumers:
            self.consumers.remove(consumer)
            consumer.cancelled(consumer)
        return entries

    def mark_used(self) -> None:
        """Restart the time after which the unused queue expires."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._expires is not None and not len(self.consumers):
            due = self._clock.microseconds + self._expires * 1000
            self._idle_timer = self._surroundings.call_at(due, self._expire_itself)

    # -- for the types of queues

    def _take_first(self) -> Entry:
        """Remove the first message; there must be one."""
        entry = self._ready.pop()
        self._ready_bytes -= entry.size
        return entry

    def _take_expired(self) -> list[Entry]:
        """Remove expired messages at the head."""
        expired = self._ready.pop_expired(self._clock.microseconds)
        self._ready_bytes -= sum(one.size for one in expired)
        return expired

    def _clear(self) -> int:
        entries = self._ready.clear()
        self._ready_bytes = 0
        return len(entries)

    def _hand_over(self, consumer: BrokerConsumer, entry: Entry) -> None:
        if not consumer.no_ack:
            consumer.unsettled += 1
        entry.recipient = consumer
        self.consumers.on_delivered(consumer)
        consumer.deliver(consumer, entry)

    @abstractmethod
    def _changed(self) -> None:
        """Deliver and expire messages after a change of the queue or its consumers."""

    @abstractmethod
    def _count_after_get(self) -> int:
        """Process the messages behind one that basic.get removed; returns how many are left."""

    def _dead_letter(self, entries: Sequence[Entry], reason: Reason) -> None:
        if self.dead_letter_exchange is not None:
            for entry in entries:
                self._surroundings.dead_letter(self, self.with_count(entry), reason)

    def with_count(self, entry: Entry) -> StoredMessage:
        """The message with the number of failures that its dead letter carries."""
        if entry.failed is None or self._surroundings.release < (4, 0):
            return entry.message
        return replace(entry.message, delivery_count=entry.failed)

    def _expiry_of(self, message: StoredMessage) -> int | None:
        """The TTL of a message in this queue, in milliseconds."""
        limits = [one for one in (self._message_ttl, message.expiration) if one is not None]
        return min(limits, default=None)

    def _is_over(self, length: int, size: int) -> bool:
        return (self._max_length is not None and length > self._max_length) or (
            self._max_bytes is not None and size > self._max_bytes
        )

    def _expire_itself(self) -> None:
        if not self.is_gone:
            self._surroundings.remove_queue(self)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
