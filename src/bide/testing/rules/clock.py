"""A virtual clock that stands still until a test advances it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from bide.durations import (
    MICROSECOND,
    DelayLike,
    DueTimeLike,
    format_delay,
    from_microseconds,
    parse_delay,
    parse_due_time,
    to_microseconds,
)
from bide.errors import InvalidDelayError, InvalidDueTimeError

_LAST: Final = to_microseconds(datetime.max.replace(tzinfo=UTC))

DEFAULT_START: Final = datetime(2030, 1, 1, tzinfo=UTC)


class Timer:
    """A callback at a certain time; see :meth:`VirtualClock.call_at`."""

    __slots__ = ("_callback", "at")

    def __init__(self, at: int, callback: Callable[[], None]) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback

    @property
    def cancelled(self) -> bool:
        """Whether the callback was cancelled or has been called."""
        return self._callback is None

    def cancel(self) -> None:
        """Cancel the callback."""
        self._callback = None

    def run(self) -> None:
        """Call the callback, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class VirtualClock:
    """A clock that stands still until it is advanced. Events on the way happen in order, each at its time.

    Args:
        start: the initial time, with a time zone; the beginning of 2030 if None.
        guard: entered while the clock moves: a lock, if several threads use the broker.

    Attributes:
        microseconds: the time in microseconds since the Unix epoch.
    """

    def __init__(self, start: DueTimeLike | None = None, *, guard: AbstractContextManager[Any] | None = None) -> None:
        moment = DEFAULT_START if start is None else parse_due_time(start)
        self.microseconds = to_microseconds(moment)
        self._timers: list[tuple[int, int, Timer]] = []
        self._upkeep: list[tuple[int, int, Timer]] = []
        self._numbers = count()
        self._guard = nullcontext() if guard is None else guard

    def now(self) -> datetime:
        """The current time in UTC."""
        return from_microseconds(self.microseconds)

    @property
    def milliseconds(self) -> int:
        """The time in whole milliseconds since the Unix epoch, which is the broker's resolution."""
        return self.microseconds // 1000

    @property
    def next_due(self) -> datetime | None:
        """The time of the next event, or None if nothing is scheduled but upkeep."""
        _forget_cancelled(self._timers)
        return from_microseconds(self._timers[0][0]) if self._timers else None

    def call_at(self, microseconds: int, callback: Callable[[], None], *, is_upkeep: bool = False) -> Timer:
        """Schedule a callback at a time in microseconds since the Unix epoch.

        A callback in the past is called at the beginning of the next advance.

        Args:
            is_upkeep: whether the callback may as well run later; :attr:`next_due` then ignores it.
        """
        timer = Timer(microseconds, callback)
        with self._guard:
            heappush(self._upkeep if is_upkeep else self._timers, (microseconds, next(self._numbers), timer))
        return timer

    def advance(self, delay: DelayLike) -> None:
        """Let time pass.

        Raises:
            InvalidDelayError: the delay is negative or malformed, or ends after the year 9999.
        """
        wait = parse_delay(delay)
        with self._guard:
            target = self.microseconds + wait // MICROSECOND
            if target > _LAST:
                raise InvalidDelayError(
                    f"{format_delay(wait)} after {self.now().isoformat()} is beyond the year 9999, where the calendar "
                    "ends: give less"
                )
            self._move(target)

    def advance_to(self, moment: DueTimeLike) -> None:
        """Let time pass until the given time.

        Raises:
            InvalidDueTimeError: the time is in the past, or has no time zone.
        """
        due = parse_due_time(moment)
        target = to_microseconds(due)
        with self._guard:
            self._move_forward(due, target)

    def _move_forward(self, due: datetime, target: int) -> None:
        if target < self.microseconds:
            raise InvalidDueTimeError(
                f"{due.isoformat()} is {format_delay(self.now() - due)} before the clock's time "
                f"{self.now().isoformat()}: a clock only goes forward, so give a later time"
            )
        self._move(target)

    def _move(self, target: int) -> None:
        while True:
            heaps = [one for one in (self._timers, self._upkeep) if _forget_cancelled(one) and one[0][0] <= target]
            if not heaps:
                break
            at, _, timer = heappop(min(heaps, key=lambda one: one[0][:2]))
            # A callback that was scheduled in the past is called now.
            self.microseconds = max(self.microseconds, at)
            timer.run()
        self.microseconds = max(self.microseconds, target)


def _forget_cancelled(timers: list[tuple[int, int, Timer]]) -> bool:
    """Drop cancelled callbacks at the head; return whether others are left."""
    while timers and timers[0][2].cancelled:
        heappop(timers)
    return bool(timers)
