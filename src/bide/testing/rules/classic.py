"""Rules of classic queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.testing.rules.entry import ByPriority, Entry
from bide.testing.rules.message import StoredMessage
from bide.testing.rules.queue import BrokerQueue, Surroundings
from bide.topology import Queue

_PRECISION: Final = 1000
"""A timer that is at most this many microseconds later than the next expiry is not replaced."""


class ClassicQueue(BrokerQueue):
    """A classic queue, by the rules of RabbitMQ's ``rabbit_amqqueue_process`` and ``rabbit_priority_queue``.

    * Rejected and requeued messages return to their original positions.
    * Only the head expires; with priorities, only the head of the highest priority.
    * A length limit drops messages from the head; with priorities, the most urgent message is dropped.
    * ``reject-publish`` compares the limit with the length that the queue would have with the new message.
    """

    def __init__(self, definition: Queue, surroundings: Surroundings, *, owner: object | None) -> None:
        super().__init__(definition, surroundings, owner=owner, order=ByPriority(), keeps_turn=True)
        highest = definition.arguments.get("x-max-priority")
        self._highest = highest if isinstance(highest, int) else 0

    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """See :class:`BrokerQueue`."""
        size = len(message.body)
        entry = Entry(
            message,
            number=next(self._numbers),
            level=min(message.priority or 0, self._highest),
            size=size,
            expires_at=self._expires_at(message),
        )
        if self._overflow != "drop-head" and self._is_over(self.message_count + 1, self._ready_bytes + size):
            if self._overflow == "reject-publish-dlx":
                self._dead_letter([entry], "maxlen")
            return False
        consumer = self.consumers.next()
        if consumer is not None and not self.message_count:
            # A message that is delivered immediately does not expire.
            self._hand_over(consumer, entry)
            return True
        # From 4.3 on, a message that failed in another queue is marked as redelivered here too.
        entry.redelivered = message.delivery_count is not None and self._surroundings.release >= (4, 3)
        self._ready.add(entry)
        self._ready_bytes += size
        # The queue checks for expired messages only if the new one is at the head. With priorities, a new message can
        # be at the head of other messages without a check.
        if self._keep_limit() or self.message_count == 1:
            self._drop_expired()
        return True

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """See :class:`BrokerQueue`."""
        for entry in entries:
            self._count(entry, failed=failed)
        self._restore(entries)
        self._changed()

    def _return_from_lost(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._count(entry, failed=True)
        self._restore(entries)

    def _restore(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.redelivered = True
            self._ready_bytes += entry.size
        self._ready.restore(entries)
        self._keep_limit()
        self._drop_expired()

    def discard(self, entries: Sequence[Entry]) -> None:
        """See :class:`BrokerQueue`."""
        self._dead_letter(entries, "rejected")
        self._changed()

    def counts(self, entry: Entry, *, by_get: bool) -> dict[str, int]:
        """Empty: a classic queue counts failures only for the queues that get its dead letters."""
        return {}

    def _count(self, entry: Entry, *, failed: bool) -> None:
        """From 4.3 on, a dead letter carries the number of failures in this queue."""
        if failed and self._surroundings.release >= (4, 3):
            entry.failed = (entry.failed or 0) + 1

    def _expires_at(self, message: StoredMessage) -> int | None:
        ttl = self._expiry_of(message)
        return None if ttl is None else self._clock.microseconds + ttl * 1000

    def _changed(self) -> None:
        while self.message_count and (consumer := self.consumers.next()) is not None:
            self._hand_over(consumer, self._take_first())
            self._drop_expired()

    def _count_after_get(self) -> int:
        self._drop_expired()
        return self.message_count

    def _keep_limit(self) -> bool:
        """Drop messages from the head until the limit is met; True if any were dropped."""
        dropped = []
        if self._overflow == "drop-head":
            while self.message_count and self._is_over(self.message_count, self._ready_bytes):
                dropped.append(self._take_first())
        self._dead_letter(dropped, "maxlen")
        return bool(dropped)

    def _drop_expired(self) -> None:
        self._dead_letter(self._take_expired(), "expired")
        heads = self._ready.heads()
        due = heads[0].expires_at if heads else None
        timer = self._expiry_timer
        if due is None or self.is_gone:
            return
        if timer is None or timer.cancelled:
            self._expiry_timer = self._surroundings.call_at(due, self._drop_expired)
        elif due + _PRECISION < timer.at:
            # A timer that is too early stays, and finds nothing to expire.
            timer.cancel()
            self._expiry_timer = self._surroundings.call_at(due, self._drop_expired)
