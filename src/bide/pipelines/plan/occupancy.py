"""Occupancy of the levels of a layout over time, for a workload of any size.

A message that leaves a level has waited for ``delay - delay % unit``, so its intervals in all queues follow from the
delay. Classes of messages (:mod:`bide.pipelines.plan.workload`) become intervals, and the intervals that begin and end
in the same ticks of a queue are added up. The occupancy of a level is the running total of the messages that entered
minus those that left, over the ticks with a change. So the number of rows depends on the queues and the ticks, not on
the number of messages.

The default tick is one second. Of the times within a tick, only the moments are kept: the sums of count times *t*, and
of count times *t* squared, where *t* is the part of the tick that has passed. So means are exact. A *peak* is the
largest mean over one tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.durations import MILLISECOND
from bide.pipelines.plan.levels import PlanLevels, check_delays
from bide.pipelines.plan.ticks import ALL, EPSILON, MEASURES, check_spans, held, held_contribution, passed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bide.pipelines.plan.workload import Workload


@dataclass(frozen=True)
class Timeline:
    """The occupancy of the levels of a layout, for a workload.

    Attributes:
        workload: the messages.
        layout: the levels of the layout.
        every: the length of a reporting span; spans begin at multiples of it since the Unix epoch.
        tick: the resolution in time; *every* is a multiple of it.
    """

    workload: Workload
    layout: PlanLevels
    every: timedelta = timedelta(hours=1)
    tick: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        check_spans(self.every, self.tick)
        check_delays(self.workload.longest, self.layout)

    @cached_property
    def moves(self) -> DataFrame:
        """The intervals, added up by the ticks in which they begin and end. Spark caches them until :meth:`close`."""
        spark = self.workload.classes.sparkSession
        units = [(number, level.unit, level.highest + 1) for number, level in enumerate(self.layout.levels)]
        levels = F.broadcast(spark.createDataFrame(units, "level int, unit long, radix int"))
        tick = self.tick // MILLISECOND
        resolution = self.layout.resolution
        digit = F.expr("cast(wait div unit % radix as int)")
        waiting = self.workload.classes.withColumn("wait", F.expr(f"(delay + {resolution - 1}) div {resolution}"))
        intervals = (
            waiting.withColumn("wait", F.col("wait") * resolution)
            .join(levels, digit != 0)
            .withColumn("digit", digit)
            # Ticks are counted from the first one of the workload: products with small numbers lose fewer digits.
            .withColumn("leave_at", F.expr(f"at - {self._origin * tick} + wait - wait % unit"))
            .withColumn("enter_at", F.col("leave_at") - F.col("digit") * F.col("unit"))
        )
        for end in ("enter", "leave"):
            intervals = intervals.withColumn(end, F.expr(f"{end}_at div {tick}"))
            intervals = intervals.withColumn(f"{end}_in", F.expr(f"{end}_at % {tick} / {tick}"))
        sums = [F.sum(one).alias(one) for one in self._counts]
        for one in self._counts:
            for end in ("enter", "leave"):
                sums.append(F.sum(F.col(one) * F.col(f"{end}_in")).alias(f"{one}_{end}1"))
                if one.endswith("_rate"):
                    sums.append(F.sum(F.col(one) * F.col(f"{end}_in") ** 2).alias(f"{one}_{end}2"))
        return intervals.groupBy("level", "digit", "enter", "leave").agg(*sums).persist()

    def close(self) -> None:
        """Remove the cached table from Spark."""
        if "moves" in self.__dict__:
            self.moves.unpersist()

    def levels(self) -> DataFrame:
        """A row for each level and span with messages, and for the level ``all``, unordered.

        The columns are ``level``, ``at`` (the start of the span), ``held`` (mean) and ``held_peak``, ``bytes`` and
        ``bytes_peak`` (of bodies), ``hops`` (messages that left the level), ``hops_per_second`` (mean) and
        ``hops_peak`` (per second, in the tick with most hops).
        """
        changes = self._changes()
        span = self._ticks_per_span
        by_level = Window.partitionBy("level").orderBy("tick")
        before = by_level.rowsBetween(Window.unboundedPreceding, -1)

        def total(column: Column) -> Column:
            return F.coalesce(F.sum(column).over(before), F.lit(0.0))

        tick = F.col("tick")
        following = F.lead("tick").over(by_level)
        spans = changes.withColumn("gap", F.coalesce(following - tick - 1, F.lit(0)))
        gap = F.col("gap")
        figures = []
        for one, name in zip(MEASURES, ("held", "bytes"), strict=True):
            n, n_1, rate, rate_1, rate_2 = (F.col(f"{one}{part}") for part in ("", "_1", "_rate", "_rate_1", "_rate_2"))
            flow, start = F.col(f"{one}_flow"), F.col(f"{one}_start")
            spans = spans.withColumn(f"{one}_flow", total(rate))
            spans = spans.withColumn(f"{one}_start", total(held_contribution(tick, n, rate, rate_1)) + tick * flow)
            found = held(n=n, n_1=n_1, rate=rate, rate_1=rate_1, rate_2=rate_2, flow=flow, start=start, gap=gap)
            highest = F.when(gap > 0, F.greatest(found.now, *found.quiet)).otherwise(found.now)
            figures += [(F.sum(found.area) / span).alias(name), F.max(highest).alias(f"{name}_peak")]
        seconds = self.tick.total_seconds()
        spans = spans.withColumn("hops_flow", total(F.col("hops_rate")))
        now, later = passed(
            n=F.col("hops"), rate=F.col("hops_rate"), rate_1=F.col("hops_rate_1"), flow=F.col("hops_flow")
        )
        hops = now + gap * later
        most = F.when(gap > 0, F.greatest(now, later)).otherwise(now)
        figures += [
            F.sum(hops).alias("hops"),
            (F.sum(hops) / (span * seconds)).alias("hops_per_second"),
            (F.max(most) / seconds).alias("hops_peak"),
        ]
        by_span = spans.groupBy("level", F.expr(f"(tick + {self._origin}) div {span}").alias("span")).agg(*figures)
        return by_span.where((F.col("held_peak") > EPSILON) | (F.col("hops") > EPSILON)).select(
            F.when(F.col("level") < 0, F.lit(ALL)).otherwise(self._level_name).alias("level"),
            self._at("span"),
            *(F.greatest(one, F.lit(0.0)).alias(one) for one in by_span.columns[2:]),
        )

    def queues(self) -> DataFrame:
        """A row for each digit and span in which the queues of the digit release messages, unordered.

        The columns are ``level``, ``digit``, ``at``, ``released`` (messages), ``peak`` (released per second, in the
        tick with most) and ``peak_at`` (the start of that tick). The lanes of a digit are counted together.
        """
        span, queue = self._ticks_per_span, ("level", "digit")
        leaving = self.moves.groupBy(*queue, F.col("leave").alias("tick")).agg(
            F.sum("n").alias("n"), F.sum("n_rate").alias("rate"), F.sum("n_rate_leave1").alias("rate_1")
        )
        if self.workload.has_flows:
            zero = F.lit(0.0)
            edges = self.moves.groupBy(*queue).agg(F.min("leave").alias("begin"), F.max("leave").alias("end"))
            edges = edges.select(*queue, self._edges(), zero.alias("n"), zero.alias("rate"), zero)
            leaving = leaving.union(edges).groupBy(*queue, "tick").sum("n", "rate", "rate_1")
            leaving = leaving.toDF(*queue, "tick", "n", "rate", "rate_1")
            by_queue = Window.partitionBy(*queue).orderBy("tick")
            flow = F.coalesce(F.sum("rate").over(by_queue.rowsBetween(Window.unboundedPreceding, -1)), zero)
            leaving = leaving.withColumn("flow", flow)
            leaving = leaving.withColumn("gap", F.coalesce(F.lead("tick").over(by_queue) - F.col("tick") - 1, F.lit(0)))
        else:
            leaving = leaving.withColumns({"flow": F.lit(0.0), "gap": F.lit(0)})
        now, after = passed(n=F.col("n"), rate=F.col("rate"), rate_1=F.col("rate_1"), flow=F.col("flow"))
        later = F.when(F.col("gap") > 0, after).otherwise(0.0)
        most = F.greatest(now, later)
        seconds, tick = self.tick.total_seconds(), self.tick // MILLISECOND
        when = F.col("tick") + F.when(later > now, 1).otherwise(0)
        found = leaving.groupBy(*queue, F.expr(f"(tick + {self._origin}) div {span}").alias("span")).agg(
            F.sum(now + F.col("gap") * later).alias("released"),
            (F.max(most) / seconds).alias("peak"),
            F.min_by(when, F.struct(-F.round(most, 9), when)).alias("peak_tick"),
        )
        return found.where(F.col("released") > EPSILON).select(
            self._level_name.alias("level"),
            "digit",
            self._at("span"),
            "released",
            "peak",
            F.timestamp_millis((F.col("peak_tick") + self._origin) * tick).alias("peak_at"),
        )

    @property
    def _counts(self) -> tuple[str, ...]:
        return tuple(f"{one}{kind}" for one in MEASURES for kind in ("", "_rate"))

    @property
    def _origin(self) -> int:
        """The tick of the first message of the workload."""
        return self.workload.first // (self.tick // MILLISECOND)

    @property
    def _level_name(self) -> Column:
        pairs = enumerate(level.name for level in self.layout.levels)
        return F.create_map(*(F.lit(one) for pair in pairs for one in pair))[F.col("level")]

    @property
    def _ticks_per_span(self) -> int:
        return self.every // self.tick

    def _at(self, span: str) -> Column:
        return F.timestamp_millis(F.col(span) * (self.every // MILLISECOND)).alias("at")

    def _edges(self) -> Column:
        """The first tick of each span between the ticks ``begin`` and ``end``; for the first span, ``begin`` itself."""
        span = self._ticks_per_span
        bounds = f"sequence((begin + {self._origin}) div {span}, (end + {self._origin}) div {span})"
        return F.explode(F.expr(f"transform({bounds}, one -> greatest(one * {span} - {self._origin}, begin))")).alias(
            "tick"
        )

    def _changes(self) -> DataFrame:
        """The changes in each tick of each level and of all levels, with a row for the start of each span."""
        entering = [F.col("level"), F.col("enter").alias("tick")]
        leaving = [F.col("level"), F.col("leave").alias("tick")]
        names = []
        for one in MEASURES:
            for rate in ("", "_rate"):
                for power in ("", "1", "2") if rate else ("", "1"):
                    name = f"{one}{rate}"
                    entering.append(F.col(f"{name}_enter{power}" if power else name))
                    leaving.append(-F.col(f"{name}_leave{power}" if power else name))
                    names.append(f"{name}_{power}" if power else name)
        hops = ("n", "n_rate", "n_rate_leave1")
        names += ["hops", "hops_rate", "hops_rate_1"]
        entering += [F.lit(0.0)] * len(hops)
        leaving += [F.col(one) for one in hops]
        both = self.moves.select(*entering).union(self.moves.select(*leaving)).toDF("level", "tick", *names)
        by_level = both.groupBy("level", "tick").agg(*(F.sum(one).alias(one) for one in names))
        together = by_level.withColumn("level", F.lit(-1))
        edges = self.moves.groupBy("level").agg(F.min("enter").alias("begin"), F.max("leave").alias("end"))
        whole = edges.agg(F.min("begin").alias("begin"), F.max("end").alias("end")).where("begin is not null")
        edges = edges.union(whole.select(F.lit(-1), "begin", "end"))
        nothing = [F.lit(0.0).alias(one) for one in names]
        edges = edges.select("level", self._edges(), *nothing)
        return (
            by_level.union(together)
            .union(edges)
            .groupBy("level", "tick")
            .agg(*(F.sum(one).alias(one) for one in names))
        )
