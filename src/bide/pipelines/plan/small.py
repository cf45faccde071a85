"""Workload of a small table, in this process.

The classes of messages are those that :func:`bide.pipelines.plan.workload.of_table` computes with Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta, tzinfo
from math import ceil
from typing import Any, Final

import numpy as np
import pyarrow as pa

from bide.durations import MILLISECOND
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.plan.arrays import CLASS_MEASURES, Array, ArrayWorkload, grouped
from bide.pipelines.plan.columns import (
    DEFAULT_GRAIN,
    Columns,
    check_columns,
    check_grain,
    check_rows,
    not_a_delay,
    not_a_number,
    not_a_time,
)
from bide.pipelines.small_table import spark_name
from bide.pipelines.small_times import times

_MOST_SPANS: Final = 2_000_000
"""The largest number of spans that this process computes by default, in about 700 MB."""

_BIGINT_LIMIT: Final = float(1 << 63)
"""The smallest number that is too large for a bigint."""


def of_small_table(
    table: pa.Table, columns: Columns, zone: tzinfo, *, grain: timedelta = DEFAULT_GRAIN
) -> ArrayWorkload:
    """The workload of a small table; see :func:`bide.pipelines.plan.workload.of_table`.

    Args:
        zone: the time zone of times without an offset.

    Raises:
        NeedsSparkError: only Spark can convert a value.
    """
    check_columns(columns, table.column_names)
    check_grain(grain)
    step = grain // MILLISECOND
    at, is_bad = _milliseconds(table, columns.at, zone)
    if columns.due is not None:
        due, is_missing = _milliseconds(table, columns.due, zone)
        delay = np.maximum(due - at, 0)
    else:
        assert columns.delay is not None
        delay, is_missing = _delays(table, columns.delay)
    is_bad |= is_missing | (delay < 0)
    n, size = np.ones(len(at)), np.full(len(at), float(columns.constant_size))
    if columns.count is not None:
        n, is_missing = _numbers(table, columns.count)
        is_bad |= is_missing | (n < 0)
    if columns.size is not None:
        size, is_missing = _numbers(table, columns.size)
        is_bad |= is_missing | (size < 0)
    check_rows(len(at), int(np.count_nonzero(is_bad)))
    passing = (delay > 0) & (n > 0)
    nothing = np.zeros(int(np.count_nonzero(passing)))
    classes = {
        "at": (at - at % step)[passing],
        "delay": delay[passing],
        "n": n[passing],
        "n_rate": nothing,
        "bytes": (n * size)[passing],
        "bytes_rate": nothing,
    }
    return ArrayWorkload(
        classes=grouped(classes, ("at", "delay"), CLASS_MEASURES),
        messages=float(n.sum()),
        undelayed=float(n[delay == 0].sum()),
        bytes=float((n * size).sum()),
        first=int(at.min()) // step * step,
        longest=int(delay.max()),
    )


def refuse_many_spans(workload: ArrayWorkload, every: timedelta) -> None:
    """Refuse a table whose times are far apart, for example because rows have a time in the year 1 by default.

    Raises:
        NeedsSparkError: there are too many spans for this process.
    """
    at = workload.classes["at"]
    if not len(at):
        return
    spans = (int(at.max() - at.min()) + workload.longest) // (every // MILLISECOND)
    if spans > _MOST_SPANS:
        raise NeedsSparkError(f"the times are up to {spans:,} spans of {every} apart")


def _milliseconds(table: pa.Table, name: str, zone: tzinfo) -> tuple[Array, Array]:
    """A column of times in milliseconds since the Unix epoch, and whether each is null."""
    column = table.column(name)
    kind = column.type
    if not (pa.types.is_timestamp(kind) or kind in (pa.string(), pa.date32())):
        raise not_a_time(name, spark_name(kind))
    micros, is_missing = _whole(times(name, column, zone))
    return micros // 1000, is_missing


def _delays(table: pa.Table, name: str) -> tuple[Array, Array]:
    """A column of delays in milliseconds, rounded up, and whether each is null."""
    column = table.column(name)
    kind = column.type
    if pa.types.is_integer(kind):
        return _array(column, pa.int64())
    if kind == pa.float64():
        found, is_missing = _numbers(table, name)
        if (np.abs(found) >= _BIGINT_LIMIT).any():
            raise NeedsSparkError(f"the column {name!r} has delays that are not in the range of a bigint")
        return np.ceil(found).astype(np.int64), is_missing
    if pa.types.is_decimal128(kind):
        values = [None if one is None else ceil(one) for one in column.to_pylist()]
        if any(one is not None and abs(one) >= _BIGINT_LIMIT for one in values):
            raise NeedsSparkError(f"the column {name!r} has delays that are not in the range of a bigint")
        return _whole(values)
    raise not_a_delay(name, spark_name(kind))


def _numbers(table: pa.Table, name: str) -> tuple[Array, Array]:
    """A column of numbers in double precision, and whether each is null."""
    column = table.column(name)
    kind = column.type
    if pa.types.is_decimal128(kind):
        # Python rounds correctly, as Java does; a cast of Arrow does not.
        column = pa.chunked_array([[None if one is None else float(one) for one in column.to_pylist()]], pa.float64())
    elif not (pa.types.is_integer(kind) or kind == pa.float64()):
        raise not_a_number(name, spark_name(kind))
    found, is_missing = _array(column, pa.float64())
    if not np.isfinite(found).all():
        raise NeedsSparkError(f"the column {name!r} has numbers that are infinite or NaN")
    return found, is_missing


def _whole(values: Sequence[int | None]) -> tuple[Array, Array]:
    return _array(pa.chunked_array([values], pa.int64()), pa.int64())


def _array(column: pa.ChunkedArray, kind: pa.DataType) -> tuple[Array, Array]:
    """The values of a column, with 0 for null, and whether each is null."""
    is_missing: Any = column.is_null().to_numpy()
    found: Any = column.cast(kind, safe=False).fill_null(0).to_numpy()
    return found, is_missing
