"""Spark queries of a report. The results are small for tables of any size."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.durations import MICROSECOND, to_microseconds
from bide.pipelines.report.figures import ENDED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

WAITING: Final = ("scheduled", "overdue")
"""Outcomes of messages that are not delivered yet."""

OUTCOMES: Final = ("delivered", *ENDED)
"""Outcomes of occurrences of schedules."""

STEPS: Final = 12
"""Ranges of lateness per power of ten."""

_ACCURACY: Final = 10_000
"""Percentiles of all messages have a relative rank error of 1 in this number."""

_GROUP_ACCURACY: Final = 1000
"""Percentiles of groups have a relative rank error of 1 in this number, which takes less memory per group."""

_SHARES: Final = (50, 95, 99)

_TEXT: Final = 240
"""Characters of an exception's text that are shown."""


def delayed(messages: DataFrame) -> DataFrame:
    """Only the delayed messages: endpoints also write events of messages that were not delayed."""
    return messages.where(F.coalesce("due", "scheduled", "delivered").isNotNull())


def headline(messages: DataFrame) -> DataFrame:
    """All messages in one row: counts, the first and last time in microseconds, and percentiles of lateness."""
    return messages.agg(
        F.count(F.lit(1)).alias("scheduled"),
        F.count_if(_is_delivered()).alias("delivered"),
        F.count_if(_waits()).alias("pending"),
        *_by_outcome(ENDED),
        F.count_if(F.col("outcome") == "overdue").alias("overdue"),
        F.count_if(F.col("lateness_ms") < 0).alias("early"),
        F.unix_micros(F.least(F.min("scheduled"), F.min("delivered"))).alias("since"),
        F.unix_micros(F.greatest(F.max("scheduled"), F.max("delivered"))).alias("until"),
        *_percentiles(_ACCURACY),
    )


def lost(messages: DataFrame, before: datetime) -> DataFrame:
    """The number of overdue messages that were due before a time, in one row: ``lost``."""
    return messages.agg(F.count_if((F.col("outcome") == "overdue") & (F.col("due") < moment(before))).alias("lost"))


def flow(messages: DataFrame, first: datetime, width: timedelta) -> DataFrame:
    """Messages per span of time, in at most two rows for each.

    Both have ``span``, the number of the span. One has ``scheduled``, the other ``delivered`` with percentiles of
    lateness.
    """
    scheduled = (
        messages.where(F.col("scheduled").isNotNull())
        .groupBy(_span("scheduled", first, width))
        .agg(F.count(F.lit(1)).alias("scheduled"))
    )
    delivered = (
        messages.where(F.col("delivered").isNotNull())
        .groupBy(_span("delivered", first, width))
        .agg(F.count(F.lit(1)).alias("delivered"), *_percentiles(_GROUP_ACCURACY))
    )
    return scheduled.unionByName(delivered, allowMissingColumns=True)


def lateness(messages: DataFrame) -> DataFrame:
    """Delivered messages by lateness: ``step``, the number of a range, and ``count``.

    Step n begins at 10 ** (n / :data:`STEPS`) ms; step -1 is lateness below 1 ms.
    """
    return messages.where(F.col("lateness_ms").isNotNull()).groupBy(_step()).agg(F.count(F.lit(1)).alias("count"))


def targets(messages: DataFrame) -> DataFrame:
    """One row for each target, the one with most messages first."""
    return (
        messages.groupBy("target")
        .agg(
            F.count(F.lit(1)).alias("scheduled"),
            F.count_if(_is_delivered()).alias("delivered"),
            F.count_if(F.col("outcome") == "overdue").alias("overdue"),
            *_percentiles(_GROUP_ACCURACY),
        )
        .orderBy(F.desc("scheduled"), "target")
    )


def types(messages: DataFrame) -> DataFrame:
    """The known types, the one with most messages first: ``type``, ``count``."""
    return messages.where(F.col("type") != "").groupBy("type").count().orderBy(F.desc("count"), "type")


def numbered(messages: DataFrame, targets: Sequence[str], types: Sequence[str]) -> DataFrame:
    """Messages with ``target_number`` and ``type_number``: the place in the lists from 1, and 0 for all others."""

    def number(column: str, names: Sequence[str]) -> Column:
        place = F.array_position(F.array(*map(F.lit, names)), F.col(column)) if names else F.lit(0)
        return place.cast("int").alias(f"{column}_number")

    return messages.select("*", number("target", targets), number("type", types))


def parts(numbered: DataFrame, *, flow: tuple[datetime, timedelta], due: tuple[datetime, timedelta]) -> DataFrame:
    """Messages by ``target_number`` and ``type_number``: ``part``, ``number``, ``count`` and ``overdue``.

    The part is ``scheduled`` or ``delivered`` with the number of a span of *flow*, ``late`` with the number of a step,
    or ``pending`` with the number of a span of *due*.

    Args:
        flow: the start and the length of the spans of scheduled and delivered messages.
        due: the start and the length of the spans of due times.
    """
    count, overdue = F.count(F.lit(1)).alias("count"), F.count_if(F.col("outcome") == "overdue").alias("overdue")
    found = [
        numbered.where(condition)
        .groupBy(F.lit(part).alias("part"), "target_number", "type_number", number.alias("number"))
        .agg(count, overdue)
        for part, condition, number in (
            ("scheduled", F.col("scheduled").isNotNull(), _span("scheduled", *flow)),
            ("delivered", F.col("delivered").isNotNull(), _span("delivered", *flow)),
            ("late", F.col("lateness_ms").isNotNull(), _step()),
            ("pending", _waits() & F.col("due").isNotNull(), _span("due", *due)),
        )
    ]
    return reduce(lambda some, more: some.unionByName(more), found)


def lateness_of_choices(numbered: DataFrame, first: datetime, width: timedelta) -> DataFrame:
    """Percentiles of lateness for each choice of a target, a type or both, in each span and, as span -1, in all.

    The columns are ``target_number`` and ``type_number``, with 0 for a choice without one, ``span``, and the
    percentiles.
    """
    target, kind, none = F.col("target_number"), F.col("type_number"), F.lit(0)
    pairs = ((target, none), (none, kind), (target, kind))
    # A message of a target or type that has no number belongs to one choice only.
    choice = F.array_distinct(
        F.array(*(F.struct(one.alias("target_number"), other.alias("type_number")) for one, other in pairs))
    )
    return (
        numbered.where(F.col("lateness_ms").isNotNull() & ((target > 0) | (kind > 0)))
        .select("lateness_ms", _span("delivered", first, width), F.explode(choice).alias("choice"))
        .select("lateness_ms", F.explode(F.array("span", F.lit(-1).cast("bigint"))).alias("span"), "choice.*")
        .where("target_number > 0 or type_number > 0")
        .groupBy("target_number", "type_number", "span")
        .agg(*_percentiles(_GROUP_ACCURACY))
    )


def oldest(numbered: DataFrame, limit: int) -> DataFrame:
    """For each ``target_number`` and ``type_number``, this many overdue messages with the earliest due times."""
    order = Window.partitionBy("target_number", "type_number").orderBy(F.asc_nulls_last("due"), "message_id")
    return (
        numbered.where(F.col("outcome") == "overdue")
        .withColumn("place", F.row_number().over(order))
        .where(F.col("place") <= limit)
        .select("target_number", "type_number", "message_id", "target", "type", F.unix_micros("due").alias("due"))
    )


def pending_targets(pending: DataFrame) -> DataFrame:
    """Pending messages by target, the one with most first: ``target``, ``count``, ``overdue``."""
    return (
        pending.groupBy("target")
        .agg(F.sum("count").alias("count"), F.sum("overdue").alias("overdue"))
        .where(F.col("count") > 0)
        .orderBy(F.desc("count"), "target")
    )


def time_range(times: DataFrame) -> DataFrame:
    """The range of the column ``time`` in one row: ``first``, ``last``, ``median``, and ``low`` and ``high``.

    Nine in ten times are between ``low`` and ``high``. These and the median are times of the column, not means of two:
    the mean of a time today and one in the year 9999 is thousands of years away. Spark computes them as floating-point
    numbers, so the times are milliseconds, which these represent exactly.
    """
    shares = F.percentile_approx("time", [0.05, 0.5, 0.95], _GROUP_ACCURACY)
    return times.agg(
        F.min("time").alias("first"),
        F.max("time").alias("last"),
        *(shares[place].alias(name) for place, name in enumerate(("low", "median", "high"))),
    )


def pending_spans(pending: DataFrame, names: list[str], first: datetime, width: timedelta) -> DataFrame:
    """Pending messages by target (null for all targets that are not named) and span: ``count`` and ``overdue``."""
    target = F.when(F.col("target").isin(names), F.col("target"))
    return pending.groupBy(target.alias("target"), _span("due_hour", first, width)).agg(
        F.sum("count").alias("count"), F.sum("overdue").alias("overdue")
    )


def failures(table: DataFrame) -> DataFrame:
    """All failures in one row: ``total``, ``groups``, and ``timed``, the groups whose times are known."""
    return table.agg(
        F.sum("count").alias("total"), F.count(F.lit(1)).alias("groups"), F.count("last_seen").alias("timed")
    )


def failure_limits(table: DataFrame) -> DataFrame:
    """The ``time`` of the first and of the last failure of each group, in milliseconds."""
    limits = F.array(F.unix_millis("first_seen"), F.unix_millis("last_seen"))
    return table.select(F.explode(limits).alias("time"))


def failure_groups(table: DataFrame) -> DataFrame:
    """The groups of failures, the one with most first, with times in microseconds."""
    return table.select(
        *("group", "exception", "endpoint", "count", "messages", "recent", "before"),
        F.unix_micros("first_seen").alias("first_seen"),
        F.unix_micros("last_seen").alias("last_seen"),
    ).orderBy(F.desc("count"), "group", "endpoint")


def failure_times(failed: DataFrame, groups: list[str], first: datetime, width: timedelta) -> DataFrame:
    """Failures of these groups per span: ``group``, ``endpoint``, ``span``, ``count``, and the newest ``text``."""
    return (
        failed.where(F.col("group").isin(groups) & (F.col("kind") != "expired"))
        # An endpoint publishes an event again when a confirm is lost.
        .dropDuplicates(["message_id", "group", "endpoint", "kind", "started", "ended"])
        .groupBy("group", "endpoint", _span("ended", first, width))
        .agg(
            F.count(F.lit(1)).alias("count"),
            F.left(F.max_by("text", "ended"), F.lit(_TEXT)).alias("text"),
        )
        .where(F.col("span").isNotNull())
    )


def schedule_targets(occurrences: DataFrame, pending: DataFrame) -> DataFrame:
    """Occurrences of schedules by target, the one with most first.

    The columns are ``target``, each of :data:`OUTCOMES`, ``pending``, ``overdue`` and the largest lateness, ``max``.
    """
    ended = occurrences.groupBy("target").agg(*_by_outcome(OUTCOMES), F.max("lateness_ms").alias("max"))
    waiting = pending.groupBy("target").agg(F.sum("count").alias("pending"), F.sum("overdue").alias("overdue"))
    counts = (*OUTCOMES, "pending", "overdue")
    whole = ended.join(waiting, "target", "full").fillna(0, list(counts))
    return whole.orderBy(F.desc(reduce(add, (F.col(name) for name in counts[:-1]))), "target")


def due_hours(occurrences: DataFrame) -> DataFrame:
    """Occurrences that have ended by the hour of the due time: ``due_hour`` and ``count``."""
    micros = F.unix_micros("due")
    hour = F.timestamp_micros(micros - F.pmod(micros, F.lit(3_600_000_000)))
    return occurrences.groupBy(hour.alias("due_hour")).agg(F.count(F.lit(1)).alias("count"))


def schedule_spans(occurrences: DataFrame, first: datetime, width: timedelta) -> DataFrame:
    """Occurrences that have ended by span of the due time: ``span``, and each of :data:`OUTCOMES`."""
    return occurrences.groupBy(_span("due", first, width)).agg(*_by_outcome(OUTCOMES))


def undecodable(table: DataFrame) -> DataFrame:
    """Undecodable messages by stream and reason, most first, with times in microseconds."""
    return (
        table.groupBy("stream", "reason")
        .agg(
            F.count(F.lit(1)).alias("count"),
            F.min("offset").alias("first_offset"),
            F.unix_micros(F.min("seen")).alias("first_seen"),
            F.unix_micros(F.max("seen")).alias("last_seen"),
        )
        .orderBy(F.desc("count"), "stream", "reason")
    )


def moment(value: datetime) -> Column:
    """A constant time as a column, in any time zone of the session."""
    return F.timestamp_micros(F.lit(to_microseconds(value)))


def _span(column: str, first: datetime, width: timedelta) -> Column:
    start, size = to_microseconds(first), width // MICROSECOND
    return F.floor((F.unix_micros(column) - F.lit(start)) / F.lit(size)).cast("bigint").alias("span")


def _step() -> Column:
    late = F.col("lateness_ms")
    return F.when(late < 1, F.lit(-1)).otherwise(F.floor(F.log10(late) * STEPS)).cast("int").alias("step")


def _waits() -> Column:
    return F.coalesce(F.col("outcome").isin(*WAITING), F.lit(False))


def _is_delivered() -> Column:
    return ~_waits() & ~F.coalesce(F.col("outcome").isin(*ENDED), F.lit(False))


def _by_outcome(outcomes: Sequence[str]) -> list[Column]:
    return [F.count_if(F.col("outcome") == name).alias(name) for name in outcomes]


def _percentiles(accuracy: int) -> list[Column]:
    """Percentiles and maximum of lateness, all from one sketch, because building it is most of the work."""
    late = F.col("lateness_ms")
    shares = F.percentile_approx(late, [share / 100 for share in _SHARES], accuracy)
    return [*(shares[place].alias(f"p{share}") for place, share in enumerate(_SHARES)), F.max(late).alias("max")]
