"""Concurrency limit and circuit breaker of an endpoint."""

from __future__ import annotations

import asyncio

from bide.runtime.logs import logger

log = logger(__name__)


class Limiter:
    """Limits how many messages are handled at the same time, and slows down after consecutive failures.

    After ``slow_down_after`` consecutive failures it admits one message at a time, with a pause after each failure,
    until one succeeds (like NServiceBus's rate limit on consecutive failures).

    Args:
        name: the endpoint's name, for log lines.
        limit: maximum number of messages at the same time.
        slow_down_after: number of consecutive failures; None never slows down.
        pause: seconds to wait after each failure while slow.
    """

    def __init__(self, name: str, limit: int, *, slow_down_after: int | None, pause: float) -> None:
        self._name = name
        self._limit = limit
        self._slow_down_after = slow_down_after
        self._pause = pause
        self._inside = 0
        self._failures = 0
        self._has_left = asyncio.Event()
        self._slow = False

    @property
    def inside(self) -> int:
        """Number of messages that are being handled."""
        return self._inside

    @property
    def slow(self) -> bool:
        """Whether it admits one message at a time because of failures."""
        return self._slow

    async def enter(self) -> None:
        """Wait for a free slot and occupy it."""
        while self._inside >= (1 if self._slow else self._limit):
            self._has_left.clear()
            await self._has_left.wait()
        self._inside += 1

    def leave(self) -> None:
        """Release a slot."""
        self._inside -= 1
        self._has_left.set()

    def succeeded(self) -> None:
        """Record a success; ends the slow mode."""
        self._failures = 0
        if self._slow:
            self._slow = False
            log.warning("%s: a message succeeded: back to %d messages at a time", self._name, self._limit)

    async def failed(self) -> None:
        """Record a failure. In slow mode, returns after the pause."""
        self._failures += 1
        if self._slow_down_after is not None and self._failures >= self._slow_down_after and not self._slow:
            self._slow = True
            log.warning(
                "%s: %d consecutive failures: one message at a time until one succeeds", self._name, self._failures
            )
        if self._slow:
            await asyncio.sleep(self._pause)  # slow mode spares a service that fails
