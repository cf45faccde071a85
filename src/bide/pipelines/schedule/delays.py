"""Delays in a column of text, in milliseconds."""

from __future__ import annotations

from typing import Final

from bide.durations import MILLISECOND, parse_delay
from bide.errors import InvalidInputError

LONGEST: Final = 10**15
"""The length in milliseconds to which longer delays are cut. It ends after the year 9999, so these rows count as due
too late, and their due times still fit into the 64 bits of a Spark timestamp."""


def milliseconds_of(text: str | None) -> int | None:
    """Parse a delay, rounded up to milliseconds as in the sink; None for null or an invalid delay."""
    try:
        return None if text is None else -(-parse_delay(text) // MILLISECOND)
    except InvalidInputError:
        return None
