"""Filters of a query as ranges of offsets."""

from __future__ import annotations

import operator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from bide.spark.pushdown import StreamFilters
from bide.streams.log import StreamLogs
from bide.streams.range_reader import OffsetRange

BEGIN = datetime(2026, 11, 21, 6, tzinfo=UTC)
OFFSET, TIME, STREAM = ("offset",), ("timestamp",), ("stream",)


class Logs:
    """A stream that stores a message each second, from ``BEGIN`` on."""

    def since(self, stream: str, milliseconds: int) -> int:
        return min(1000, max(0, -(-(milliseconds - round(BEGIN.timestamp() * 1000)) // 1000)))


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def narrowed(*filters: Filter) -> tuple[int, int] | None:
    made = StreamFilters()
    for one in filters:
        made.add(one)
    found = made.narrowed(OffsetRange(stream="s", start=0, end=1000), cast("StreamLogs", Logs()))
    return (found.start, found.end) if found.start < found.end else None


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], (0, 1000)),
        ([GreaterThan(OFFSET, 5), LessThan(OFFSET, 8)], (6, 8)),
        ([GreaterThanOrEqual(OFFSET, 5), LessThanOrEqual(OFFSET, 8)], (5, 9)),
        ([EqualTo(OFFSET, 7)], (7, 8)),
        ([EqualNullSafe(OFFSET, 7)], (7, 8)),
        ([In(OFFSET, (3, 9, 5))], (3, 10)),
        ([In(OFFSET, (3, None))], (0, 1000)),
        ([EqualTo(OFFSET, 7), EqualTo(OFFSET, 8)], None),
        ([GreaterThan(OFFSET, 5000)], None),
        ([LessThan(OFFSET, 0)], None),
        ([Not(EqualTo(OFFSET, 7))], (0, 1000)),
        ([IsNotNull(OFFSET)], (0, 1000)),
        ([GreaterThanOrEqual(TIME, at(10)), LessThan(TIME, at(20))], (10, 20)),
        ([GreaterThan(TIME, at(10)), LessThanOrEqual(TIME, at(20))], (11, 21)),
        ([GreaterThanOrEqual(TIME, at(10.0005)), LessThan(TIME, at(10.0015))], None),
        ([EqualTo(TIME, at(10))], (10, 11)),
        ([EqualTo(TIME, datetime(2026, 11, 21, 6))], (0, 1000)),  # noqa: DTZ001 (a time without a zone cannot be compared)
        ([GreaterThanOrEqual(TIME, at(10)), LessThan(OFFSET, 15)], (10, 15)),
        ([GreaterThan(TIME, at(5000))], None),
        ([EqualTo(STREAM, "s")], (0, 1000)),
        ([EqualTo(STREAM, "other")], None),
        ([In(STREAM, ("other", "s"))], (0, 1000)),
        ([In(STREAM, ("a", "s")), In(STREAM, ("a", "b"))], None),
        ([StringStartsWith(STREAM, "o")], (0, 1000)),
        ([EqualTo(("value",), b"x")], (0, 1000)),
        ([EqualTo(("headers", "offset"), 1)], (0, 1000)),
    ],
)
def test_a_filter_narrows_the_range(filters: list[Any], expected: tuple[int, int] | None) -> None:
    assert narrowed(*filters) == expected


def test_every_message_that_a_time_selects_is_in_the_range() -> None:
    for microseconds in range(-2_000, 2_001, 500):
        moment = at(10) + timedelta(microseconds=microseconds)
        stored = [(offset, at(offset)) for offset in range(20)]
        for kind, holds in (
            (GreaterThan, operator.gt),
            (GreaterThanOrEqual, operator.ge),
            (LessThan, operator.lt),
            (LessThanOrEqual, operator.le),
            (EqualTo, operator.eq),
        ):
            found = narrowed(kind(TIME, moment)) or (0, 0)
            selected = [offset for offset, time in stored if holds(time, moment)]
            assert all(found[0] <= offset < found[1] for offset in selected), (kind, microseconds)
