"""Classic queues."""

from __future__ import annotations

from collections.abc import Sequence

from bide.memory.entry import ByPriority, Entry
from bide.memory.message import StoredMessage
from bide.memory.queue import BrokerQueue, Surroundings
from bide.topology import Queue


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
        self._ready.add(entry)
        self._ready_bytes += size
        self._changed()
        return True

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """See :class:`BrokerQueue`."""
        for entry in entries:
            entry.redelivered = True
            self._ready_bytes += entry.size
        self._ready.restore(entries)
        self._changed()

    def discard(self, entries: Sequence[Entry]) -> None:
        """See :class:`BrokerQueue`."""
        self._dead_letter(entries, "rejected")
        self._changed()

    def counts(self, entry: Entry) -> dict[str, int]:
        """None: classic queues do not count."""
        return {}

    def _expires_at(self, message: StoredMessage) -> int | None:
        ttl = self._expiry_of(message)
        return None if ttl is None else self._clock.microseconds + ttl * 1000

    def _changed(self) -> None:
        if self._overflow == "drop-head":
            while self.message_count and self._is_over(self.message_count, self._ready_bytes):
                self._dead_letter([self._take_first()], "maxlen")
        self._drop_expired()
        while (consumer := self.consumers.next()) is not None and self.message_count:
            self._hand_over(consumer, self._take_first())
            self._drop_expired()
        self._watch()

    def _drop_expired(self) -> None:
        self._dead_letter(self._take_expired(), "expired")

    def _next_expiry(self) -> int | None:
        heads = self._ready.heads()
        return heads[0].expires_at if heads else None
