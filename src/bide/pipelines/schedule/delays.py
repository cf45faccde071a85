"""Delays in a column of text, in milliseconds."""

from __future__ import annotations

from typing import Final

from bide.durations import MILLISECOND, parse_delay
from bide.errors import InvalidInputError

LONGEST: Final = 10**14
"""Longer delays in milliseconds count as this one. No infrastructure can delay for as long, and the due time still fits
into the 64 bits of a Spark timestamp."""


def milliseconds_of(text: str | None) -> int | None:
    """Parse a delay, rounded up to milliseconds as in the sink; None for null or an invalid delay."""
    try:
        return None if text is None else -(-parse_delay(text) // MILLISECOND)
    except InvalidInputError:
        return None
