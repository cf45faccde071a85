"""How many messages are handled at once; after failures in a row, one at a time."""

from __future__ import annotations

import asyncio

from bide.runtime.logs import logger

log = logger(__name__)


class Limiter:
    """Lets so many in at once. It is the endpoint's circuit breaker too.

    After ``slow_down_after`` failures in a row it lets in one message at a time, with a pause after each failure, until
    one succeeds (rule of NServiceBus's consecutive-failures setting).

    Args:
        limit: messages at once.
        slow_down_after: failures in a row; None never slows down.
        pause: seconds after a failure, while slow.
    """

    def __init__(self, name: str, limit: int, *, slow_down_after: int | None, pause: float) -> None:
        self._name = name
        self._limit = limit
        self._slow_down_after = slow_down_after
        self._pause = pause
        self._inside = 0
        self._failures = 0
        self._change = asyncio.Condition()
        self._slow = False

    @property
    def inside(self) -> int:
        """Messages that are being handled."""
        return self._inside

    @property
    def slow(self) -> bool:
        """Whether it lets in one at a time because of failures."""
        return self._slow

    async def enter(self) -> None:
        """Wait for a free place, and take it."""
        async with self._change:
            await self._change.wait_for(lambda: self._inside < (1 if self._slow else self._limit))
            self._inside += 1

    async def leave(self) -> None:
        """Give the place back."""
        async with self._change:
            self._inside -= 1
            self._change.notify_all()

    async def idle(self) -> None:
        """Wait until nobody is inside."""
        async with self._change:
            await self._change.wait_for(lambda: self._inside == 0)

    def succeeded(self) -> None:
        """A message was handled."""
        self._failures = 0
        if self._slow:
            self._slow = False
            log.warning("%s: a message was handled again: back to %d at once", self._name, self._limit)

    async def failed(self) -> None:
        """A message was not handled; returns after the pause, while slow."""
        self._failures += 1
        if self._slow_down_after is not None and self._failures >= self._slow_down_after and not self._slow:
            self._slow = True
            log.warning(
                "%s: %d failures in a row: one message at a time until one succeeds", self._name, self._failures
            )
        if self._slow:
            await asyncio.sleep(self._pause)
