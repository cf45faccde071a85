"""Time that stands still until somebody moves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from bide.durations import (
    DelayLike,
    DueTimeLike,
    format_delay,
    from_microseconds,
    parse_delay,
    parse_due_time,
    to_microseconds,
)
from bide.errors import InvalidDelayError, InvalidDueTimeError

_MICROSECOND: Final = timedelta(microseconds=1)

_LAST: Final = to_microseconds(datetime.max.replace(tzinfo=UTC))

DEFAULT_START: Final = datetime(2030, 1, 1, tzinfo=UTC)


class Timer:
    """Something to be done at a certain time; see :meth:`VirtualClock.call_at`."""

    __slots__ = ("_callback", "at")

    def __init__(self, at: int, callback: Callable[[], None]) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback

    @property
    def cancelled(self) -> bool:
        """Whether it will not be done, or is done already."""
        return self._callback is None

    def cancel(self) -> None:
        """Do not do it."""
        self._callback = None

    def run(self) -> None:
        """Do it, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class VirtualClock:
    """A clock that shows the same time until it is advanced. What is due on the way happens in order, each at its time.

    Args:
        start: what it shows at first, with a time zone; the beginning of 2030 if None.
        guard: entered while it moves, a lock where several threads use the broker.

    Attributes:
        microseconds: since the Unix epoch.
    """

    def __init__(self, start: DueTimeLike | None = None, *, guard: AbstractContextManager[Any] | None = None) -> None:
        moment = DEFAULT_START if start is None else parse_due_time(start)
        self.microseconds = to_microseconds(moment)
        self._timers: list[tuple[int, int, Timer]] = []
        self._numbers = count()
        self._guard = nullcontext() if guard is None else guard

    def now(self) -> datetime:
        """The time in UTC."""
        return from_microseconds(self.microseconds)

    @property
    def milliseconds(self) -> int:
        """Whole milliseconds since the Unix epoch, as the broker counts time."""
        return self.microseconds // 1000

    @property
    def next_due(self) -> datetime | None:
        """When something happens next by itself; None if nothing is planned."""
        self._forget_cancelled()
        return from_microseconds(self._timers[0][0]) if self._timers else None

    def call_at(self, microseconds: int, callback: Callable[[], None]) -> Timer:
        """Have something done at a time, given in microseconds since the Unix epoch.

        One in the past comes with the next advance, before anything else.
        """
        timer = Timer(microseconds, callback)
        heappush(self._timers, (microseconds, next(self._numbers), timer))
        return timer

    def advance(self, delay: DelayLike) -> None:
        """Let time pass.

        Raises:
            InvalidDelayError: it is negative, leads beyond the year 9999, or cannot be read.
        """
        wait = parse_delay(delay)
        with self._guard:
            target = self.microseconds + wait // _MICROSECOND
            if target > _LAST:
                raise InvalidDelayError(
                    f"{format_delay(wait)} after {self.now().isoformat()} is beyond the year 9999, where the calendar "
                    "ends: give less"
                )
            self._move(target)

    def advance_to(self, moment: DueTimeLike) -> None:
        """Let time pass until a moment.

        Raises:
            InvalidDueTimeError: the clock is beyond it, or it has no time zone.
        """
        due = parse_due_time(moment)
        target = to_microseconds(due)
        with self._guard:
            self._move_forward(due, target)

    def _move_forward(self, due: datetime, target: int) -> None:
        if target < self.microseconds:
            raise InvalidDueTimeError(
                f"{due.isoformat()} lies {format_delay(self.now() - due)} before {self.now().isoformat()}, which the "
                "clock shows: a clock only goes forward"
            )
        self._move(target)

    def _move(self, target: int) -> None:
        while True:
            self._forget_cancelled()
            if not self._timers or self._timers[0][0] > target:
                break
            at, _, timer = heappop(self._timers)
            # What was planned for the past happens now.
            self.microseconds = max(self.microseconds, at)
            timer.run()
        self.microseconds = max(self.microseconds, target)

    def _forget_cancelled(self) -> None:
        while self._timers and self._timers[0][2].cancelled:
            heappop(self._timers)
