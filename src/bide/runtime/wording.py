"""Numbers with their nouns, for errors, log lines and output."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def quantity(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 message``, ``2,000 messages``.

    Args:
        plural: the plural, if it is not the noun with an ``s``; with a verb for example ``"messages wait"``.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def in_bytes(count: float) -> str:
    """Format a number of bytes, such as ``1.2 GB``."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} B"
