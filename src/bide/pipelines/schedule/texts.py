"""Values of a small table as Spark writes them: as text, in JSON, and as times."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import partial
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa

from bide.durations import to_microseconds
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.small_table import spark_name

_ESCAPED: Final = re.compile(r'[\x00-\x1f"\\]')
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?(Z|[+-](?:0\d|1[0-4]):[0-5]\d)?)?", re.ASCII
)
"""The times in text that are read here. Spark reads more; a text without a digit is never a time."""

_DIGIT: Final = re.compile(r"\d")
_FIRST_YEAR: Final = 1972
"""Before this year, Python and Java may disagree on the offset of a zone."""

_LAST_YEAR: Final = 9999
"""In this year, a time may have no representation in another zone."""

_MICROSECOND: Final = timedelta(microseconds=1)


def zone_of(name: str) -> tzinfo:
    """The time zone of a session.

    Raises:
        NeedsSparkError: Python may know it by another rule than Java.
    """
    if name == "UTC":
        return UTC
    try:
        if re.fullmatch(r"[A-Z]\w+/[\w/]+", name):
            return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        # Unknown, or without the time zone database.
        pass
    raise NeedsSparkError(f"the time zone is {name!r}")


def times(name: str, column: pa.ChunkedArray, zone: tzinfo) -> list[int | None]:
    """A column of times in microseconds since the Unix epoch; None for other values.

    Raises:
        NeedsSparkError: a value may be a time for Spark.
    """
    kind = column.type
    if kind == pa.timestamp("us", "UTC"):
        return column.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    if kind == pa.string():
        found = [None if one is None else _time_in(name, one, zone) for one in column.to_pylist()]
    elif kind == pa.timestamp("us"):
        found = [None if one is None else _in_zone(name, one, zone) for one in _values(name, column)]
    elif kind == pa.date32():
        found = [
            None if one is None else _in_zone(name, datetime(one.year, one.month, one.day), zone)  # noqa: DTZ001 (the zone is set there)
            for one in _values(name, column)
        ]
    else:
        raise NeedsSparkError(f"the column {name!r} is {spark_name(kind)}, which is not a time")
    return [None if one is None else to_microseconds(one) for one in found]


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    except (ValueError, OverflowError) as error:
        raise NeedsSparkError(f"the column {name!r} has times outside the years 1 to 9999") from error


def _time_in(name: str, text: str, zone: tzinfo) -> datetime | None:
    if not _DIGIT.search(text):
        return None
    match = _TIME.fullmatch(text)
    if match is None or match[1].startswith("0000"):
        raise NeedsSparkError(f"the column {name!r} has {text[:40]!r}, which is not a time in ISO 8601 with seconds")
    day, clock, fraction, offset = match.groups()
    plain = f"{day}T{clock or '00:00:00'}.{(fraction or '').ljust(6, '0')}"
    try:
        if clock is not None and clock.startswith("24"):
            return None  # Python 3.14 accepts it.
        if offset is not None:
            return datetime.fromisoformat(f"{plain}{offset}")
        return _in_zone(name, datetime.fromisoformat(plain), zone)
    except ValueError:
        # The 30th of February.
        return None


def _in_zone(name: str, time: datetime, zone: tzinfo) -> datetime:
    if zone is not UTC and time.year < _FIRST_YEAR:
        raise NeedsSparkError(f"the column {name!r} has times before {_FIRST_YEAR} in another zone than UTC")
    return time.replace(tzinfo=zone)


def _to_zone(name: str, time: datetime, zone: tzinfo) -> datetime:
    if zone is not UTC and not _FIRST_YEAR <= time.year < _LAST_YEAR:
        raise NeedsSparkError(f"the column {name!r} has times before {_FIRST_YEAR} or in 9999 in another zone than UTC")
    return time.astimezone(zone)


def cast_texts(name: str, column: pa.ChunkedArray, zone: tzinfo) -> list[str | None]:
    """A column as text, as Spark casts it.

    Raises:
        NeedsSparkError: the text of this type is not certain.
    """
    kind = column.type
    write: Callable[[Any], str]
    if kind == pa.string():
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    if pa.types.is_integer(kind):
        write = str
    elif kind == pa.bool_():
        write = _boolean
    elif kind == pa.float64():
        write = partial(_float, name)
    elif kind == pa.date32():
        _values(name, column)
        write = date.isoformat
    elif pa.types.is_timestamp(kind):
        write = partial(_timestamp_text, name, zone=zone if kind.tz else None)
    else:
        raise NeedsSparkError(f"the column {name!r} is {spark_name(kind)}")
    return [None if one is None else write(one) for one in _values(name, column)]


def json_objects(names: Sequence[str], columns: Sequence[pa.ChunkedArray], zone: tzinfo, rows: int) -> list[str]:
    """A JSON object for each row, as Spark's ``to_json`` writes it, with its nulls.

    Raises:
        NeedsSparkError: the JSON of a type is not certain.
    """
    if not names:
        return ["{}"] * rows
    values = [_json_values(name, column, zone) for name, column in zip(names, columns, strict=True)]
    form = ",".join(f"{quoted(name).replace('%', '%%')}:%s" for name in names)
    return [f"{{{form}}}" % row for row in zip(*values, strict=True)]


def _json_values(name: str, column: pa.ChunkedArray, zone: tzinfo) -> list[str]:
    kind = column.type
    write: Callable[[Any], str]
    if kind == pa.string():
        write = quoted
    elif pa.types.is_integer(kind) or pa.types.is_decimal128(kind):
        write = str
    elif kind == pa.bool_():
        write = _boolean
    elif kind == pa.float64():
        write = partial(_float, name)
    elif kind == pa.binary():
        write = _base64
    elif kind == pa.date32():
        write = _quoted_date
    elif pa.types.is_timestamp(kind):
        write = partial(_json_timestamp, name, zone=zone if kind.tz else None)
    else:
        raise NeedsSparkError(f"the column {name!r} is {spark_name(kind)}")
    return ["null" if one is None else write(one) for one in _values(name, column)]


def quoted(text: str) -> str:
    """A text in JSON, as Jackson writes it."""
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0]) or f"\\u{ord(match[0]):04X}"


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _base64(value: bytes) -> str:
    return f'"{b64encode(value).decode()}"'


def _quoted_date(value: date) -> str:
    return f'"{value.isoformat()}"'


def _float(name: str, value: float) -> str:
    """A number as Java writes it, as far as all releases of Java write it in the same way."""
    text = repr(value)
    if value == 0 or (1e-3 <= abs(value) < 1e7 and len(text.replace(".", "").strip("-0")) <= 15):
        return text
    raise NeedsSparkError(f"the column {name!r} has {value!r}, whose text depends on the release of Java")


def _json_timestamp(name: str, value: datetime, zone: tzinfo | None) -> str:
    """A time in milliseconds, in the zone of the session; without a zone, as it is."""
    if zone is None:
        return f'"{value.isoformat(timespec="milliseconds")}"'
    text = _to_zone(name, value, zone).isoformat(timespec="milliseconds")
    return f'"{text[:-6]}Z"' if text.endswith("+00:00") else f'"{text}"'


def _timestamp_text(name: str, value: datetime, zone: tzinfo | None) -> str:
    here = value if zone is None else _to_zone(name, value, zone)
    text = here.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
    return text.rstrip("0").rstrip(".")
