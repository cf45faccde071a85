"""Messages that another thread gives, batch by batch, to an event loop that publishes them as one stream."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from bide.messages.outgoing import OutgoingMessage

_BATCHES_AHEAD: Final = 4
"""Enough for the event loop never to wait while the other thread makes messages."""


class ThreadFeed:
    """An asynchronous input that one other thread fills, and waits for where it is ahead.

    Attributes:
        has_ended: whether it was said that no more will come.
        is_abandoned: whether nobody takes any more.

    Args:
        call: has the event loop call a function soon; may be called in any thread.
    """

    def __init__(self, call: Callable[[Callable[[], None]], object]) -> None:
        self._call = call
        self._batches: deque[Sequence[OutgoingMessage]] = deque()
        self._begun: Iterator[OutgoingMessage] = iter(())
        self._room = threading.Semaphore(_BATCHES_AHEAD)
        self._news = asyncio.Event()
        self.has_ended = False
        self.is_abandoned = False

    async def __aiter__(self) -> AsyncIterator[OutgoingMessage]:
        has_ended = False
        while not has_ended:
            self._news.clear()
            # Asked before the batches are looked for: what is added after that is added before the end.
            has_ended = self.has_ended
            while self._batches:
                self._begun = iter(self._batches.popleft())
                self._room.release()
                for one in self._begun:
                    yield one
            if not has_ended:
                await self._news.wait()

    # In the other thread:

    def wait_for_room(self) -> None:
        """Wait until a batch may be added, or nobody takes any more."""
        self._room.acquire()
        if self.is_abandoned:
            # For whoever asks next: no room is made any more.
            self._room.release()

    def add(self, batch: Sequence[OutgoingMessage]) -> None:
        """Add messages; there is room for them."""
        self._batches.append(batch)
        self._call(self._news.set)

    def end(self) -> None:
        """Say that no more will come."""
        self.has_ended = True
        self._call(self._news.set)

    # When nobody takes any more:

    def abandon(self) -> None:
        """Say so. The other thread does not wait for room from then on."""
        self.is_abandoned = True
        self._room.release()

    def left(self) -> list[OutgoingMessage]:
        """What was added and not taken."""
        left = list(self._begun)
        while self._batches:
            left += self._batches.popleft()
        return left
