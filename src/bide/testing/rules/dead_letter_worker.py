"""At-least-once dead-lettering: dead letters are kept until their queues confirm them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from bide.testing.rules.clock import Timer
from bide.testing.rules.entry import Entry
from bide.testing.rules.message import Reason, StoredMessage

if TYPE_CHECKING:
    from bide.testing.rules.queue import BrokerQueue, Surroundings

RETRY_INTERVAL: Final = 180_000_000
"""Microseconds after which an unconfirmed dead letter is sent again; RabbitMQ's default."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A dead letter that some of its target queues have not confirmed.

    Attributes:
        dead_letter: the message as it was first sent to them.
    """

    entry: Entry
    reason: Reason
    dead_letter: StoredMessage | None = None
    confirmed_by: set[str] = field(default_factory=set)


class DeadLetterWorker:
    """Sends the dead letters of one quorum queue, each until every target queue has confirmed it.

    At most ``prefetch`` of them are unconfirmed at the same time. A dead letter that no queue confirms is sent again
    every three minutes; ``prefetch`` such dead letters block all others.

    Args:
        queue: the quorum queue.
        surroundings: the queue's virtual host.
        prefetch: maximum number of unconfirmed dead letters.
        on_confirmed: called when one was confirmed, which can bring the queue below its limit.

    Attributes:
        size: total size of the dead letters in bytes.
    """

    def __init__(
        self, queue: BrokerQueue, surroundings: Surroundings, *, prefetch: int, on_confirmed: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._surroundings = surroundings
        self._prefetch = prefetch
        self._on_confirmed = on_confirmed
        self._waiting: deque[_Pending] = deque()
        self._unconfirmed: list[_Pending] = []
        self._timer: Timer | None = None
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unconfirmed)

    def add(self, entries: Iterable[Entry], reason: Reason) -> None:
        """Send dead letters after the current operation."""
        for entry in entries:
            self._waiting.append(_Pending(entry, reason))
            self.size += entry.size
            self._surroundings.run_later(self._work)

    def clear(self) -> int:
        """Drop all dead letters; returns their number."""
        number = len(self)
        self._waiting.clear()
        self._unconfirmed.clear()
        self.size = 0
        return number

    def _work(self) -> None:
        while self._waiting and len(self._unconfirmed) < self._prefetch:
            pending = self._waiting.popleft()
            self._unconfirmed.append(pending)
            self._send(pending)
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if not self._unconfirmed:
            if self._timer is not None:
                self._timer.cancel()
        elif self._timer is None or self._timer.cancelled:
            due = self._surroundings.clock.microseconds + RETRY_INTERVAL
            self._timer = self._surroundings.call_at(due, self._retry)

    def _retry(self) -> None:
        for pending in list(self._unconfirmed):
            self._send(pending)
        self._work()

    def _send(self, pending: _Pending) -> None:
        dead_letter = pending.dead_letter
        if dead_letter is None:
            message = self._queue.with_count(pending.entry)
            dead_letter = self._surroundings.dead_letter_of(self._queue, message, pending.reason)
            pending.dead_letter = dead_letter
        elif self._surroundings.release < (4, 0) and self._queue.dead_letter_key is None:
            # When a dead letter is sent again, its keys are read from x-death, which has no BCC keys.
            dead_letter = replace(dead_letter, routing_keys=dead_letter.visible_keys)
        queues = self._surroundings.queues_for(self._queue, dead_letter, pending.reason)
        for queue in queues:
            if queue.name not in pending.confirmed_by and queue.publish(dead_letter, self):
                pending.confirmed_by.add(queue.name)
        if self._surroundings.release < (4, 0) and self._queue in queues:
            # Below 4.0 a queue does not get confirms from itself, so it keeps this dead letter forever.
            return
        if pending.confirmed_by and {one.name for one in queues} <= pending.confirmed_by:
            self._unconfirmed.remove(pending)
            self.size -= pending.entry.size
            self._on_confirmed()
