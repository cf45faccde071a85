"""Occupancy of the levels of a layout over time, computed in this process with numpy.

The same figures as those of :mod:`bide.pipelines.plan.occupancy`, for a workload that fits into memory: flows, and
small tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bide.durations import MILLISECOND
from bide.errors import InvalidInputError
from bide.pipelines.plan.capacity import Capacity
from bide.pipelines.plan.figures import MAX_SPANS, SPAN_FIGURES, PlanReport, plan_report
from bide.pipelines.plan.flows import Flow
from bide.pipelines.plan.levels import PlanLevels, check_delays
from bide.pipelines.plan.ticks import ALL, EPSILON, MEASURES, check_spans, held, held_contribution, passed

Array = NDArray[Any]
ArrayTable = dict[str, Array]
"""Columns of equal length by name."""

CLASS_MEASURES: Final = ("n", "n_rate", "bytes", "bytes_rate")
"""The columns of classes beside ``at`` and ``delay``."""

_PARTS: Final = ("", "_1", "_rate", "_rate_1", "_rate_2")
_MOMENTS: Final = tuple(f"{one}{part}" for one in MEASURES for part in _PARTS)
_HOPS: Final = ("hops", "hops_rate", "hops_rate_1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayWorkload:
    """Classes of messages in memory; the fields are those of :class:`bide.pipelines.plan.workload.Workload`."""

    classes: ArrayTable
    messages: float
    undelayed: float
    bytes: float
    first: int
    longest: int


def of_flows(flows: Sequence[Flow], *, tick: timedelta = timedelta(seconds=1)) -> ArrayWorkload:
    """The workload of flows.

    Args:
        tick: the tick of the :class:`ArrayTimeline`.

    Raises:
        InvalidInputError: there are no flows.
    """
    if not flows:
        raise InvalidInputError("there are no flows, so there is nothing to plan for: give at least one")
    parts = [_classes(one, tick) for one in flows]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return ArrayWorkload(
        classes=grouped(whole, ("at", "delay"), CLASS_MEASURES),
        messages=sum(one.messages for one in flows),
        undelayed=sum(one.undelayed for one in flows),
        bytes=sum(one.messages * one.size for one in flows),
        first=min(one.first for one in flows),
        longest=max(one.longest for one in flows),
    )


def _classes(flow: Flow, tick: timedelta) -> ArrayTable:
    points = np.arange(flow.points, dtype=np.int64)
    delays = flow.shortest + points * (flow.longest - flow.shortest) // max(flow.points - 1, 1)
    delays = delays[delays > 0]
    changes = flow.changes()
    at = np.repeat(np.array([at for at, _ in changes], np.int64), len(delays))
    rate = np.repeat(np.array([change * tick.total_seconds() for _, change in changes]), len(delays)) / flow.points
    nothing = np.zeros(len(at))
    return {
        "at": at,
        "delay": np.tile(delays, len(changes)),
        "n": nothing,
        "n_rate": rate,
        "bytes": nothing,
        "bytes_rate": rate * flow.size,
    }


@dataclass(frozen=True)
class ArrayTimeline:
    """The occupancy of the levels of a layout; see :class:`bide.pipelines.plan.occupancy.Timeline`."""

    workload: ArrayWorkload
    layout: PlanLevels
    every: timedelta = timedelta(hours=1)
    tick: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        check_spans(self.every, self.tick)
        check_delays(self.workload.longest, self.layout)

    def figures(self) -> tuple[ArrayTable, ArrayTable]:
        """The tables ``levels`` and ``queues``, in the order of their levels and times.

        The columns are those of :class:`bide.pipelines.plan.occupancy.Timeline`, with times in milliseconds since the
        Unix epoch.
        """
        levels: list[tuple[str, ArrayTable]] = []
        queues: list[tuple[str, ArrayTable]] = []
        together: ArrayTable = {}
        # At any time, only the changes of one level, and those of all levels together, are in memory.
        for level, moves in self._moves():
            changes = self._changes(moves)
            levels.append((level, self._spans(self._with_edges(changes, "tick"))))
            queues.append((level, self._releases(moves)))
            together = _sum_by_tick([together, changes]) if together else changes
        if together:
            levels.append((ALL, self._spans(self._with_edges(together, "tick"))))
        return _stacked(levels, _LEVEL_COLUMNS), _stacked(queues, _QUEUE_COLUMNS)

    def _moves(self) -> Iterator[tuple[str, ArrayTable]]:
        """The intervals of each level, one for each class of messages that passes it."""
        classes, tick = self.workload.classes, self.tick // MILLISECOND
        resolution = self.layout.resolution
        wait = (classes["delay"] + resolution - 1) // resolution * resolution
        for level in self.layout.levels:
            digit = wait // level.unit % (level.highest + 1)
            passing = np.flatnonzero(digit)
            if not len(passing):
                continue
            leave = (classes["at"] - self._origin * tick + wait - wait % level.unit)[passing]
            enter = leave - digit[passing] * level.unit
            yield (
                level.name,
                {
                    "digit": digit[passing],
                    "enter": enter // tick,
                    "enter_in": enter % tick / tick,
                    "leave": leave // tick,
                    "leave_in": leave % tick / tick,
                    **{name: classes[name][passing] for name in CLASS_MEASURES},
                },
            )

    def _changes(self, moves: ArrayTable) -> ArrayTable:
        """The changes in each tick of one level."""
        changes: list[ArrayTable] = []
        for end, sign in (("enter", 1.0), ("leave", -1.0)):
            within = moves[f"{end}_in"]
            change = {"tick": moves[end]}
            for one in MEASURES:
                n, rate = sign * moves[one], sign * moves[f"{one}_rate"]
                change |= {one: n, f"{one}_1": n * within}
                change |= {f"{one}_rate{part}": rate * within**power for power, part in enumerate(("", "_1", "_2"))}
            n, rate = (moves[name] if end == "leave" else np.zeros(len(within)) for name in ("n", "n_rate"))
            changes.append(_sum_by_tick([{**change, "hops": n, "hops_rate": rate, "hops_rate_1": rate * within}]))
        return _sum_by_tick(changes)

    def _with_edges(self, changes: ArrayTable, *keys: str) -> ArrayTable:
        """The changes with an empty row for the first tick of each span between the first and the last change."""
        ticks = changes["tick"]
        edges = self._edges(int(ticks.min()), int(ticks.max()))
        both = {
            name: np.concatenate([one, edges if name == "tick" else np.zeros(len(edges), one.dtype)])
            for name, one in changes.items()
        }
        return grouped(both, keys, tuple(name for name in changes if name not in keys))

    def _edges(self, begin: int, end: int) -> Array:
        span = self._ticks_per_span
        numbers = np.arange((begin + self._origin) // span, (end + self._origin) // span + 1, dtype=np.int64)
        return np.maximum(numbers * span - self._origin, begin)

    def _spans(self, changes: ArrayTable) -> ArrayTable:
        """The figures of one level in each span."""
        tick = changes["tick"]
        gap = np.diff(tick, append=tick[-1] + 1) - 1
        starts, span = self._span_starts(tick)
        found: ArrayTable = {}
        for one, name in zip(MEASURES, ("held", "bytes"), strict=True):
            n, n_1, rate, rate_1, rate_2 = (
                changes[f"{one}{part}"] for part in ("", "_1", "_rate", "_rate_1", "_rate_2")
            )
            flow = _total_before(rate)
            start = _total_before(held_contribution(tick, n, rate, rate_1)) + tick * flow
            occupancy = held(n=n, n_1=n_1, rate=rate, rate_1=rate_1, rate_2=rate_2, flow=flow, start=start, gap=gap)
            highest = np.where(gap > 0, np.maximum(occupancy.now, np.maximum(*occupancy.quiet)), occupancy.now)
            found[name] = np.add.reduceat(occupancy.area, starts) / self._ticks_per_span
            found[f"{name}_peak"] = np.maximum.reduceat(highest, starts)
        rate = changes["hops_rate"]
        now, later = passed(n=changes["hops"], rate=rate, rate_1=changes["hops_rate_1"], flow=_total_before(rate))
        seconds = self.tick.total_seconds()
        found["hops"] = np.add.reduceat(now + gap * later, starts)
        found["hops_per_second"] = found["hops"] / (self._ticks_per_span * seconds)
        found["hops_peak"] = np.maximum.reduceat(np.where(gap > 0, np.maximum(now, later), now), starts) / seconds
        kept = (found["held_peak"] > EPSILON) | (found["hops"] > EPSILON)
        return {
            "at": (span * (self.every // MILLISECOND))[kept],
            **{name: np.maximum(one[kept], 0.0) for name, one in found.items()},
        }

    def _releases(self, moves: ArrayTable) -> ArrayTable:
        """The figures of the queues of one level in each span."""
        leaving = {
            "digit": moves["digit"],
            "tick": moves["leave"],
            "n": moves["n"],
            "rate": moves["n_rate"],
            "rate_1": moves["n_rate"] * moves["leave_in"],
        }
        leaving = grouped(leaving, ("digit", "tick"), ("n", "rate", "rate_1"))
        digits, firsts = np.unique(leaving["digit"], return_index=True)
        parts = []
        for digit, start, end in zip(digits, firsts, (*firsts[1:], None), strict=True):
            queue = {name: one[start:end] for name, one in leaving.items() if name != "digit"}
            if queue["rate"].any():
                queue = self._with_edges(queue, "tick")
            parts.append((digit, self._releases_of(queue)))
        columns = {name: np.concatenate([one[name] for _, one in parts]) for name in parts[0][1]}
        return {"digit": np.concatenate([np.full(len(one["at"]), digit) for digit, one in parts]), **columns}

    def _releases_of(self, leaving: ArrayTable) -> ArrayTable:
        """The figures of one queue in each span."""
        tick, rate = leaving["tick"], leaving["rate"]
        gap = np.diff(tick, append=tick[-1] + 1) - 1 if rate.any() else np.zeros(len(tick), np.int64)
        now, after = passed(n=leaving["n"], rate=rate, rate_1=leaving["rate_1"], flow=_total_before(rate))
        later = np.where(gap > 0, after, 0.0)
        most = np.maximum(now, later)
        starts, span = self._span_starts(tick)
        seconds, length = self.tick.total_seconds(), self.tick // MILLISECOND
        released = np.add.reduceat(now + gap * later, starts)
        # The first tick with the most releases; rounded, because equal numbers may differ by rounding errors.
        when = tick + np.where(later > now, 1, 0)
        spans = np.repeat(span, np.diff(starts, append=len(tick)))
        order = np.lexsort((when, -np.round(most, 9), spans))
        firsts = order[np.searchsorted(spans[order], span)]
        kept = released > EPSILON
        return {
            "at": (span * (self.every // MILLISECOND))[kept],
            "released": released[kept],
            "peak": (np.maximum.reduceat(most, starts) / seconds)[kept],
            "peak_at": ((when[firsts] + self._origin) * length)[kept],
        }

    def _span_starts(self, tick: Array) -> tuple[Array, Array]:
        """The index of the first tick of each span, and the number of the span."""
        span, starts = np.unique((tick + self._origin) // self._ticks_per_span, return_index=True)
        return starts, span

    @property
    def _origin(self) -> int:
        """The tick of the first message of the workload."""
        return self.workload.first // (self.tick // MILLISECOND)

    @property
    def _ticks_per_span(self) -> int:
        return self.every // self.tick


_LEVEL_COLUMNS: Final = ("at", "held", "held_peak", "bytes", "bytes_peak", "hops", "hops_per_second", "hops_peak")
_QUEUE_COLUMNS: Final = ("digit", "at", "released", "peak", "peak_at")


def array_report(timeline: ArrayTimeline, capacity: Capacity, *, out: str | None = None) -> PlanReport:
    """Summarize a plan and compare it with a capacity.

    Args:
        out: a folder on this machine for the Parquet tables ``levels`` and ``queues``, which are replaced.
    """
    levels, queues = timeline.figures()
    if out is not None:
        write(levels, Path(out, "levels"))
        write(queues, Path(out, "queues"))
    spans = np.flatnonzero(levels["level"] == ALL)[:MAX_SPANS]
    return plan_report(
        timeline.layout,
        capacity,
        levels=dict(_by_level(levels)),
        releases=dict(_busiest(queues)),
        spans=(_row(levels, index, ("at", *SPAN_FIGURES)) for index in spans),
    )


def _by_level(levels: ArrayTable) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for level in dict.fromkeys(levels["level"]):
        here = {name: one[levels["level"] == level] for name, one in levels.items()}
        peaks = {f"{name}_peak": here[f"{name}_peak"].max().item() for name in ("held", "bytes", "hops")}
        at = here["at"][here["held_peak"].argmax()].item()
        yield level, {**peaks, "held_peak_at": at, "hops": here["hops"].sum().item()}


def _busiest(queues: ArrayTable) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The highest release peak of each level; of equal peaks the earliest, then that of the lowest digit."""
    for level in dict.fromkeys(queues["level"]):
        here = np.flatnonzero(queues["level"] == level)
        order = np.lexsort((queues["digit"][here], queues["peak_at"][here], -np.round(queues["peak"][here], 6)))
        most = here[order[0]]
        yield level, _row(queues, most, ("peak", "digit", "peak_at"))


def _row(columns: ArrayTable, index: int, names: Iterable[str]) -> dict[str, Any]:
    return {name: columns[name][index].item() for name in names}


def _stacked(parts: Sequence[tuple[str, ArrayTable]], names: Iterable[str]) -> ArrayTable:
    """The tables of levels as one, with the name of the level in the column ``level``."""
    empty = np.zeros(0, np.int64)
    levels = [np.full(len(one["at"]), level, dtype=object) for level, one in parts]
    return {
        "level": np.concatenate(levels) if levels else empty,
        **{name: np.concatenate([one[name] for _, one in parts]) if parts else empty for name in names},
    }


def grouped(columns: Mapping[str, Array], keys: Sequence[str], figures: Sequence[str]) -> ArrayTable:
    """The sums of the figures for each combination of the keys, in the order of the keys."""
    order = np.lexsort([columns[key] for key in reversed(keys)])
    ordered = {name: columns[name][order] for name in (*keys, *figures)}
    is_first = np.zeros(len(order), bool)
    is_first[:1] = True
    for key in keys:
        is_first[1:] |= ordered[key][1:] != ordered[key][:-1]
    starts = np.flatnonzero(is_first)
    return {
        **{key: ordered[key][starts] for key in keys},
        **{name: np.add.reduceat(ordered[name], starts) if len(starts) else ordered[name] for name in figures},
    }


def _sum_by_tick(tables: Sequence[ArrayTable]) -> ArrayTable:
    """The sums of changes in each tick."""
    whole = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
    return grouped(whole, ("tick",), (*_MOMENTS, *_HOPS))


def _total_before(changes: Array) -> Array:
    """For each change, the sum of the changes before it."""
    return np.concatenate([[0.0], np.cumsum(changes)[:-1]])


def clear(out: str) -> None:
    """Empty the table ``queues`` of a folder, as :func:`bide.pipelines.plan.report.clear` does."""
    write(_stacked([], _QUEUE_COLUMNS), Path(out, "queues"), is_finished=False)


def write(table: ArrayTable, folder: Path, *, is_finished: bool = True) -> None:
    """Replace a folder by a table in one Parquet file.

    Args:
        is_finished: add an empty file ``_SUCCESS``, as Spark does when a table is complete.
    """
    import pyarrow as pa
    from pyarrow import parquet

    types = {"level": pa.string(), "digit": pa.int32()}
    types |= dict.fromkeys(("at", "peak_at"), pa.timestamp("ms", "UTC"))
    columns = {name: pa.array(one).cast(types.get(name, pa.float64())) for name, one in table.items()}
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    parquet.write_table(pa.table(columns), folder / "part-00000.parquet")
    if is_finished:
        (folder / "_SUCCESS").touch()
