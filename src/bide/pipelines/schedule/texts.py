"""Values of a small table as Spark writes them: as text, and in JSON."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import date, datetime, tzinfo
from functools import partial
from typing import Any, Final

import pyarrow as pa

from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.small_table import spark_name
from bide.pipelines.small_times import to_zone, values_of

_ESCAPED: Final = re.compile(r'[\x00-\x1f"\\]')
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def cast_texts(name: str, column: pa.ChunkedArray, zone: tzinfo) -> list[str | None]:
    """A column as text, as Spark casts it.

    Raises:
        NeedsSparkError: this module cannot write a value exactly as Spark does.
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
        values_of(name, column)
        write = date.isoformat
    elif pa.types.is_timestamp(kind):
        write = partial(_timestamp_text, name, zone=zone if kind.tz else None)
    else:
        raise NeedsSparkError(f"the column {name!r} is {spark_name(kind)}")
    return [None if one is None else write(one) for one in values_of(name, column)]


def json_objects(names: Sequence[str], columns: Sequence[pa.ChunkedArray], zone: tzinfo, rows: int) -> list[str]:
    """A JSON object for each row, as Spark's ``to_json`` writes it, with null fields.

    Raises:
        NeedsSparkError: this module cannot write a value exactly as Spark does.
    """
    if not names:
        return ["{}"] * rows
    values = [_json_values(name, column, zone) for name, column in zip(names, columns, strict=True)]
    template = ",".join(f"{quoted(name).replace('%', '%%')}:%s" for name in names)
    return [f"{{{template}}}" % row for row in zip(*values, strict=True)]


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
    return ["null" if one is None else write(one) for one in values_of(name, column)]


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
    """A number as Java writes it. Numbers whose text depends on the release of Java are left to Spark."""
    text = repr(value)
    if value == 0 or (1e-3 <= abs(value) < 1e7 and len(text.replace(".", "").strip("-0")) <= 15):
        return text
    raise NeedsSparkError(f"the column {name!r} has {value!r}, whose text depends on the release of Java")


def _json_timestamp(name: str, value: datetime, zone: tzinfo | None) -> str:
    """A time in milliseconds, in the zone of the session; without a zone, as it is."""
    if zone is None:
        return f'"{value.isoformat(timespec="milliseconds")}"'
    text = to_zone(name, value, zone).isoformat(timespec="milliseconds")
    return f'"{text[:-6]}Z"' if text.endswith("+00:00") else f'"{text}"'


def _timestamp_text(name: str, value: datetime, zone: tzinfo | None) -> str:
    here = value if zone is None else to_zone(name, value, zone)
    text = here.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
    return text.rstrip("0").rstrip(".")
