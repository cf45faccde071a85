"""Numbers of schedules by target and interval of time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bide.schedules.fields import MAX_INTEGER, RecordFields

MAX_INTERVALS: Final = 1_000

MAX_TARGETS: Final = 200
"""The maximum number of targets with numbers of their own in an answer. All others are counted together."""

OTHER_TARGETS: Final = "*"
"""Stands for the targets that are counted together. Names of targets begin with ``q:`` or ``x:``."""

_MAX_TARGET: Final = 257
"""The maximum size in bytes of a target: a name with ``q:`` or ``x:`` before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGrid:
    """Intervals of equal length.

    Attributes:
        start: the start of the first interval, in milliseconds since the Unix epoch.
        width: the length of each interval in milliseconds.
        number: the number of intervals.
    """

    start: int
    width: int
    number: int

    @property
    def end(self) -> int:
        """The end of the last interval."""
        return self.start + self.width * self.number

    def interval_of(self, time: int) -> int:
        """The number of the interval of a time; -1 before the first one, :attr:`number` behind the last one."""
        return min(max((time - self.start) // self.width, -1), self.number)

    def end_of(self, interval: int) -> int:
        """The end of an interval, as :meth:`interval_of` numbers them."""
        return self.start + self.width * (interval + 1) if interval < self.number else MAX_INTEGER + 1

    def fields(self) -> dict[str, int]:
        """The grid as fields of a question."""
        return {"start": self.start, "width": self.width, "number": self.number}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineCount:
    """The number of schedules with one target in one interval.

    Attributes:
        interval: the number of the interval, from 0; -1 before the first, and the number of all intervals after the
            last.
        first: the earliest due time among them, in milliseconds since the Unix epoch.
        last: the latest due time among them.
    """

    target: str
    interval: int
    count: int
    first: int
    last: int

    def fields(self) -> list[str | int]:
        """The values as an item of an answer."""
        return [self.target, self.interval, self.count, self.first, self.last]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimeline:
    """The numbers of all partitions.

    Attributes:
        targets: the numbers by target, those with the most schedules first, for each interval.
        before: how many are due before the first interval.
        after: how many are due after the last interval.
        first: the earliest due time, in milliseconds since the Unix epoch; None if nothing waits.
        last: the latest due time.
    """

    grid: TimeGrid
    targets: Mapping[str, tuple[int, ...]]
    before: int
    after: int
    first: int | None
    last: int | None

    @property
    def total(self) -> int:
        """The number of all schedules."""
        return self.before + self.after + sum(sum(numbers) for numbers in self.targets.values())


def read_grid(fields: RecordFields) -> TimeGrid:
    """Take the fields of a grid.

    Raises:
        ScheduleRecordError: a field is missing or wrong.
    """
    grid = TimeGrid(
        start=fields.integer("start"),
        width=fields.integer("width", lowest=1),
        number=fields.integer("number", lowest=1),
    )
    if grid.number > MAX_INTERVALS:
        raise fields.error("number", grid.number, f"at most {MAX_INTERVALS}")
    if grid.end > MAX_INTEGER:
        raise fields.error("width", grid.width, "so small that the last interval ends within 64 bits")
    fields.end()
    return grid


def read_counts(fields: RecordFields) -> tuple[TimelineCount, ...]:
    """Take the numbers of an answer; empty if it has none.

    Raises:
        ScheduleRecordError: a number is wrong.
    """
    if not fields.has("timeline"):
        return ()
    return tuple(_read_count(one) for one in fields.items("timeline"))


def _read_count(values: Any) -> TimelineCount:
    named = dict(zip(("target", "interval", "count", "first", "last"), values, strict=False)) if _is_row(values) else {}
    fields = RecordFields("an item of timeline", named)
    return TimelineCount(
        target=fields.text("target", limit=_MAX_TARGET),
        interval=fields.integer("interval", lowest=-1),
        count=fields.integer("count"),
        first=fields.integer("first"),
        last=fields.integer("last"),
    )


def _is_row(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 5


def largest(counts: Iterable[TimelineCount]) -> tuple[TimelineCount, ...]:
    """The numbers of the targets with the most schedules, and those of all other targets together."""
    rows = list(counts)
    totals = Counter[str]()
    for one in rows:
        totals[one.target] += one.count
    kept = {target for target, _ in totals.most_common(MAX_TARGETS)}
    if len(kept) == len(totals):
        return tuple(rows)
    others = defaultdict[int, list[TimelineCount]](list)
    for one in rows:
        if one.target not in kept:
            others[one.interval].append(one)
    return (
        *(one for one in rows if one.target in kept),
        *(
            TimelineCount(
                target=OTHER_TARGETS,
                interval=interval,
                count=sum(one.count for one in parts),
                first=min(one.first for one in parts),
                last=max(one.last for one in parts),
            )
            for interval, parts in others.items()
        ),
    )


def merged(grid: TimeGrid, counts: Iterable[TimelineCount]) -> ScheduleTimeline:
    """The numbers of all partitions together."""
    targets = defaultdict[str, list[int]](lambda: [0] * grid.number)
    before = after = 0
    first: int | None = None
    last: int | None = None
    for one in counts:
        first = one.first if first is None else min(first, one.first)
        last = one.last if last is None else max(last, one.last)
        if one.interval < 0:
            before += one.count
        elif one.interval >= grid.number:
            after += one.count
        else:
            targets[one.target][one.interval] += one.count
    ordered = sorted(targets.items(), key=lambda one: (one[0] == OTHER_TARGETS, -sum(one[1]), one[0]))
    return ScheduleTimeline(
        grid=grid,
        targets={target: tuple(numbers) for target, numbers in ordered},
        before=before,
        after=after,
        first=first,
        last=last,
    )
