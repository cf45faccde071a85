"""What a process remembers of messages: attempts that failed, and those that were handled."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from datetime import datetime, timedelta
from typing import Final

from bide.runtime.bounded_cache import BoundedCache

REMEMBERED: Final = 10_000
"""So many messages are remembered; the oldest are forgotten first."""


class FailedAttempts:
    """When attempts at messages failed in this process since their last delayed retry."""

    def __init__(self) -> None:
        self._times = BoundedCache[Hashable, tuple[datetime, ...]](REMEMBERED)

    def of(self, key: Hashable) -> tuple[datetime, ...]:
        """The times of this message, oldest first."""
        return self._times.get(key, ())

    def add(self, key: Hashable, time: datetime) -> tuple[datetime, ...]:
        """One more; returns all of them."""
        times = self._times[key] = (*self._times.pop(key, ()), time)
        return times

    def forget(self, key: Hashable) -> None:
        """The message is done with."""
        self._times.pop(key, None)


class HandledMessages:
    """Messages that this process has handled, so that a copy of one need not be handled again.

    Args:
        window: how long they are remembered.
    """

    def __init__(self, window: timedelta) -> None:
        self._window = window.total_seconds()
        self._until: OrderedDict[Hashable, float] = OrderedDict()
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}

    def __contains__(self, key: Hashable) -> bool:
        self._expire()
        return key in self._until

    def add(self, key: Hashable) -> None:
        """It was handled now."""
        self._until.pop(key, None)
        self._until[key] = asyncio.get_running_loop().time() + self._window
        self._expire()

    async def begin(self, key: Hashable) -> bool:
        """Start to handle one, after those with the same key that are under way; False if it was handled before."""
        while (other := self._under_way.get(key)) is not None:
            await asyncio.shield(other)
        if key in self:
            return False
        self._under_way[key] = asyncio.get_running_loop().create_future()
        return True

    def end(self, key: Hashable) -> None:
        """Whatever became of it, the next one with the same key may begin."""
        done = self._under_way.pop(key, None)
        if done is not None and not done.done():
            done.set_result(None)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
