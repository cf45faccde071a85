"""Formatting of numbers, durations and times for charts. All times are UTC."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS: Final = ((86_400_000.0, "d"), (3_600_000.0, "h"), (60_000.0, "min"), (1000.0, "s"), (1.0, "ms"))


def count(number: float) -> str:
    """A whole number with separators."""
    return f"{number:,.0f}"


def brief(number: float) -> str:
    """A short form of a number for an axis, such as ``2.5M``."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"


def milliseconds(value: float | None) -> str:
    """Format a duration in milliseconds, such as ``12 ms``, ``1.5 s`` or ``2.1 h``; a dash for None."""
    if value is None:
        return "–"
    for size, unit in _UNITS:
        if abs(value) >= size:
            number = value / size
            return f"{number:,.0f} {unit}" if abs(number) >= 100 else f"{number:.3g} {unit}"
    return f"{value:.1g} ms" if value else "0 ms"


def span(value: timedelta) -> str:
    """Format a round span of time: ``5 minutes``, ``hour``."""
    seconds = value.total_seconds()
    for size, noun in ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size:
            number = seconds / size
            return noun if number == 1 else f"{number:g} {noun}s"
    return f"{seconds * 1000:g} ms"


def moment(value: datetime | None) -> str:
    """Format a time to the second; a dash for None."""
    return "–" if value is None else f"{value:%Y-%m-%d %H:%M:%S}"
