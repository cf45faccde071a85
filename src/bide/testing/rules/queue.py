"""What classic and quorum queues have in common."""

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
    """What a queue needs from its virtual host.

    Attributes:
        clock: its time.
        release: the release of RabbitMQ whose rules count.
    """

    clock: VirtualClock
    release: Release

    def later(self, work: Callable[[], None]) -> None:
        """Have something done as soon as what is under way is done."""

    def call_at(self, microseconds: int, callback: Callable[[], None]) -> Timer:
        """See :meth:`bide.testing.rules.clock.VirtualClock.call_at`."""

    def dead_letter(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> None:
        """Publish a dead letter, at most once, as soon as what is under way is done."""

    def dead_letter_of(self, queue: BrokerQueue, message: StoredMessage, reason: Reason) -> StoredMessage:
        """The dead letter of a message."""

    def queues_for(self, queue: BrokerQueue, letter: StoredMessage, reason: Reason) -> Sequence[BrokerQueue]:
        """The queues that a dead letter goes to, without those that it would come back to for ever."""

    def remove_queue(self, queue: BrokerQueue) -> None:
        """Delete a queue with all that is in it."""


class BrokerQueue(ABC):
    """A queue.

    Args:
        definition: as it was declared.
        owner: the connection that has it for itself.
        keeps_place: see :class:`bide.testing.rules.consumers.Consumers`.
        order: of the messages that are ready.

    Attributes:
        is_gone: whether it was deleted.
    """

    def __init__(
        self,
        definition: Queue,
        surroundings: Surroundings,
        *,
        owner: object | None,
        order: EntryOrder,
        keeps_place: bool,
    ) -> None:
        arguments = definition.arguments
        self.definition = definition
        self.name = definition.name
        self.owner = owner
        self.is_gone = False
        self.consumers = Consumers(
            single_active=arguments.get("x-single-active-consumer") is True,
            widest_first=definition.type == "quorum" and surroundings.release >= (4, 0),
            keeps_place=keeps_place,
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
        self.touch()

    # -- the faces of a queue

    @property
    def message_count(self) -> int:
        """Ready messages."""
        return len(self._ready)

    @abstractmethod
    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """Take a message; False if the queue refuses it.

        Args:
            publisher: who waits for the confirm; None for a dead letter that nobody waits for.
        """

    @abstractmethod
    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """Take messages back.

        Args:
            failed: whether it counts as a failed attempt, where the queue makes a difference.
        """

    @abstractmethod
    def _take_back(self, entries: Sequence[Entry]) -> None:
        """Messages whose consumer is gone are ready again."""

    @abstractmethod
    def counts(self, entry: Entry, *, asked_for: bool) -> dict[str, int]:
        """The headers about its deliveries that a message gets.

        Args:
            asked_for: whether it was asked for by itself, not sent to a consumer.
        """

    def get(self) -> tuple[Entry, int] | None:
        """Take one message, and tell how many are left; None if there is none."""
        self.touch()
        if not self.message_count:
            return None
        entry = self._take_first()
        entry.holder = None
        return entry, self._left_behind()

    def consume(self, consumer: BrokerConsumer) -> None:
        """Start to send messages to a consumer."""
        self.consumers.add(consumer)
        self.touch()
        self._changed()

    def cancel(self, consumer: BrokerConsumer) -> None:
        """End a consumer; what it has in hand stays there."""
        if not self._without([consumer]):
            self._changed()

    def lose(self, consumers: Sequence[BrokerConsumer], entries: Sequence[Entry]) -> None:
        """Consumers are gone with their channel: take back what they had before others get anything."""
        if self._without(consumers):
            return
        if entries:
            self._take_back(entries)
        self._changed()

    def _without(self, consumers: Sequence[BrokerConsumer]) -> bool:
        """Forget consumers, and tell whether the queue is gone with them."""
        for one in consumers:
            self.consumers.remove(one)
        if consumers and not len(self.consumers):
            if self.definition.auto_delete:
                self._surroundings.remove_queue(self)
                return True
            self.touch()
        return False

    def settled(self, consumer: BrokerConsumer, number: int = 1) -> None:
        """A consumer has so many messages less in hand; call it before what becomes of them."""
        consumer.in_hand -= number
        self.consumers.has_room_again(consumer)

    def acknowledge(self) -> None:
        """Messages were acknowledged: forget them, and send more."""
        self._changed()

    @abstractmethod
    def discard(self, entries: Sequence[Entry]) -> None:
        """Messages were rejected: dead-letter them, and send more."""

    def purge(self) -> int:
        """Throw the ready messages away, and tell how many there were."""
        entries = self._clear()
        self._changed()
        return entries

    def remove(self) -> int:
        """The queue is deleted: tell its consumers, and how many messages went with it."""
        self.is_gone = True
        entries = self._clear()
        for timer in (self._expiry_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        for consumer in self.consumers:
            self.consumers.remove(consumer)
            consumer.cancelled(consumer)
        return entries

    def touch(self) -> None:
        """The queue is used: its own expiry counts from now."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._expires is not None and not len(self.consumers):
            due = self._clock.microseconds + self._expires * 1000
            self._idle_timer = self._surroundings.call_at(due, self._expire_itself)

    # -- for the types of queue

    def _take_first(self) -> Entry:
        """Take the first message; there must be one."""
        entry = self._ready.pop()
        self._ready_bytes -= entry.size
        return entry

    def _take_expired(self) -> list[Entry]:
        """Take the messages at the head whose time is up."""
        expired = self._ready.pop_expired(self._clock.microseconds)
        self._ready_bytes -= sum(one.size for one in expired)
        return expired

    def _clear(self) -> int:
        entries = self._ready.clear()
        self._ready_bytes = 0
        return len(entries)

    def _hand_over(self, consumer: BrokerConsumer, entry: Entry) -> None:
        if not consumer.no_ack:
            consumer.in_hand += 1
        entry.holder = consumer
        self.consumers.served(consumer)
        consumer.deliver(consumer, entry)

    @abstractmethod
    def _changed(self) -> None:
        """Something may be possible now that was not before."""

    @abstractmethod
    def _left_behind(self) -> int:
        """The first message was taken: see to those behind it, and tell how many are left."""

    def _dead_letter(self, entries: Sequence[Entry], reason: Reason) -> None:
        if self.dead_letter_exchange is not None:
            for entry in entries:
                self._surroundings.dead_letter(self, self.marked(entry), reason)

    def marked(self, entry: Entry) -> StoredMessage:
        """The message with what its dead letter takes along of its deliveries."""
        if entry.failed is None or self._surroundings.release < (4, 0):
            return entry.message
        return replace(entry.message, delivery_count=entry.failed)

    def _expiry_of(self, message: StoredMessage) -> int | None:
        """The time to live of a message in this queue, in milliseconds."""
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
