"""Columns of a table of messages that a plan reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from bide.durations import MILLISECOND
from bide.errors import InvalidInputError

GRAIN = timedelta(milliseconds=10)
"""The default grain, to which times of sending are rounded down: the resolution of ``Clock``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table.

    Attributes:
        at: the column of times of sending.
        delay: the column of delays: intervals, or numbers of milliseconds.
        due: the column of due times, instead of *delay*; a message that is due before it is sent is not delayed.
        size: the column of body sizes in bytes; None for *constant_size*.
        count: the column of the number of messages that a row stands for; None for one message per row.
        constant_size: the size of all bodies in bytes.
    """

    at: str
    delay: str | None = None
    due: str | None = None
    size: str | None = None
    count: str | None = None
    constant_size: int = 200


def check_grain(grain: timedelta) -> None:
    """Check the grain to which times of sending are rounded down.

    Raises:
        InvalidInputError: the grain is not a whole number of milliseconds.
    """
    if grain < MILLISECOND or grain % MILLISECOND:
        raise InvalidInputError(f"the grain of {grain} is not a whole number of milliseconds: give 1 ms or more")
