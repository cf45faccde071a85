"""Filter pushdown of batch reads: filters on offset, timestamp and stream as ranges.

Needs PySpark 4.1. Spark still applies each filter to the rows, so a range may have more rows than the filters select.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from bide.durations import to_microseconds
from bide.spark.source import StreamsReader
from bide.streams.log import StreamLogs
from bide.streams.range_reader import OffsetRange

_LOWEST: Final = 0
_HIGHEST: Final = 2**63 - 1


@dataclass(slots=True)
class Bounds:
    """The values that filters on one column allow, both ends included."""

    lowest: int = _LOWEST
    highest: int = _HIGHEST

    def narrow(self, filter: Filter, convert: Any) -> None:
        """Apply a filter. A filter of an unsupported kind changes nothing.

        Args:
            convert: converts a value of the filter to a whole number; None for a value that cannot be compared.
        """
        match filter:
            case EqualTo(_, value) | EqualNullSafe(_, value):
                lowest = highest = convert(value)
            case GreaterThanOrEqual(_, value):
                lowest, highest = convert(value), None
            case GreaterThan(_, value):
                found = convert(value)
                lowest, highest = None if found is None else found + 1, None
            case LessThanOrEqual(_, value):
                lowest, highest = None, convert(value)
            case LessThan(_, value):
                found = convert(value)
                lowest, highest = None, None if found is None else found - 1
            case In(_, values):
                every = [convert(one) for one in values]
                if not every or None in every:
                    return
                lowest, highest = min(every), max(every)
            case _:
                return
        if lowest is not None:
            self.lowest = max(self.lowest, lowest)
        if highest is not None:
            self.highest = min(self.highest, highest)


@dataclass(slots=True)
class StreamFilters:
    """Filters of a read, combined by AND.

    Attributes:
        offsets: the offsets.
        times: the times at which chunks were stored, in microseconds since 1970.
        streams: the names of the streams; None for all.
    """

    offsets: Bounds = field(default_factory=Bounds)
    times: Bounds = field(default_factory=Bounds)
    streams: frozenset[str] | None = None

    def add(self, filter: Filter) -> None:
        """Apply a filter. A filter on any other column changes nothing."""
        match getattr(filter, "attribute", None):
            case ("offset",):
                self.offsets.narrow(filter, lambda value: value if type(value) is int else None)
            case ("timestamp",):
                self.times.narrow(filter, _microseconds)
            case ("stream",):
                if (names := _names(filter)) is not None:
                    self.streams = names if self.streams is None else self.streams & names
            case _:
                pass

    def narrowed(self, one: OffsetRange, logs: StreamLogs) -> OffsetRange:
        """The part of a range that may have messages which the filters select."""
        if self.streams is not None and one.stream not in self.streams:
            return OffsetRange(stream=one.stream, start=one.end, end=one.end)
        start, end = max(one.start, self.offsets.lowest), min(one.end, self.offsets.highest + 1)
        if self.times.lowest > _LOWEST and start < end:
            start = max(start, logs.since(one.stream, -(-self.times.lowest // 1000)))
        if self.times.highest < _HIGHEST and start < end:
            end = min(end, logs.since(one.stream, self.times.highest // 1000 + 1))
        return OffsetRange(stream=one.stream, start=start, end=max(start, end))


class FilteredStreamsReader(StreamsReader):
    """Batch reader of streams that skips offsets which the filters of the query exclude."""

    _filters = StreamFilters()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        """Use the filters to read less; returns all of them, because Spark has to apply them to the rows too."""
        self._filters = StreamFilters()
        for one in filters:
            self._filters.add(one)
        return filters

    def narrowed(self, ranges: list[OffsetRange], logs: StreamLogs) -> list[OffsetRange]:
        """The parts of the ranges that have to be read."""
        return [self._filters.narrowed(one, logs) for one in ranges]


def _microseconds(value: Any) -> int | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return to_microseconds(value.astimezone(UTC))


def _names(filter: Filter) -> frozenset[str] | None:
    match filter:
        case EqualTo(_, str() as name) | EqualNullSafe(_, str() as name):
            return frozenset((name,))
        case In(_, values) if all(isinstance(one, str) for one in values):
            return frozenset(values)
        case _:
            return None
