"""Classic queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bide.testing.rules.entry import ByPriority, Entry
from bide.testing.rules.message import StoredMessage
from bide.testing.rules.queue import BrokerQueue, Surroundings
from bide.topology import Queue

_PRECISION: Final = 1000
"""Microseconds: nobody cares for a head that expires less than that before the timer."""


class ClassicQueue(BrokerQueue):
    """A classic queue: rules of RabbitMQ's ``rabbit_amqqueue_process`` and ``rabbit_priority_queue``.

    * What is rejected or given back takes its old place.
    * Only the head expires; with priorities that is the head of the highest.
    * A limit drops from the head, which with priorities is the most urgent message.
    * ``reject-publish`` counts what the queue would hold, before it takes a message.
    """

    def __init__(self, definition: Queue, surroundings: Surroundings, *, owner: object | None) -> None:
        super().__init__(definition, surroundings, owner=owner, order=ByPriority(), keeps_place=True)
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
            # Without a wait it does not expire either.
            self._hand_over(consumer, entry)
            return True
        # From 4.3 on a message that failed elsewhere counts as delivered here too.
        entry.redelivered = message.delivery_count is not None and self._surroundings.release >= (4, 3)
        self._ready.add(entry)
        self._ready_bytes += size
        # Only one that comes to the head makes the queue look for what is expired, save with priorities: there one may
        # come to the head of others, and is not noticed.
        if self._keep_limit() or self.message_count == 1:
            self._drop_expired()
        return True

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """See :class:`BrokerQueue`."""
        for entry in entries:
            self._count(entry, failed=failed)
        self._restore(entries)
        self._changed()

    def _take_back(self, entries: Sequence[Entry]) -> None:
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

    def counts(self, entry: Entry, *, asked_for: bool) -> dict[str, int]:
        """None: classic queues count for others at most."""
        return {}

    def _count(self, entry: Entry, *, failed: bool) -> None:
        """From 4.3 on a dead letter takes along how often it failed here."""
        if failed and self._surroundings.release >= (4, 3):
            entry.failed = (entry.failed or 0) + 1

    def _expires_at(self, message: StoredMessage) -> int | None:
        ttl = self._expiry_of(message)
        return None if ttl is None else self._clock.microseconds + ttl * 1000

    def _changed(self) -> None:
        while self.message_count and (consumer := self.consumers.next()) is not None:
            self._hand_over(consumer, self._take_first())
            self._drop_expired()

    def _left_behind(self) -> int:
        self._drop_expired()
        return self.message_count

    def _keep_limit(self) -> bool:
        """Drop what is too much from the head, and tell whether there was anything."""
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
            # One that is too early is left as it is, and looks in vain.
            timer.cancel()
            self._expiry_timer = self._surroundings.call_at(due, self._drop_expired)
