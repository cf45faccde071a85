"""Quorum queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Final

from bide.testing.rules.consumers import BrokerConsumer
from bide.testing.rules.dead_letter_worker import DeadLetterWorker
from bide.testing.rules.delayed_retry import DelayedRetry
from bide.testing.rules.entry import ByPriority, Entry, EntryOrder, TwoLevels
from bide.testing.rules.message import Reason, StoredMessage
from bide.testing.rules.queue import BrokerQueue, Release, Surroundings
from bide.topology import Queue

_DEFAULT_LIMIT: Final = 20
"""Deliveries of a message before it is dropped or dead-lettered, from 4.0 on."""

_DEFAULT_PRIORITY: Final = 4
_HIGHEST_PRIORITY: Final = 31
_NO_PREFETCH: Final = 2000
_GO_AGAIN: Final = 0.8
"""A queue that refuses takes messages again when it is filled to this part."""


class QuorumQueue(BrokerQueue):
    """A quorum queue: rules of RabbitMQ's ``rabbit_fifo``.

    * What is given back, or comes back from a consumer that is gone, is delivered before all others; below 4.3
      what is given back goes to the end instead where there is no delivery limit.
    * Below 4.3 only the head expires, from then on the head of each priority.
    * ``reject-publish`` takes one message more than the limit, and refuses until a fifth of it is free again. Dead
      letters are taken all the same, unless they come from a queue that dead-letters at least once.
    * Messages that wait to be dead-lettered at least once count towards the limit.
    * On 3.10 a consumer that gives a message back once too often has room for one more from then on: the broker counts
      the place of that message twice, as dead-lettered and as given back.
    * A consumer without a prefetch has a prefetch of 2,000.
    * From 4.0 on a dead letter takes along how many attempts failed, and the next queue goes on counting: those of
      channels that were lost, from 4.0 to 4.2 also the rejected one, from 4.3 on also those given back by
      ``basic.reject``.
    * Of several messages that a limit drops at once, below 4.3 the last is dead-lettered first.
    """

    def __init__(self, definition: Queue, surroundings: Surroundings, *, prefetch: int) -> None:
        super().__init__(definition, surroundings, owner=None, order=_order(surroundings.release), keeps_place=False)
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
            DeadLetterWorker(self, surroundings, prefetch=prefetch, on_taken=self._keep_limit)
            if at_least_once
            else None
        )

    @property
    def message_count(self) -> int:
        """See :class:`BrokerQueue`."""
        return len(self._ready) + len(self._returns)

    @property
    def _kept(self) -> int:
        """Messages that count towards the limit: those to be dead-lettered at least once are still here."""
        return self.message_count + len(self._retries) + (0 if self._worker is None else len(self._worker))

    @property
    def _kept_bytes(self) -> int:
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
            # It goes on counting where the queue that dead-lettered it stopped.
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
            # Below 4.3 what a client gives back is no failed attempt.
            self._count(entry, failed=failed and self._surroundings.release >= (4, 3))
            if self._delivery_limit is None and self._surroundings.release < (4, 3):
                # It keeps its age, but not its place, nor its priority.
                entry.level = self._ordinary_level
                entry.number = next(self._numbers)
                self._ready.add(entry)
                self._ready_bytes += entry.size
            else:
                self._give_back(entry, failed=failed)
        self._changed()

    def _take_back(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._count(entry, failed=True)
            self._give_back(entry, failed=True)

    def discard(self, entries: Sequence[Entry]) -> None:
        """See :class:`BrokerQueue`."""
        if (4, 0) <= self._surroundings.release < (4, 3):
            for entry in entries:
                entry.failed = (entry.failed or 0) + 1
        self._dead_letter(entries, "rejected")
        self._changed()

    def counts(self, entry: Entry, *, asked_for: bool) -> dict[str, int]:
        """Headers that say how often it was delivered before, from the second time on."""
        release = self._surroundings.release
        if release < (4, 0) and asked_for:
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

    # -- what is inside

    def _count(self, entry: Entry, *, failed: bool) -> None:
        entry.redelivered = True
        entry.acquired = (entry.acquired or 0) + 1
        if failed:
            entry.failed = (entry.failed or 0) + 1

    def _give_back(self, entry: Entry, *, failed: bool) -> None:
        """To the front, or away where the delivery limit is reached."""
        deliveries = entry.failed if self._surroundings.release >= (4, 3) else entry.acquired
        if self._delivery_limit is not None and (deliveries or 0) > self._delivery_limit:
            if entry.holder is not None and self._surroundings.release < (4, 0):
                entry.holder.grow()
            self._dead_letter([entry], "delivery_limit")
            return
        self._ready_bytes += entry.size
        if self._retries.takes(failed=failed):
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
        # Below 4.3 nothing behind a returned message is looked at.
        if self._surroundings.release >= (4, 3) or not self._returns:
            expired += super()._take_expired()
        return expired

    def _clear(self) -> int:
        number = super()._clear() + len(self._returns) + self._retries.clear()
        self._returns.clear()
        return number

    def purge(self) -> int:
        """See :class:`BrokerQueue`; from 4.3 on dead letters that wait for their sending go too."""
        kept = 0
        if self._worker is not None and self._surroundings.release >= (4, 3):
            kept = self._worker.clear()
        return kept + super().purge()

    def remove(self) -> int:
        """See :class:`BrokerQueue`; what is not ready goes too, and is not counted."""
        self._retries.clear()
        if self._worker is not None:
            self._worker.clear()
        return super().remove()

    def _changed(self) -> None:
        if self.is_gone:
            return
        self._returns.extend(self._retries.rested(self._clock.microseconds))
        self._dead_letter(self._take_expired(), "expired")
        while self.message_count and (consumer := self.consumers.next()) is not None:
            self._hand_over(consumer, self._take_first())
            self._dead_letter(self._take_expired(), "expired")
        self._keep_limit()
        self._watch()

    def _keep_limit(self) -> None:
        if self._overflow != "reject-publish":
            dropped = []
            while self.message_count and self._is_full():
                dropped.append(self._take_first())
            self._dead_letter(dropped, "maxlen")
            return
        is_low = self._is_low()
        if self._is_full():
            self._blocked = dict.fromkeys(self._blocked, True)
        elif is_low and not self._was_low:
            self._blocked = dict.fromkeys(self._blocked, False)
        self._was_low = is_low

    def _is_full(self) -> bool:
        return self._is_over(self._kept, self._kept_bytes)

    def _is_low(self) -> bool:
        return (self._max_length is None or self._kept <= int(self._max_length * _GO_AGAIN)) and (
            self._max_bytes is None or self._kept_bytes <= int(self._max_bytes * _GO_AGAIN)
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
        # A message may be taken in the millisecond in which it came.
        return None if ttl is None else (self._clock.milliseconds + max(ttl, 1)) * 1000

    def _left_behind(self) -> int:
        # What expires behind it is counted for the last time.
        left = self.message_count
        self._changed()
        return left

    def _watch(self) -> None:
        """Plan the next expiry."""
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
    return ByPriority(all_heads=True) if release >= (4, 3) else TwoLevels()
