"""Dead letters that are kept until a queue has taken them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from bide.testing.rules.clock import Timer
from bide.testing.rules.entry import Entry
from bide.testing.rules.message import Reason, StoredMessage

if TYPE_CHECKING:
    from bide.testing.rules.queue import Surroundings
    from bide.testing.rules.quorum import QuorumQueue

PATIENCE: Final = 180_000_000
"""Microseconds after which what was not taken is sent again; RabbitMQ's default."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A dead letter that not all queues that it is for have taken.

    Attributes:
        letter: as it was sent first.
    """

    entry: Entry
    reason: Reason
    letter: StoredMessage | None = None
    taken_by: set[str] = field(default_factory=set)


class DeadLetterWorker:
    """Sends the dead letters of one quorum queue on, each until every queue that it is for has taken it.

    It has at most ``prefetch`` of them in hand. What no queue takes stays there, and is tried again every three
    minutes; so as many of those hold up all others.

    Attributes:
        size: bytes of all that it keeps.
    """

    def __init__(self, queue: QuorumQueue, surroundings: Surroundings, *, prefetch: int) -> None:
        self._queue = queue
        self._surroundings = surroundings
        self._prefetch = prefetch
        self._waiting: deque[_Pending] = deque()
        self._in_hand: list[_Pending] = []
        self._timer: Timer | None = None
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_hand)

    def add(self, entries: Iterable[Entry], reason: Reason) -> None:
        """Send these as soon as what is under way is done."""
        for entry in entries:
            self._waiting.append(_Pending(entry, reason))
            self.size += entry.size
            self._surroundings.later(self._work)

    def clear(self) -> int:
        """Forget all, and tell how many there were."""
        number = len(self)
        self._waiting.clear()
        self._in_hand.clear()
        self.size = 0
        return number

    def _work(self) -> None:
        while self._waiting and len(self._in_hand) < self._prefetch:
            pending = self._waiting.popleft()
            self._in_hand.append(pending)
            self._send(pending)
        self._plan()

    def _plan(self) -> None:
        if not self._in_hand:
            if self._timer is not None:
                self._timer.cancel()
        elif self._timer is None or self._timer.cancelled:
            due = self._surroundings.clock.microseconds + PATIENCE
            self._timer = self._surroundings.call_at(due, self._try_again)

    def _try_again(self) -> None:
        for pending in list(self._in_hand):
            self._send(pending)
        self._work()

    def _send(self, pending: _Pending) -> None:
        letter = pending.letter
        if letter is None:
            message = self._queue.marked(pending.entry)
            letter = self._surroundings.dead_letter_of(self._queue, message, pending.reason)
            pending.letter = letter
        elif self._surroundings.release < (4, 0) and self._queue.dead_letter_key is None:
            # The keys of a second sending are those of x-death, where BCC keys are not recorded.
            letter = replace(letter, routing_keys=letter.visible_keys)
        queues = self._surroundings.queues_for(self._queue, letter, pending.reason)
        for queue in queues:
            if queue.name not in pending.taken_by and queue.publish(letter, self):
                pending.taken_by.add(queue.name)
        if self._surroundings.release < (4, 0) and self._queue in queues:
            # It has taken the letter, but below 4.0 a queue does not hear its own confirms, and keeps it for ever.
            return
        if pending.taken_by and {one.name for one in queues} <= pending.taken_by:
            self._in_hand.remove(pending)
            self.size -= pending.entry.size
            self._queue.released()
