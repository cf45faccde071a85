"""Report of a plan that Spark computes, and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.pipelines.formats import escape_pattern_characters
from bide.pipelines.plan.capacity import Capacity
from bide.pipelines.plan.figures import MAX_SPANS, SPAN_FIGURES, PlanReport, plan_report
from bide.pipelines.plan.occupancy import Timeline
from bide.pipelines.plan.ticks import ALL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SUCCESS_SETTING: Final = "mapreduce.fileoutputcommitter.marksuccessfuljobs"
"""Hadoop's setting that decides whether a write adds the file ``_SUCCESS`` to the folder of the table."""


def clear(timeline: Timeline, out: str) -> None:
    """Empty the table ``queues`` of a folder, and delete its ``_SUCCESS``, before the tables of a new plan are written.

    The table ``queues`` is written last. Emptying it first ensures that an interruption does not leave the queues of an
    older plan beside the levels of a new one. Spark empties it, which works in every folder that Spark can write to.
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
        levels, queues = (
            spark.read.parquet(escape_pattern_characters(f"{out}/{name}")) for name in ("levels", "queues")
        )
    else:
        levels = levels.persist()
    by_level = {row["level"]: row.asDict() for row in _by_level(levels).collect()}
    releases = {row["level"]: row.asDict() for row in _releases(queues).collect()}
    spans = levels.where(F.col("level") == ALL).orderBy("at").limit(MAX_SPANS).withColumn("at", F.unix_millis("at"))
    rows = [row.asDict() for row in spans.select("at", *SPAN_FIGURES).collect()]
    if out is None:
        levels.unpersist()
    return plan_report(timeline.layout, capacity, levels=by_level, releases=releases, spans=rows)


def _by_level(levels: DataFrame) -> DataFrame:
    return levels.groupBy("level").agg(
        F.max("held_peak").alias("held_peak"),
        F.unix_millis(F.max_by("at", F.struct("held_peak", -F.unix_millis("at")))).alias("held_peak_at"),
        F.max("bytes_peak").alias("bytes_peak"),
        F.sum("hops").alias("hops"),
        F.max("hops_peak").alias("hops_peak"),
    )


def _releases(queues: DataFrame) -> DataFrame:
    # Rounded, because equal peaks differ by rounding errors.
    order = F.struct(F.round("peak", 6), -F.unix_millis("peak_at"), -F.col("digit"))
    return queues.groupBy("level").agg(
        F.max("peak").alias("peak"),
        F.max_by("digit", order).alias("digit"),
        F.unix_millis(F.max_by("peak_at", order)).alias("peak_at"),
    )
