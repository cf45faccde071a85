"""Report of a plan: its main figures, and the verdicts on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.durations import from_microseconds
from bide.pipelines.formats import to_read
from bide.pipelines.plan.capacity import Capacity, Judgement, judge
from bide.pipelines.plan.occupancy import ALL, Timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPANS: Final = 1_000
"""The largest number of spans in a report; the tables have all spans."""

_SUCCESS_SETTING: Final = "mapreduce.fileoutputcommitter.marksuccessfuljobs"
"""Hadoop's setting for the file ``_SUCCESS`` in the folder of a table that is written."""

_SPAN_FIGURES: Final = ("held", "held_peak", "bytes_peak", "hops_per_second", "hops_peak")


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
        held_peak: the largest number of messages held, as the mean of a tick.
        held_peak_at: the start of the span with *held_peak*.
        bytes_peak: the largest size of the bodies held.
        hops: the number of messages that pass.
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
        spans: the first :data:`SPANS` spans.
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


def clear(timeline: Timeline, out: str) -> None:
    """Empty the table ``queues`` of a folder, and delete its ``_SUCCESS``, before the tables of a new plan are written.

    The table ``queues`` is written last. So an interruption does not leave the queues of an older plan beside the
    levels of a new one. The table is emptied by a write of Spark, which works wherever Spark can write.
    """
    timeline.queues().limit(0).write.mode("overwrite").option(_SUCCESS_SETTING, "false").parquet(f"{out}/queues")


def report(timeline: Timeline, capacity: Capacity, *, out: str | None = None) -> PlanReport:
    """Summarize a plan and compare it with a capacity.

    Args:
        out: a folder for the Parquet tables ``levels`` and ``queues``, which are replaced; prepared by :func:`clear`.
    """
    levels, queues = timeline.levels(), timeline.queues()
    if out is not None:
        spark = levels.sparkSession
        levels.write.mode("overwrite").parquet(f"{out}/levels")
        queues.write.mode("overwrite").parquet(f"{out}/queues")
        levels, queues = (spark.read.parquet(to_read(f"{out}/{name}")) for name in ("levels", "queues"))
    else:
        levels = levels.persist()
    by_level = {row["level"]: row for row in _by_level(levels).collect()}
    releases = {row["level"]: row for row in _releases(queues).collect()}
    spans = levels.where(F.col("level") == ALL).orderBy("at").limit(SPANS).withColumn("at", F.unix_millis("at"))
    found = tuple(
        Span(**{"at": from_microseconds(1000 * row["at"]), **{name: row[name] for name in _SPAN_FIGURES}})
        for row in spans.collect()
    )
    if out is None:
        levels.unpersist()
    named = {level.name: level for level in timeline.layout.levels}
    figures = []
    for name in (*named, ALL):
        if name not in by_level:
            continue
        row, most = by_level[name], releases.get(name)
        figures.append(
            LevelFigures(
                level=name,
                held_peak=row["held_peak"],
                held_peak_at=from_microseconds(1000 * row["held_peak_at"]),
                bytes_peak=row["bytes_peak"],
                hops=row["hops"],
                hops_peak=row["hops_peak"],
                release_peak=None if most is None else most["peak"],
                release_queue=None if most is None else named[name].queue_of(most["digit"]),
                release_at=None if most is None else from_microseconds(1000 * most["peak_at"]),
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
            lanes=timeline.layout.lanes,
        )
    return PlanReport(layout=timeline.layout.name, levels=tuple(figures), spans=found, judgements=tuple(judged))


def _by_level(levels: DataFrame) -> DataFrame:
    return levels.groupBy("level").agg(
        F.max("held_peak").alias("held_peak"),
        F.unix_millis(F.max_by("at", F.struct("held_peak", -F.unix_millis("at")))).alias("held_peak_at"),
        F.max("bytes_peak").alias("bytes_peak"),
        F.sum("hops").alias("hops"),
        F.max("hops_peak").alias("hops_peak"),
    )


def _releases(queues: DataFrame) -> DataFrame:
    order = F.struct("peak", -F.unix_millis("peak_at"))
    return queues.groupBy("level").agg(
        F.max("peak").alias("peak"),
        F.max_by("digit", order).alias("digit"),
        F.unix_millis(F.max_by("peak_at", order)).alias("peak_at"),
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: one.isoformat() if isinstance(one, datetime) else one for name, one in values.items()}
