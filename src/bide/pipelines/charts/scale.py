"""Scales: positions of values on an axis, and the choice of ticks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil, floor, log10
from typing import Final

from bide.durations import EARLIEST, EPOCH, LATEST

_NICE: Final = (1, 2, 5, 10)
_DAY: Final = timedelta(days=1)
_DURATIONS: Final = (
    *(10.0**power for power in range(-3, 5)),
    *(60_000.0, 600_000.0, 3_600_000.0, 36_000_000.0),
    *(86_400_000.0 * 10**power for power in range(5)),
)
"""Tick values of durations in ms, each about ten times the previous one."""

ROUND_SPANS: Final = (
    *(timedelta(milliseconds=number) for number in (10, 100, 200, 500)),
    *(timedelta(seconds=number) for number in (1, 2, 5, 10, 15, 30)),
    *(timedelta(minutes=number) for number in (1, 2, 5, 10, 15, 30)),
    *(timedelta(hours=number) for number in (1, 2, 3, 6, 12)),
    *(timedelta(days=number) for number in (1, 2, 7, 14, 30, 60, 91, 182, 365, 730, 1825, 3650)),
)
"""Round spans of time."""


@dataclass(frozen=True, slots=True)
class LinearScale:
    """A linear axis.

    Attributes:
        low: the value at *start*.
        high: the value at *end*, different from *low*.
        start: the start of the axis, in pixels.
        end: the end of the axis, in pixels.
    """

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The position of a value, in pixels."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int, *, least: float = 1.0) -> list[float]:
        """Round numbers, approximately as many as *about*.

        Args:
            least: the smallest step between two ticks, 1 for whole numbers.
        """
        rough = (self.high - self.low) / about
        magnitude = 10.0 ** floor(log10(rough))
        step = max(min((nice * magnitude for nice in _NICE), key=lambda one: abs(log10(one / rough))), least)
        return [step * number for number in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class LogarithmicScale:
    """A logarithmic axis of durations in ms. Its attributes are those of :class:`LinearScale`; *low* is positive."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The position of a value, in pixels. A value below *low* is at the start of the axis."""
        share = log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, apart: float) -> list[float]:
        """Round durations in ms.

        Args:
            apart: the smallest distance between two ticks, in pixels.
        """
        found: list[float] = []
        for value in _DURATIONS:
            far = not found or abs(self.place(value) - self.place(found[-1])) >= apart
            if self.low * 0.999 <= value <= self.high * 1.001 and far:
                found.append(value)
        return found


@dataclass(frozen=True, slots=True)
class TimeScale:
    """An axis of time."""

    first: datetime
    last: datetime
    start: float
    end: float

    def place(self, moment: datetime) -> float:
        """The position of a time, in pixels."""
        return self.start + (moment - self.first) / (self.last - self.first) * (self.end - self.start)

    def ticks(self, about: int) -> Iterator[tuple[datetime, str, str]]:
        """Round times, each with two lines of text, where the second one may be empty.

        The lines are the time of day and the date; a day and its year if ticks are days apart; or a month with its
        year, without a second line. The second line is empty if it is the same as that of the previous tick.

        Args:
            about: the largest number of steps between ticks.
        """
        step = span_for(self.last - self.first, about)
        date = ""
        moment = floored(self.first, step)
        while moment <= self.last:
            if moment >= self.first:
                upper, lower = _tick_text(moment, step)
                yield moment, upper, "" if lower == date else lower
                date = lower
            if self.last - moment < step:
                # The next tick may be after the last time that Python can represent.
                return
            moment += step


def span_for(whole: timedelta, parts: int) -> timedelta:
    """The shortest of :data:`ROUND_SPANS` that divides *whole* into at most *parts* parts, or else the longest one."""
    return next((span for span in ROUND_SPANS if whole / span <= parts), ROUND_SPANS[-1])


def floored(moment: datetime, span: timedelta) -> datetime:
    """Round a time down to a multiple of a span since 1970 in UTC, but not below :data:`~bide.durations.EARLIEST`."""
    try:
        return moment - (moment - EPOCH) % span
    except OverflowError:
        return EARLIEST


def add_spans(first: datetime, span: timedelta, number: int) -> datetime:
    """The time *number* spans after *first*, but not after :data:`~bide.durations.LATEST`."""
    try:
        return first + span * number
    except OverflowError:
        return LATEST


def widened(first: datetime, last: datetime, span: timedelta, *, fewest: int) -> tuple[datetime, datetime]:
    """Extend a range of time on both sides to at least *fewest* spans, so that a few bars do not fill a plot.

    The result is shorter if Python cannot represent its first or last time.
    """
    missing = max(fewest - (last - first) // span, 0)
    before = missing // 2
    try:
        start = first - span * before
    except OverflowError:
        start = EARLIEST
    return start, add_spans(last, span, missing - before)


def _tick_text(moment: datetime, step: timedelta) -> tuple[str, str]:
    if step >= 28 * _DAY:
        return f"{moment:%b %Y}", ""
    if step >= _DAY:
        return f"{moment:%b} {moment.day}", f"{moment:%Y}"
    if step < timedelta(seconds=1):
        return f"{moment:%H:%M:%S}.{moment.microsecond // 100_000}", f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step < timedelta(minutes=1) else f"{moment:%H:%M}", f"{moment:%b} {moment.day}"
