"""Times of a small table, as Spark reads them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa

from bide.durations import to_microseconds
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.small_table import spark_name

_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?(Z|[+-](?:0\d|1[0-4]):[0-5]\d)?)?)?", re.ASCII
)
"""The forms of times in text that this module reads. Spark reads more forms, all of which have a digit."""

_DIGIT: Final = re.compile(r"\d")
_FIRST_YEAR: Final = 1972
"""Before this year, Python and Java may disagree on the offset of a zone."""

_LAST_YEAR: Final = 9999
"""In this year, a time may have no representation in another zone."""


def zone_of(name: str) -> tzinfo:
    """The time zone of a session.

    Raises:
        NeedsSparkError: Python may have other rules for this zone than Java.
    """
    if name == "UTC":
        return UTC
    try:
        if re.fullmatch(r"[A-Z]\w+/[\w/]+", name):
            return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        # The zone is unknown, or this machine has no time zone database.
        pass
    raise NeedsSparkError(f"the time zone is {name!r}")


def times(name: str, column: pa.ChunkedArray, zone: tzinfo) -> list[int | None]:
    """The values of a column as times in microseconds since the Unix epoch; None for a value that is not a time.

    Raises:
        NeedsSparkError: the type of the column is not one of times, or Spark may read a value as a time that this
            function cannot read.
    """
    kind = column.type
    if kind == pa.timestamp("us", "UTC"):
        return column.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    if kind == pa.string():
        found = [None if one is None else _time_in(name, one, zone) for one in column.to_pylist()]
    elif kind == pa.timestamp("us"):
        found = [None if one is None else _in_zone(name, one, zone) for one in values_of(name, column)]
    elif kind == pa.date32():
        found = [
            None if one is None else _in_zone(name, datetime(one.year, one.month, one.day), zone)  # noqa: DTZ001 (_in_zone sets it)
            for one in values_of(name, column)
        ]
    else:
        raise NeedsSparkError(f"the column {name!r} is {spark_name(kind)}, which is not a time")
    return [None if one is None else to_microseconds(one) for one in found]


def values_of(name: str, column: pa.ChunkedArray) -> list[Any]:
    """The values of a column.

    Raises:
        NeedsSparkError: Python cannot represent a time.
    """
    try:
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    except (ValueError, OverflowError) as error:
        raise NeedsSparkError(f"the column {name!r} has times outside the years 1 to 9999") from error


def _time_in(name: str, text: str, zone: tzinfo) -> datetime | None:
    if not _DIGIT.search(text):
        return None
    match = _TIME.fullmatch(text)
    if match is None or match[1].startswith("0000"):
        raise NeedsSparkError(
            f"the column {name!r} has {text[:40]!r}, which is not a time in ISO 8601 (like 2026-12-24T18:00:00)"
        )
    day, clock, seconds, fraction, offset = match.groups()
    plain = f"{day}T{clock or '00:00'}:{seconds or '00'}.{(fraction or '').ljust(6, '0')}"
    try:
        if clock is not None and clock.startswith("24"):
            return None  # Python 3.14 accepts the hour 24, and Spark does not.
        if offset is not None:
            return datetime.fromisoformat(f"{plain}{offset}")
        return _in_zone(name, datetime.fromisoformat(plain), zone)
    except ValueError:
        # For example 30 February, which is null in Spark.
        return None


def _in_zone(name: str, time: datetime, zone: tzinfo) -> datetime:
    if zone is not UTC and time.year < _FIRST_YEAR:
        raise NeedsSparkError(f"the column {name!r} has times before {_FIRST_YEAR} in a zone other than UTC")
    return time.replace(tzinfo=zone)


def to_zone(name: str, time: datetime, zone: tzinfo) -> datetime:
    """Convert a time to a zone.

    Raises:
        NeedsSparkError: Python and Java may convert it differently.
    """
    if zone is not UTC and not _FIRST_YEAR <= time.year < _LAST_YEAR:
        raise NeedsSparkError(f"the column {name!r} has times before {_FIRST_YEAR} or in 9999 in a zone other than UTC")
    return time.astimezone(zone)
