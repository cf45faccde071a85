"""Figures of a plan: summaries of its levels and spans, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bide.durations import from_microseconds
from bide.pipelines.plan.capacity import Capacity, Judgement, judge
from bide.pipelines.plan.levels import PlanLevels
from bide.pipelines.plan.ticks import ALL

MAX_SPANS: Final = 1_000
"""The largest number of spans in a report; the tables have all spans."""

SPAN_FIGURES: Final = ("held", "held_peak", "bytes_peak", "hops_per_second", "hops_peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """All levels together in one span of time; fields as in :meth:`bide.pipelines.plan.occupancy.Timeline.levels`."""

    at: datetime
    held: float
    held_peak: float
    bytes_peak: float
    hops_per_second: float
    hops_peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFigures:
    """The figures of one level, or of all levels, over the whole workload.

    Attributes:
        held_peak: the largest number of messages held, as the mean over a tick.
        held_peak_at: the start of the span with *held_peak*.
        bytes_peak: the largest size of the bodies held.
        hops: the number of messages that pass the level.
        hops_peak: the largest number of hops in a second.
        release_peak: the most messages that the queues of one digit release in a second; None for all levels together.
        release_queue: the queue with *release_peak*.
        release_at: the time of *release_peak*.
    """

    level: str
    held_peak: float
    held_peak_at: datetime
    bytes_peak: float
    hops: float
    hops_peak: float
    release_peak: float | None
    release_queue: str | None
    release_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan for one layout.

    Attributes:
        layout: the name of the layout.
        levels: the levels with messages, highest first, then all levels together.
        spans: the first :data:`MAX_SPANS` spans.
        judgements: the verdicts on the largest figures.
    """

    layout: str
    levels: tuple[LevelFigures, ...]
    spans: tuple[Span, ...]
    judgements: tuple[Judgement, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON, with times in ISO 8601."""
        judged = [{**asdict(one), "load": one.load, "verdict": one.verdict} for one in self.judgements]
        levels, spans = ([_plain(asdict(one)) for one in part] for part in (self.levels, self.spans))
        return {"layout": self.layout, "levels": levels, "spans": spans, "verdicts": judged}


def plan_report(
    layout: PlanLevels,
    capacity: Capacity,
    *,
    levels: Mapping[str, Mapping[str, Any]],
    releases: Mapping[str, Mapping[str, Any]],
    spans: Iterable[Mapping[str, Any]],
) -> PlanReport:
    """Summarize a plan and compare it with a capacity. Times are in milliseconds since the Unix epoch.

    Args:
        levels: for each level, ``held_peak``, ``held_peak_at``, ``bytes_peak``, ``hops`` and ``hops_peak``.
        releases: for each level, ``peak``, ``digit`` and ``peak_at`` of its busiest queue.
        spans: the first :data:`MAX_SPANS` spans of all levels together.
    """
    named = {level.name: level for level in layout.levels}
    figures = []
    for name in (*named, ALL):
        if name not in levels:
            continue
        row, most = levels[name], releases.get(name)
        figures.append(
            LevelFigures(
                level=name,
                held_peak=row["held_peak"],
                held_peak_at=_time(row["held_peak_at"]),
                bytes_peak=row["bytes_peak"],
                hops=row["hops"],
                hops_peak=row["hops_peak"],
                release_peak=None if most is None else most["peak"],
                release_queue=None if most is None else named[name].queue_of(most["digit"]),
                release_at=None if most is None else _time(most["peak_at"]),
            )
        )
    judged: list[Judgement] = []
    if figures:
        whole = figures[-1]
        judged = judge(
            capacity,
            hops=whole.hops_peak,
            release=max((one.release_peak or 0.0 for one in figures), default=0.0),
            messages=whole.held_peak,
            bytes=whole.bytes_peak,
            lanes=layout.lanes,
        )
    found = tuple(Span(at=_time(row["at"]), **{name: row[name] for name in SPAN_FIGURES}) for row in spans)
    return PlanReport(layout=layout.name, levels=tuple(figures), spans=found, judgements=tuple(judged))


def _time(milliseconds: int) -> datetime:
    """A time, at least in the year 1 and at most in the year 9999: Python cannot represent other ends of spans."""
    try:
        return from_microseconds(1000 * milliseconds)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC) if milliseconds < 0 else datetime.max.replace(tzinfo=UTC)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: one.isoformat() if isinstance(one, datetime) else one for name, one in values.items()}
