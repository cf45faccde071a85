"""Columns of a table of messages that a plan reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from bide.durations import MILLISECOND
from bide.errors import InvalidColumnError, InvalidInputError, InvalidRowError

DEFAULT_GRAIN = timedelta(milliseconds=10)
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


def check_columns(columns: Columns, names: Sequence[str]) -> None:
    """Check that a table has the columns.

    Args:
        names: the names of the columns of the table.

    Raises:
        InvalidInputError: the columns do not have exactly one of *delay* and *due*.
        InvalidColumnError: a column is missing.
    """
    if (columns.delay is None) == (columns.due is None):
        raise InvalidInputError("name either the column of delays or the column of due times")
    for name in (columns.at, columns.delay, columns.due, columns.count, columns.size):
        if name is not None and name not in names:
            raise InvalidColumnError(f"there is no column {name!r}: choose from {', '.join(names)}")


def not_a_time(name: str, kind: str) -> InvalidColumnError:
    """The error for a column of times of another type, such as ``int``."""
    return InvalidColumnError(f"the column {name!r} is {kind}, which is not a time: convert it to a timestamp")


def not_a_delay(name: str, kind: str) -> InvalidColumnError:
    """The error for a column of delays of another type."""
    return InvalidColumnError(
        f"the column {name!r} is {kind}, which is not a delay: convert it to an interval, or to a number of "
        "milliseconds"
    )


def not_a_number(name: str, kind: str) -> InvalidColumnError:
    """The error for a column of numbers of another type."""
    return InvalidColumnError(f"the column {name!r} is {kind}, which is not a number: convert it")


def check_rows(rows: int, bad: int) -> None:
    """Check that a table has rows, and that none of them is bad.

    Args:
        rows: the number of rows.
        bad: the number of rows in which a value is missing, or a delay, size or count is negative.

    Raises:
        InvalidInputError: there are no rows.
        InvalidRowError: there are bad rows.
    """
    if not rows:
        raise InvalidInputError("the table has no rows, so there is nothing to plan for: name another")
    if bad:
        raise InvalidRowError(
            f"{bad:,} of {rows:,} rows have no time of sending, delay, due time, size or count, or a negative delay, "
            "size or count: fix these rows, or leave them out"
        )


def check_grain(grain: timedelta) -> None:
    """Check the grain to which times of sending are rounded down.

    Raises:
        InvalidInputError: the grain is not a whole number of milliseconds.
    """
    if grain < MILLISECOND or grain % MILLISECOND:
        raise InvalidInputError(f"the grain of {grain} is not a whole number of milliseconds: give 1 ms or more")
