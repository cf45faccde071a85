"""In-process memory of failed attempts and handled messages."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from datetime import datetime, timedelta
from typing import Final

from bide.runtime.bounded_cache import BoundedCache

REMEMBERED: Final = 10_000
"""How many messages are remembered; the oldest are forgotten first."""


class FailedAttempts:
    """Times of attempts that failed in this process since a message's last delayed retry."""

    def __init__(self) -> None:
        self._times = BoundedCache[Hashable, tuple[datetime, ...]](REMEMBERED)

    def of(self, key: Hashable) -> tuple[datetime, ...]:
        """The times of this message's failed attempts, oldest first."""
        return self._times.get(key, ())

    def add(self, key: Hashable, time: datetime) -> tuple[datetime, ...]:
        """Add a failed attempt, and return the times of all."""
        times = self._times[key] = (*self._times.pop(key, ()), time)
        return times

    def forget(self, key: Hashable) -> None:
        """Remove a message that is finished."""
        self._times.pop(key, None)


class HandledMessages:
    """Messages that this process handled recently, to recognise duplicates.

    Args:
        window: how long a message is remembered.
    """

    def __init__(self, window: timedelta) -> None:
        self._window = window.total_seconds()
        self._expires: OrderedDict[Hashable, float] = OrderedDict()
        self._in_progress: dict[Hashable, asyncio.Future[None]] = {}

    def __contains__(self, key: Hashable) -> bool:
        self._expire()
        return key in self._expires

    def add(self, key: Hashable) -> None:
        """Remember a message that was handled now."""
        self._expires.pop(key, None)
        self._expires[key] = asyncio.get_running_loop().time() + self._window
        self._expire()

    async def begin(self, key: Hashable) -> bool:
        """Wait until no message with the key is in progress, then begin. False if one was handled before."""
        while (other := self._in_progress.get(key)) is not None:
            await asyncio.shield(other)
        if key in self:
            return False
        self._in_progress[key] = asyncio.get_running_loop().create_future()
        return True

    def end(self, key: Hashable) -> None:
        """Let the next message with the same key begin, whether this one succeeded or not."""
        done = self._in_progress.pop(key, None)
        if done is not None and not done.done():
            done.set_result(None)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._expires and next(iter(self._expires.values())) <= now:
            self._expires.popitem(last=False)
