"""An asynchronous input of a bulk publish that another thread fills with batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import OutgoingSchedule

_BATCHES_AHEAD: Final = 4
"""The number of batches ahead: enough to keep the event loop busy while the other thread creates messages."""


class ThreadFeed:
    """An asynchronous input that another thread fills. That thread waits while it is too far ahead.

    Attributes:
        has_ended: whether :meth:`end` was called.
        is_abandoned: whether :meth:`abandon` was called: no more messages are taken.

    Args:
        call: schedules a function in the event loop; may be called in any thread.
    """

    def __init__(self, call: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call
        self._batches: deque[Sequence[OutgoingMessage | OutgoingSchedule]] = deque()
        self._current: Iterator[OutgoingMessage | OutgoingSchedule] = iter(())
        self._room = threading.Semaphore(_BATCHES_AHEAD)
        self._changed = asyncio.Event()
        self.has_ended = False
        self.is_abandoned = False

    async def __aiter__(self) -> AsyncIterator[OutgoingMessage | OutgoingSchedule]:
        has_ended = False
        while not has_ended:
            self._changed.clear()
            # Read has_ended before the batches: a batch that is added in between was added before the end.
            has_ended = self.has_ended
            while self._batches:
                self._current = iter(self._batches.popleft())
                self._room.release()
                for one in self._current:
                    yield one
            if not has_ended:
                await self._changed.wait()

    # In the other thread:

    def wait_for_room(self) -> None:
        """Wait until a batch may be added, or the input was abandoned."""
        self._room.acquire()
        if self.is_abandoned:
            # Release the next call too: no more room will be made.
            self._room.release()

    def add(self, batch: Sequence[OutgoingMessage | OutgoingSchedule]) -> None:
        """Add messages, after :meth:`wait_for_room`."""
        self._batches.append(batch)
        self._call_soon(self._changed.set)

    def end(self) -> None:
        """Mark the end of the input."""
        self.has_ended = True
        self._call_soon(self._changed.set)

    # In the event loop, when no more messages are taken:

    def abandon(self) -> None:
        """Stop taking messages. The other thread no longer waits for room."""
        self.is_abandoned = True
        self._room.release()

    def left(self) -> list[OutgoingMessage | OutgoingSchedule]:
        """The messages that were added and not taken."""
        left = list(self._current)
        while self._batches:
            left += self._batches.popleft()
        return left
