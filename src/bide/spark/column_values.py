"""Values of Arrow columns as fields of messages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from bide import durations
from bide.durations import format_delay, from_microseconds, to_microseconds
from bide.errors import InvalidInputError, InvalidRowError
from bide.spark.header_values import headers_from_entries, headers_with_types, stored_headers

EARLIEST_MICROSECONDS: Final = to_microseconds(durations.EARLIEST)
LATEST_MICROSECONDS: Final = to_microseconds(durations.LATEST)
"""The first and the last time that Python can represent, in microseconds since the Unix epoch."""

_OUTSIDE: Final = "a time outside the years 1 to 9999: give a time in this range"

_DEFAULTS: Final[Mapping[str, Any]] = {"routing_key": "", "persistent": True}
"""What null means in these columns. In the other columns it means None."""


def values_of(name: str, column: pa.Array) -> list[Any]:
    """Convert a column to values of fields. In place of an invalid value, the list has the error."""
    kind = column.type
    if name == "value":
        binary = column.cast(pa.large_binary() if _is_large(kind) else pa.binary())
        return binary.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    if pa.types.is_duration(kind):
        return [None if one is None else _delay(one) for one in column.cast(pa.int64()).to_pylist()]
    if name in ("delay", "expiration") and pa.types.is_integer(kind):
        return [None if one is None else _delay(one * 1_000) for one in column.to_pylist()]
    if name in ("deliver_at", "creation_time"):
        return [None if one is None else _moment(one) for one in column.cast(pa.int64()).to_pylist()]
    values = _read(column)
    if name == "headers_json":
        return [headers_with_types(one) for one in values]
    if name == "headers":
        if is_text_type(kind):
            return [stored_headers(one) for one in values]
        return [headers_from_entries(one) if isinstance(one, list) else one for one in values]
    default = _DEFAULTS.get(name)
    if default is not None and column.null_count:
        return [default if one is None else one for one in values]
    return values


def epoch_microseconds(times: pa.Array) -> pa.Array:
    """Convert times to microseconds since 1970."""
    return pc.cast(times, pa.int64())


def _read(column: pa.Array) -> list[Any]:
    """The values of a column. In place of a value that Python cannot represent, the list has the error."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    except (ValueError, OverflowError):
        return [_read_one(scalar) for scalar in column]


def _read_one(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return InvalidRowError("text that is not UTF-8: encode it as UTF-8")
    except (ValueError, OverflowError):
        return InvalidRowError(_OUTSIDE)


def value_of(name: str, value: Any) -> Any:
    """Convert a single value as :func:`values_of` does, for columns with few different values."""
    if value is None:
        return _DEFAULTS.get(name)
    if name == "expiration" and isinstance(value, int):
        return _delay(value * 1_000)
    return value


def is_text_type(kind: pa.DataType) -> bool:
    """Whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


@lru_cache(maxsize=4096)
def _delay(microseconds: int) -> timedelta | InvalidInputError:
    try:
        delay = timedelta(microseconds=microseconds)
    except OverflowError:
        return InvalidRowError(
            f"a delay of {microseconds // 1_000:,} ms is longer than any infrastructure supports: give a shorter one"
        )
    return (
        delay
        if microseconds >= 0
        else InvalidRowError(f"the delay {format_delay(delay)} is negative: give zero or more")
    )


def _moment(microseconds: int) -> datetime | InvalidInputError:
    if EARLIEST_MICROSECONDS <= microseconds <= LATEST_MICROSECONDS:
        return from_microseconds(microseconds)
    return InvalidRowError(_OUTSIDE)
