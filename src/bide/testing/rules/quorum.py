"""Rules of quorum queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Final

from bide.testing.rules.consumers import BrokerConsumer
from bide.testing.rules.dead_letter_worker import DeadLetterWorker
from bide.testing.rules.delayed_retry import DelayedRetry
from bide.testing.rules.entry import ByPriority, Entry, EntryOrder, TwoPriorities
from bide.testing.rules.message import Reason, StoredMessage
from bide.testing.rules.queue import BrokerQueue, Release, Surroundings
from bide.topology import Queue

_DEFAULT_LIMIT: Final = 20
"""Delivery limit of a queue without the argument, from 4.0 on."""

_DEFAULT_PRIORITY: Final = 4
_HIGHEST_PRIORITY: Final = 31
_NO_PREFETCH: Final = 2000
_ACCEPT_BELOW: Final = 0.8
"""A queue that refuses publishes accepts them again when it is filled to this fraction of its limit."""


class QuorumQueue(BrokerQueue):
    """A quorum queue, by the rules of RabbitMQ's ``rabbit_fifo``.

    * Requeued messages, and those of lost consumers, are delivered before all others. Below 4.3, requeued messages go
      to the end instead if the queue has no delivery limit.
    * Below 4.3 only the head expires, from 4.3 on the head of each priority.
    * ``reject-publish`` accepts one message more than the limit, and then refuses until a fifth of the limit is free.
      Dead letters are accepted anyway, unless they come from a queue that dead-letters at least once. Of those that
      such a queue sends in one go, all are accepted: their sender learns after the last that the queue is full.
    * Messages that wait for at-least-once dead-lettering count towards the limit.
    * On 3.10, when a consumer requeues a message beyond its delivery limit, the consumer's prefetch grows by one: the
      broker credits the message twice, as dead-lettered and as requeued.
    * A consumer without a prefetch has a prefetch of 2,000.
    * From 4.0 on a dead letter carries its number of failed attempts, and the next queue continues to count. Lost
      channels count; from 4.0 to 4.2 the rejection counts too, and from 4.3 on ``basic.reject`` with requeue does.
    * If a limit drops several messages at once, below 4.3 the last one is dead-lettered first.
    """

    def __init__(self, definition: Queue, surroundings: Surroundings, *, prefetch: int) -> None:
        super().__init__(definition, surroundings, owner=None, order=_order(surroundings.release), keeps_turn=False)
        arguments = definition.arguments
        limit = arguments.get("x-delivery-limit", _DEFAULT_LIMIT if surroundings.release >= (4, 0) else -1)
        self._delivery_limit = limit if isinstance(limit, int) and limit >= 0 else None
        self._returns: deque[Entry] = deque()
        self._retries = DelayedRetry(arguments)
        self._blocked: dict[object, bool] = {}
        self._was_low = True
        at_least_once = (
            arguments.get("x-dead-letter-strategy") == "at-least-once"
            and self._overflow == "reject-publish"
            and self.dead_letter_exchange is not None
        )
        self._worker = (
            DeadLetterWorker(self, surroundings, prefetch=prefetch, on_confirmed=self._keep_limit)
            if at_least_once
            else None
        )

    @property
    def message_count(self) -> int:
        """See :class:`BrokerQueue`."""
        return len(self._ready) + len(self._returns)

    @property
    def _counted(self) -> int:
        """Number of messages that count towards the limit, including those that wait for dead-lettering."""
        return self.message_count + len(self._retries) + (0 if self._worker is None else len(self._worker))

    @property
    def _counted_bytes(self) -> int:
        return self._ready_bytes + (0 if self._worker is None else self._worker.size)

    def publish(self, message: StoredMessage, publisher: object | None) -> bool:
        """See :class:`BrokerQueue`."""
        refuses = publisher is not None and self._overflow == "reject-publish"
        if refuses and self._blocked.setdefault(publisher, self._is_full()):
            return False
        entry = Entry(
            message,
            number=next(self._numbers),
            level=self._level(message),
            size=len(message.body),
            expires_at=self._expires_at(message),
        )
        if message.delivery_count is not None:
            # Continue the count of the queue that dead-lettered the message.
            entry.failed = message.delivery_count
            entry.redelivered = True
        self._ready.add(entry)
        self._ready_bytes += entry.size
        self._changed()
        return True

    def consume(self, consumer: BrokerConsumer) -> None:
        """See :class:`BrokerQueue`."""
        consumer.prefetch = consumer.prefetch or _NO_PREFETCH
        super().consume(consumer)

    def requeue(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """See :class:`BrokerQueue`."""
        for entry in entries:
            # Below 4.3, a message that a client requeues has not failed.
            self._count(entry, failed=failed and self._surroundings.release >= (4, 3))
            if self._delivery_limit is None and self._surroundings.release < (4, 3):
                # The message keeps its expiry, but gets a new position and the default priority.
                entry.level = self._ordinary_level
                entry.number = next(self._numbers)
                self._ready.add(entry)
                self._ready_bytes += entry.size
            else:
                self._return(entry, failed=failed)
        self._changed()

    def _return_from_lost(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._count(entry, failed=True)
            self._return(entry, failed=True)

    def discard(self, entries: Sequence[Entry]) -> None:
        """See :class:`BrokerQueue`."""
        if (4, 0) <= self._surroundings.release < (4, 3):
            for entry in entries:
                entry.failed = (entry.failed or 0) + 1
        self._dead_letter(entries, "rejected")
        self._changed()

    def counts(self, entry: Entry, *, by_get: bool) -> dict[str, int]:
        """The headers with the number of earlier deliveries, from the second delivery on."""
        release = self._surroundings.release
        if release < (4, 0) and by_get:
            return {"x-delivery-count": entry.acquired or 0}
        acquired = entry.failed if entry.acquired is None and release >= (4, 0) else entry.acquired
        if acquired is None:
            return {}
        if release < (4, 3):
            return {"x-delivery-count": acquired}
        counts = {"x-acquired-count": acquired}
        if entry.failed is not None:
            counts["x-delivery-count"] = entry.failed
        return counts

    # -- internals

    def _count(self, entry: Entry, *, failed: bool) -> None:
        entry.redelivered = True
        entry.acquired = (entry.acquired or 0) + 1
        if failed:
            entry.failed = (entry.failed or 0) + 1

    def _return(self, entry: Entry, *, failed: bool) -> None:
        """Requeue a message at the front, or dead-letter it if the delivery limit is reached."""
        deliveries = entry.failed if self._surroundings.release >= (4, 3) else entry.acquired
        if self._delivery_limit is not None and (deliveries or 0) > self._delivery_limit:
            if entry.recipient is not None and self._surroundings.release < (4, 0):
                entry.recipient.raise_prefetch()
            self._dead_letter([entry], "delivery_limit")
            return
        self._ready_bytes += entry.size
        if self._retries.delays(failed=failed):
            self._retries.add(entry, self._clock.milliseconds)
        else:
            self._returns.append(entry)

    def _take_first(self) -> Entry:
        if not self._returns:
            return super()._take_first()
        entry = self._returns.popleft()
        self._ready_bytes -= entry.size
        return entry

    def _take_expired(self) -> list[Entry]:
        now = self._clock.milliseconds * 1000
        expired = []
        while self._returns and self._returns[0].is_expired(now):
            expired.append(self._returns.popleft())
        self._ready_bytes -= sum(one.size for one in expired)
        # Below 4.3, messages behind a returned one are not checked.
        if self._surroundings.release >= (4, 3) or not self._returns:
            expired += super()._take_expired()
        return expired

    def _clear(self) -> int:
        number = super()._clear() + len(self._returns) + self._retries.clear()
        self._returns.clear()
        return number

    def purge(self) -> int:
        """See :class:`BrokerQueue`; from 4.3 on, dead letters that were not sent yet are deleted too."""
        kept = 0
        if self._worker is not None and self._surroundings.release >= (4, 3):
            kept = self._worker.clear()
        return kept + super().purge()

    def remove(self) -> int:
        """See :class:`BrokerQueue`; messages that are not ready are deleted too, and not counted."""
        self._retries.clear()
        if self._worker is not None:
            self._worker.clear()
        return super().remove()

    def _changed(self) -> None:
        if self.is_gone:
            return
        self._returns.extend(self._retries.pop_due(self._clock.microseconds))
        self._dead_letter(self._take_expired(), "expired")
        while self.message_count and (consumer := self.consumers.next()) is not None:
            self._hand_over(consumer, self._take_first())
            self._dead_letter(self._take_expired(), "expired")
        self._keep_limit()
        self._schedule_expiry()

    def _keep_limit(self) -> None:
        if self._overflow != "reject-publish":
            dropped = []
            while self.message_count and self._is_full():
                dropped.append(self._take_first())
            self._dead_letter(dropped, "maxlen")
            return
        is_full, is_low = self._is_full(), self._is_low()
        if is_full or (is_low and not self._was_low):
            self._surroundings.run_later(partial(self._tell_publishers, refuses=is_full))
        self._was_low = is_low

    def _tell_publishers(self, *, refuses: bool) -> None:
        self._blocked = dict.fromkeys(self._blocked, refuses)

    def _is_full(self) -> bool:
        return self._is_over(self._counted, self._counted_bytes)

    def _is_low(self) -> bool:
        return (self._max_length is None or self._counted <= int(self._max_length * _ACCEPT_BELOW)) and (
            self._max_bytes is None or self._counted_bytes <= int(self._max_bytes * _ACCEPT_BELOW)
        )

    def _dead_letter(self, entries: Sequence[Entry], reason: Reason) -> None:
        if self._worker is not None and reason != "maxlen":
            self._worker.add(entries, reason)
        elif reason == "maxlen" and self._surroundings.release < (4, 3):
            super()._dead_letter(entries[::-1], reason)
        else:
            super()._dead_letter(entries, reason)

    @property
    def _ordinary_level(self) -> int:
        return _DEFAULT_PRIORITY if self._surroundings.release >= (4, 3) else 0

    def _level(self, message: StoredMessage) -> int:
        release = self._surroundings.release
        if release < (4, 0):
            return 0
        if release < (4, 3):
            return int((message.priority or 0) > _DEFAULT_PRIORITY)
        return _DEFAULT_PRIORITY if message.priority is None else min(message.priority, _HIGHEST_PRIORITY)

    def _expires_at(self, message: StoredMessage) -> int | None:
        ttl = self._expiry_of(message)
        # A message can be delivered in the same millisecond in which it arrived.
        return None if ttl is None else (self._clock.milliseconds + max(ttl, 1)) * 1000

    def _count_after_get(self) -> int:
        # The count includes messages that expire now.
        left = self.message_count
        self._changed()
        return left

    def _schedule_expiry(self) -> None:
        """Set the timer for the next expiry."""
        due = self._next_expiry()
        timer = self._expiry_timer
        if timer is not None and not timer.cancelled:
            if timer.at == due:
                return
            timer.cancel()
        self._expiry_timer = None if due is None else self._surroundings.call_at(due, self._changed)

    def _next_expiry(self) -> int | None:
        watched = chain(list(self._returns)[:1], self._ready.heads())
        if self._returns and self._surroundings.release < (4, 3):
            watched = chain(list(self._returns)[:1])
        times = (*(one.expires_at for one in watched), self._retries.next_due)
        return min((one for one in times if one is not None), default=None)


def _order(release: Release) -> EntryOrder:
    if release < (4, 0):
        return ByPriority()
    return ByPriority(all_heads=True) if release >= (4, 3) else TwoPriorities()
