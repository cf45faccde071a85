"""Due times of waiting schedules, in order by target, for counts of any span of time."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import OTHER_TARGETS, TimeGrid, TimelineCount

_PART: Final = 512
"""Due times in each half of a part that was split: a part has fewer than twice as many."""


class DueTimes:
    """The due times of schedules in memory, 8 to 16 bytes for each.

    A count takes time by parts of hundreds of schedules, and by intervals. The prefix of a filter is ignored.

    Args:
        ordered: a target and a due time for each schedule, in the order of due times.
    """

    def __init__(self, ordered: Iterable[tuple[str, int]]) -> None:
        times: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for target, due in ordered:
            times[target].append(due)
        self._number = sum(map(len, times.values()))
        self._targets = {target: _OrderedTimes(one) for target, one in times.items()}

    def __len__(self) -> int:
        """The number of schedules."""
        return self._number

    def add(self, target: str, due: int) -> None:
        """Add a schedule."""
        self._number += 1
        if (times := self._targets.get(target)) is not None:
            times.add(due)
        else:
            self._targets[target] = _OrderedTimes(array("q", (due,)))

    def remove(self, target: str, due: int) -> None:
        """Remove a schedule that is there."""
        self._number -= 1
        times = self._targets[target]
        times.remove(due)
        if times.is_empty:
            del self._targets[target]

    def span(self, wanted: ScheduleFilter) -> tuple[TimelineCount, ...]:
        """The number, and the first and the last due time, of all schedules that a filter matches."""
        found = [part for _, parts in self._matching(wanted) for part in parts]
        if not found:
            return ()
        first, last = min(one[0] for one in found), max(one[-1] for one in found)
        return (TimelineCount(target=OTHER_TARGETS, interval=0, count=sum(map(len, found)), first=first, last=last),)

    def timeline(self, wanted: ScheduleFilter, grid: TimeGrid) -> Iterator[TimelineCount]:
        """The numbers of schedules that a filter matches, by target and interval."""
        for target, parts in self._matching(wanted):
            yield from _counts(target, parts, grid)

    def _matching(self, wanted: ScheduleFilter) -> Iterator[tuple[str, Iterator[array[int]]]]:
        """The targets that a filter matches, each with its due times."""
        targets = self._targets if wanted.target is None else (wanted.target,)
        for target in targets:
            if (times := self._targets.get(target)) is not None:
                yield target, times.within(wanted.due_from, wanted.due_before)


class _OrderedTimes:
    """The due times of a target, in order, in parts: a change moves the times of one part only."""

    __slots__ = ("_lasts", "_parts")

    def __init__(self, ordered: array[int]) -> None:
        self._parts = [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)]
        self._lasts = [one[-1] for one in self._parts]

    @property
    def is_empty(self) -> bool:
        """Whether there is no due time."""
        return not self._parts

    def add(self, due: int) -> None:
        """Add a due time."""
        index = min(bisect_left(self._lasts, due), len(self._lasts) - 1)
        part = self._parts[index]
        insort(part, due)
        if len(part) == 2 * _PART:
            self._parts[index : index + 1] = [part[:_PART], part[_PART:]]
            self._lasts[index : index + 1] = [part[_PART - 1], part[-1]]
        else:
            self._lasts[index] = part[-1]

    def remove(self, due: int) -> None:
        """Remove a due time that is there."""
        index = bisect_left(self._lasts, due)
        part = self._parts[index]
        del part[bisect_left(part, due)]
        if part:
            self._lasts[index] = part[-1]
        else:
            del self._parts[index], self._lasts[index]

    def within(self, first: int | None, before: int | None) -> Iterator[array[int]]:
        """The due times of a span of time, part by part. No part is empty."""
        start = 0 if first is None else bisect_left(self._lasts, first)
        for part in islice(self._parts, start, None):
            begin = 0 if first is None else bisect_left(part, first)
            end = len(part) if before is None else bisect_left(part, before)
            if begin < end:
                yield part if end - begin == len(part) else part[begin:end]
            if end < len(part):
                return


def _counts(target: str, parts: Iterable[array[int]], grid: TimeGrid) -> Iterator[TimelineCount]:
    """The numbers of a target by interval."""
    interval, count, first, last = -1, 0, 0, 0
    for part in parts:
        begin = 0
        while begin < len(part):
            found = grid.interval_of(part[begin])
            end = bisect_left(part, grid.end_of(found), begin)
            if count and found != interval:
                yield TimelineCount(target=target, interval=interval, count=count, first=first, last=last)
                count = 0
            if not count:
                interval, first = found, part[begin]
            count, last, begin = count + end - begin, part[end - 1], end
    if count:
        yield TimelineCount(target=target, interval=interval, count=count, first=first, last=last)
