"""How many messages each level of a ladder holds, passes on and releases, for a workload of any size.

A message has waited ``delay - delay % unit`` when it leaves a level, so all its stays are known at once. Classes of
messages (:mod:`bide.pipelines.plan.workload`) become stays; stays that begin and end in the same ticks of a queue are
added up; and the time line of a level is what has entered less what has left, accumulated over the ticks in which
anything changes. However many messages there are, there are no more rows than queues times ticks.

A tick is a second, if not told otherwise. What happens within one is kept as moments (sums of counts times the time
within the tick, and of its square): means are exact, and *peak* is the largest mean of a tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bide.pipelines.plan.levels import PlanLevels
    from bide.pipelines.plan.workload import Workload

ALL: Final = "all"
"""The level that stands for all of them together."""

_MEASURES: Final = ("n", "bytes")
_NOTHING: Final = 1e-6
"""Of a message: less than that is what rounding leaves behind."""


def check_spans(every: timedelta, tick: timedelta) -> None:
    """See whether figures can be given for such spans and ticks: those of a :class:`Timeline`.

    Raises:
        InvalidInputError: they cannot.
    """
    millisecond = timedelta(milliseconds=1)
    if tick < millisecond or tick % millisecond:
        raise InvalidInputError(f"the tick of {tick} is no whole number of milliseconds")
    if every < tick or every % tick:
        raise InvalidInputError(f"spans of {every} are no multiple of the tick of {tick}")


def check_delays(longest: int, ladder: PlanLevels) -> None:
    """See whether a ladder holds messages so long, which is in milliseconds.

    Raises:
        InvalidInputError: it does not.
    """
    if longest > ladder.longest:
        raise InvalidInputError(
            f"there is a delay of {timedelta(milliseconds=longest)}, and {ladder.name} holds "
            f"{timedelta(milliseconds=ladder.longest)} at most: leave those out, or plan for another layout"
        )


@dataclass(frozen=True)
class Timeline:
    """What a workload does to the levels of a ladder.

    Attributes:
        every: length of a span that figures are given for; spans begin at multiples of it since the Unix epoch.
        tick: the finest time that is told apart; *every* is a multiple of it.
    """

    workload: Workload
    ladder: PlanLevels
    every: timedelta = timedelta(hours=1)
    tick: timedelta = timedelta(seconds=1)

    def __post_init__(self) -> None:
        check_spans(self.every, self.tick)
        check_delays(self.workload.longest, self.ladder)

    @cached_property
    def moves(self) -> DataFrame:
        """Stays that begin and end in the same ticks of a queue, added up. Kept by Spark: :meth:`close` drops it."""
        spark = self.workload.classes.sparkSession
        rungs = [(level, rung.unit, rung.highest + 1) for level, rung in enumerate(self.ladder.rungs)]
        levels = F.broadcast(spark.createDataFrame(rungs, "level int, unit long, radix int"))
        tick = self.tick // timedelta(milliseconds=1)
        resolution = self.ladder.resolution
        digit = F.expr("cast(wait div unit % radix as int)")
        waiting = self.workload.classes.withColumn("wait", F.expr(f"(delay + {resolution - 1}) div {resolution}"))
        stays = (
            waiting.withColumn("wait", F.col("wait") * resolution)
            .join(levels, digit != 0)
            .withColumn("digit", digit)
            # Ticks are counted from the first of the workload: small numbers keep sums of squares exact.
            .withColumn("leave_at", F.expr(f"at - {self._origin * tick} + wait - wait % unit"))
            .withColumn("enter_at", F.col("leave_at") - F.col("digit") * F.col("unit"))
        )
        for end in ("enter", "leave"):
            stays = stays.withColumn(end, F.expr(f"{end}_at div {tick}"))
            stays = stays.withColumn(f"{end}_in", F.expr(f"{end}_at % {tick} / {tick}"))
        sums = [F.sum(one).alias(one) for one in self._counts]
        for one in self._counts:
            for end in ("enter", "leave"):
                sums.append(F.sum(F.col(one) * F.col(f"{end}_in")).alias(f"{one}_{end}1"))
                if one.endswith("_rate"):
                    sums.append(F.sum(F.col(one) * F.col(f"{end}_in") ** 2).alias(f"{one}_{end}2"))
        return stays.groupBy("level", "digit", "enter", "leave").agg(*sums).persist()

    def close(self) -> None:
        """Let Spark drop what it keeps."""
        if "moves" in self.__dict__:
            self.moves.unpersist()

    def levels(self) -> DataFrame:
        """A row for each level and span with messages in it, and for the level ``all``, in no order.

        ``level``, ``at`` (when the span begins), ``held`` (mean) and ``held_peak``, ``bytes`` and ``bytes_peak`` (of
        bodies), ``hops`` (messages that left the level), ``hops_per_second`` (mean) and ``hops_peak`` (per second, in
        the tick with most).
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
        figures = []
        for one in (*_MEASURES, "hops"):
            n, first = F.col(one), F.col(f"{one}_1")
            rate, rate1, rate2 = (F.col(f"{one}_rate{power}") for power in ("", "_1", "_2"))
            if one == "hops":
                # Hops are counted, not held: the rate at which they go on, and those in the tick.
                spans = spans.withColumn("hops_flow", total(rate))
                spans = spans.withColumn("hops_now", F.col("hops_flow") + n + rate - rate1)
                spans = spans.withColumn("hops_later", F.col("hops_flow") + rate)
                continue
            spans = spans.withColumn(f"{one}_flow", total(rate))
            start = total(n + rate * (-tick) - rate1) + tick * F.col(f"{one}_flow")
            spans = spans.withColumn(f"{one}_start", start)
            flow = F.col(f"{one}_flow")
            now = F.col(f"{one}_start") + flow / 2 + n - first + (rate - 2 * rate1 + rate2) / 2
            spans = spans.withColumn(f"{one}_now", now)
            spans = spans.withColumn(f"{one}_end", F.col(f"{one}_start") + flow + n + rate - rate1)
            spans = spans.withColumn(f"{one}_later", flow + rate)
        gap = F.col("gap")
        for one, name in zip(_MEASURES, ("held", "bytes"), strict=True):
            end, later = F.col(f"{one}_end"), F.col(f"{one}_later")
            area = F.col(f"{one}_now") + gap * end + later * gap * gap / 2
            quiet = F.greatest(end + later / 2, end + later * (gap - 0.5))
            highest = F.when(gap > 0, F.greatest(F.col(f"{one}_now"), quiet)).otherwise(F.col(f"{one}_now"))
            figures += [(F.sum(area) / span).alias(name), F.max(highest).alias(f"{name}_peak")]
        seconds = self.tick.total_seconds()
        hops = F.col("hops_now") + gap * F.col("hops_later")
        most = F.when(gap > 0, F.greatest("hops_now", "hops_later")).otherwise(F.col("hops_now"))
        figures += [
            F.sum(hops).alias("hops"),
            (F.sum(hops) / (span * seconds)).alias("hops_per_second"),
            (F.max(most) / seconds).alias("hops_peak"),
        ]
        found = spans.groupBy("level", F.expr(f"(tick + {self._origin}) div {span}").alias("span")).agg(*figures)
        return found.where((F.col("held_peak") > _NOTHING) | (F.col("hops") > _NOTHING)).select(
            F.when(F.col("level") < 0, F.lit(ALL)).otherwise(self._level_name).alias("level"),
            self._at("span"),
            *(F.greatest(one, F.lit(0.0)).alias(one) for one in found.columns[2:]),
        )

    def queues(self) -> DataFrame:
        """A row for each queue and span in which it releases messages, in no order.

        ``level``, ``digit``, ``at``, ``released`` (messages), ``peak`` (released per second, in the tick with most),
        ``peak_at`` (when that tick begins). Of a queue with lanes, all of them together.
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
        now = F.col("flow") + F.col("n") + F.col("rate") - F.col("rate_1")
        later = F.when(F.col("gap") > 0, F.col("flow") + F.col("rate")).otherwise(0.0)
        most = F.greatest(now, later)
        seconds, tick = self.tick.total_seconds(), self.tick // timedelta(milliseconds=1)
        when = F.col("tick") + F.when(later > now, 1).otherwise(0)
        found = leaving.groupBy(*queue, F.expr(f"(tick + {self._origin}) div {span}").alias("span")).agg(
            F.sum(now + F.col("gap") * later).alias("released"),
            (F.max(most) / seconds).alias("peak"),
            F.min_by(when, F.struct(-F.round(most, 9), when)).alias("peak_tick"),
        )
        return found.where(F.col("released") > _NOTHING).select(
            self._level_name.alias("level"),
            "digit",
            self._at("span"),
            "released",
            "peak",
            F.timestamp_millis((F.col("peak_tick") + self._origin) * tick).alias("peak_at"),
        )

    @property
    def _counts(self) -> tuple[str, ...]:
        return tuple(f"{one}{kind}" for one in _MEASURES for kind in ("", "_rate"))

    @property
    def _origin(self) -> int:
        """The tick in which the first message is sent."""
        return self.workload.first // (self.tick // timedelta(milliseconds=1))

    @property
    def _level_name(self) -> Column:
        pairs = enumerate(rung.name for rung in self.ladder.rungs)
        return F.create_map(*(F.lit(one) for pair in pairs for one in pair))[F.col("level")]

    @property
    def _ticks_per_span(self) -> int:
        return self.every // self.tick

    def _at(self, span: str) -> Column:
        return F.timestamp_millis(F.col(span) * (self.every // timedelta(milliseconds=1))).alias("at")

    def _edges(self) -> Column:
        """The first ticks of all spans from the tick ``begin`` to the tick ``end``, and the first tick itself."""
        span = self._ticks_per_span
        bounds = f"sequence((begin + {self._origin}) div {span}, (end + {self._origin}) div {span})"
        return F.explode(F.expr(f"transform({bounds}, one -> greatest(one * {span} - {self._origin}, begin))")).alias(
            "tick"
        )

    def _changes(self) -> DataFrame:
        """What changes in each tick of each level, and of all; and a row, if without change, where each span begins."""
        entering = [F.col("level"), F.col("enter").alias("tick")]
        leaving = [F.col("level"), F.col("leave").alias("tick")]
        names = []
        for one in _MEASURES:
            for rate in ("", "_rate"):
                for power in ("", "1", "2") if rate else ("", "1"):
                    name = f"{one}{rate}"
                    entering.append(F.col(f"{name}_enter{power}" if power else name))
                    leaving.append(-F.col(f"{name}_leave{power}" if power else name))
                    names.append(f"{name}_{power}" if power else name)
        hops = ("n", "n_leave1", "n_rate", "n_rate_leave1", "n_rate_leave2")
        names += ["hops", "hops_1", "hops_rate", "hops_rate_1", "hops_rate_2"]
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
