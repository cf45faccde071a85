"""Limit on the rate at which a task sends messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

STEPS_PER_SECOND: Final = 10


class RateLimiter:
    """Waits before messages are sent, so that a task sends at most *rate* messages per second.

    After a pause, the rate is not exceeded to catch up.

    Args:
        rate: the largest number of messages in a second; None without a limit.

    Attributes:
        step: the number of messages to send at a time; None without a limit.
    """

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._next = clock()
        self.step = None if rate is None else max(1, rate // STEPS_PER_SECOND)

    def wait(self, messages: int) -> None:
        """Wait until this many messages may be sent."""
        if self._rate is None:
            return
        now = self._clock()
        if now < self._next:
            self._sleep(self._next - now)
        self._next = max(now, self._next) + messages / self._rate
