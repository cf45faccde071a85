"""Tables computed from the facts of an audit: messages, pending, lateness and failures.

The rows of a message are computed from all its facts. So the tables do not depend on the order of the facts, on when
they arrive, or on how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import ArrayType, StructField, StructType

from bide.durations import to_microseconds
from bide.pipelines.audit.facts import schema_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BATCH: Final = "batch"
"""The number of the round that wrote a row. Days are partitioned by it, so that a round replaces small parts only."""

WAITING: Final = ArrayType(schema_of("target string, due timestamp"))
"""Targets and due times that a message is scheduled for and not delivered to."""

MESSAGES: Final = StructType(
    [
        *schema_of(
            "message_id string, target string, type string, layout string, sent timestamp, scheduled timestamp, "
            "due timestamp, delivered timestamp, lateness_ms double, attempts int, outcome string, endpoint string, "
            "started timestamp, ended timestamp, critical_ms double, processing_ms double, delivery_ms double"
        ),
        StructField("waiting", WAITING),
        *schema_of("day date"),
    ]
)
LATENESS: Final = schema_of(
    "minute timestamp, target string, count long, p50_ms double, p95_ms double, p99_ms double, max_ms double, day date"
)
PENDING: Final = schema_of("target string, due_hour timestamp, count long, overdue long")
FAILURES: Final = schema_of(
    "group string, exception string, endpoint string, count long, messages long, first_seen timestamp, "
    "last_seen timestamp, recent long, before long, trend double"
)
PENDING_PARTS: Final = schema_of("target string, due timestamp, count long, overdue long, day date, batch long")
FAILURES_PARTS: Final = schema_of(
    "group string, exception string, endpoint string, minute timestamp, count long, messages long, "
    "first_seen timestamp, last_seen timestamp, day date"
)

GRACE: Final = timedelta(seconds=10)
"""A message is overdue when it was due longer ago than this and is not delivered."""

SLICE_SECONDS: Final = 10
"""Pending messages are counted by slices of the due time of this length, which are then summed by hour."""

WINDOW: Final = timedelta(hours=1)
"""The length of the windows ``recent`` and ``before`` in the table of failures."""

_SEVERITY: Final = ("processed", "retried", "failed", "expired", "discarded", "parked")
"""Kinds of events by severity. If a message went to several endpoints, the most severe one is its outcome."""

_EVENT_ORDER: Final = ("failed", "retried", "processed", "expired", "discarded", "parked")
"""Kinds of events in their order, for events of the same millisecond."""

_END_ORDER: Final = ("skipped", "superseded", "cancelled", "unknown", "delivered", "undeliverable")
"""Outcomes of occurrences. If several have the same message id, the last one in this order is the outcome."""

SCHEDULES: Final = "schedules"
"""The layout of messages that only the schedule log has delivered or ended."""

KEY: Final = ("message_id", "day")
"""The columns that identify a message."""

_MICROS: Final = 1_000_000


def messages(
    scheduled: DataFrame,
    delivered: DataFrame,
    processed: DataFrame,
    failed: DataFrame,
    occurrences: DataFrame,
    *,
    now: datetime,
) -> DataFrame:
    """The table ``messages``, with one row for each message id and day, from the facts of any days.

    Args:
        now: the time until which the facts were read.
    """
    sends = _with_id(scheduled).select(
        *KEY,
        "target",
        "type",
        "layout",
        "sent",
        F.when(_is_first(), F.col("scheduled")).alias("scheduled"),
        F.col("first_due").alias("due"),
        F.col("scheduled").alias("at"),
        F.lit(1).alias("sends"),
    )
    deliveries = _with_id(delivered).select(
        *KEY,
        "target",
        "type",
        "layout",
        "sent",
        F.col("first_due").alias("due"),
        F.when(_is_first(), F.col("delivered")).alias("delivered"),
        F.col("delivered").alias("at"),
        F.lit(1).alias("deliveries"),
    )
    ends = _with_id(occurrences).select(
        *KEY,
        "target",
        "type",
        F.lit(SCHEDULES).alias("layout"),
        "due",
        F.coalesce("ended", "due").alias("at"),
        F.struct(_rank(_END_ORDER, "outcome").alias("rank"), "outcome").alias("end"),
    )
    outcomes = _outcomes(processed, failed)
    parts = (sends, deliveries, ends, outcomes)
    together = reduce(lambda some, more: some.unionByName(more, allowMissingColumns=True), parts)
    found = together.groupBy(*KEY).agg(
        *(_earliest(name).alias(name) for name in ("target", "type", "layout")),
        *(F.min(name).alias(name) for name in ("sent", "scheduled", "due", "delivered")),
        F.coalesce(F.sum("sends"), F.lit(0)).alias("sends"),
        F.coalesce(F.sum("deliveries"), F.lit(0)).alias("deliveries"),
        F.coalesce(F.sum("attempts"), F.lit(0)).cast("int").alias("attempts"),
        F.max("worst").alias("worst"),
        F.max("end").alias("end"),
    )
    found = found.join(_waiting(scheduled, delivered), list(KEY), "left")
    waiting = F.when(_overdue(_last_due(), now), F.lit("overdue")).otherwise(F.lit("scheduled"))
    start = F.coalesce("due", "sent")
    ended, started = F.col("worst.ended"), F.col("worst.started")
    outcome = F.coalesce(
        "worst.kind",
        F.when(F.col("sends") > F.col("deliveries"), waiting),
        "end.outcome",
        F.lit("delivered"),
    )
    return found.withColumns({"outcome": outcome, "endpoint": F.col("worst.endpoint")}).select(
        "message_id",
        "target",
        "type",
        "layout",
        "sent",
        "scheduled",
        "due",
        "delivered",
        _milliseconds("delivered", F.col("due")).alias("lateness_ms"),
        "attempts",
        "outcome",
        "endpoint",
        started.alias("started"),
        ended.alias("ended"),
        *(
            # Defined as in NServiceBus: for processed messages, from the due time or else the time of sending.
            F.when(F.col("outcome") == "processed", _milliseconds(until, since)).alias(name)
            for name, since, until in (
                ("critical_ms", start, ended),
                ("processing_ms", started, ended),
                ("delivery_ms", start, started),
            )
        ),
        "waiting",
        "day",
    )


def mark_overdue(messages: DataFrame, *, now: datetime) -> DataFrame:
    """Change the outcome of messages that have become overdue without new facts."""
    is_late = (F.col("outcome") == "scheduled") & _overdue(_last_due(), now)
    return messages.withColumn("outcome", F.when(is_late, F.lit("overdue")).otherwise(F.col("outcome")))


def pending_parts(messages: DataFrame, *, now: datetime) -> DataFrame:
    """Counts of pending messages by target and slice of the due time, for each day and batch.

    Args:
        messages: the table ``messages``, with the batch of each row.
        now: the time until which the facts were read.
    """
    waiting = messages.where(F.col("waiting").isNotNull()).select("day", BATCH, F.explode("waiting").alias("one"))
    return (
        waiting.select("day", BATCH, "one.*")
        .groupBy("target", _floor(F.col("due"), SLICE_SECONDS).alias("slice"), "day", BATCH)
        .agg(F.count(F.lit(1)).alias("count"), F.count_if(_overdue(F.col("due"), now)).alias("overdue"))
        .withColumnRenamed("slice", "due")
        .select(*PENDING_PARTS.names)
    )


def pending(parts: DataFrame) -> DataFrame:
    """The table ``pending``, from the parts of all days."""
    return (
        parts.groupBy("target", _floor(F.col("due"), 3600).alias("due_hour"))
        .agg(F.sum("count").alias("count"), F.sum("overdue").alias("overdue"))
        .select(*PENDING.names)
    )


def newly_overdue(parts: DataFrame, *, now: datetime) -> DataFrame:
    """``day`` and ``batch`` of messages that have become overdue since they were counted."""
    whole = F.col("due") + F.make_dt_interval(secs=F.lit(SLICE_SECONDS))
    return parts.where(_overdue(whole, now) & (F.col("overdue") < F.col("count"))).select("day", BATCH).distinct()


def lateness(delivered: DataFrame) -> DataFrame:
    """The table ``lateness``, by the minute in which messages were due.

    Deliveries for a retry, by an endpoint or an operator, are not counted.
    """
    shares = F.percentile("lateness_ms", F.array(*(F.lit(share) for share in (0.5, 0.95, 0.99))))
    return (
        released(delivered)
        .groupBy("minute", "target", "day")
        .agg(F.count(F.lit(1)).alias("count"), shares.alias("shares"), F.max("lateness_ms").alias("max_ms"))
        .withColumns({f"p{share}_ms": F.col("shares")[place] for place, share in enumerate((50, 95, 99))})
        .select(*LATENESS.names)
    )


def released(delivered: DataFrame) -> DataFrame:
    """The facts that the table ``lateness`` counts, with the ``minute`` in which each message was due."""
    first = delivered.where(_is_first() & F.col("lateness_ms").isNotNull())
    return first.withColumn("minute", _floor(F.col("due"), 60))


def failures_parts(failed: DataFrame) -> DataFrame:
    """Failures by group and minute, for each day. ``messages`` counts a message in the minute of its first failure."""
    failures = _distinct(failed).where((F.col("kind") != "expired") & F.col("exception").isNotNull())
    same = ("group", "exception", "endpoint")
    once = failures.groupBy(*same, *KEY).agg(
        F.min("ended").alias("first"), F.array_sort(F.collect_list("ended")).alias("times")
    )
    each = once.select(*same, "day", "first", "message_id", F.posexplode("times").alias("place", "ended"))
    # Each failure without a message id counts as a separate message.
    new = F.when(F.col("message_id").isNull() | (F.col("place") == 0), F.lit(1)).otherwise(F.lit(0))
    return (
        each.groupBy(*same, _floor(F.col("ended"), 60).alias("minute"), "day")
        .agg(
            F.count(F.lit(1)).alias("count"),
            F.sum(new).alias("messages"),
            F.min("ended").alias("first_seen"),
            F.max("ended").alias("last_seen"),
        )
        .select(*FAILURES_PARTS.names)
    )


def failures(parts: DataFrame) -> DataFrame:
    """The table ``failures``, from the parts of all days.

    ``recent`` counts the failures in the last hour with facts, ``before`` those in the hour before. ``trend`` is their
    ratio: 2.0 for twice as many, null if there were none before.
    """
    hour = F.make_dt_interval(secs=F.lit(int(WINDOW.total_seconds())))
    last = parts.agg(F.max("minute").alias("last"))
    since = parts.crossJoin(last)
    recent = F.col("minute") > F.col("last") - hour
    before = ~recent & (F.col("minute") > F.col("last") - hour - hour)
    return (
        since.groupBy("group", "exception", "endpoint")
        .agg(
            F.sum("count").alias("count"),
            F.sum("messages").alias("messages"),
            F.min("first_seen").alias("first_seen"),
            F.max("last_seen").alias("last_seen"),
            F.coalesce(F.sum(F.when(recent, F.col("count"))), F.lit(0)).alias("recent"),
            F.coalesce(F.sum(F.when(before, F.col("count"))), F.lit(0)).alias("before"),
        )
        .withColumn("trend", F.col("recent") / F.nullif(F.col("before"), F.lit(0)))
        .select(*FAILURES.names)
    )


def _outcomes(processed: DataFrame, failed: DataFrame) -> DataFrame:
    """One row for each message that endpoints have handled, with the most severe outcome among the endpoints."""
    both = processed.withColumn("kind", F.lit("processed")).unionByName(failed, allowMissingColumns=True)
    latest = F.struct("ended", _rank(_EVENT_ORDER, "kind").alias("place"), "kind", "started")
    ends = (
        _distinct(both)
        .where(F.col("message_id").isNotNull())
        .groupBy(*KEY, "endpoint")
        .agg(
            F.max(latest).alias("latest"),
            F.min("sent").alias("sent"),
            F.min("due").alias("due"),
            F.min("queue").alias("queue"),
            F.max("type").alias("type"),
            F.min("delivered").alias("at"),
            F.count_if(F.col("started").isNotNull()).alias("attempts"),
        )
    )
    rank = _rank(_SEVERITY, "latest.kind").alias("rank")
    worst = F.struct(rank, "latest.ended", "latest.kind", "latest.started", "endpoint")
    return ends.groupBy(*KEY).agg(
        F.max(worst).alias("worst"),
        F.sum("attempts").alias("attempts"),
        F.min("sent").alias("sent"),
        F.min("due").alias("due"),
        F.max("type").alias("type"),
        F.concat(F.lit("q:"), F.min("queue")).alias("target"),
        F.min("at").alias("at"),
    )


def _waiting(scheduled: DataFrame, delivered: DataFrame) -> DataFrame:
    """Targets and due times that are scheduled and not delivered, for each message that has some.

    A message that was scheduled several times, because of a retry or a duplicate publish, is delivered as often. The
    deliveries are matched with the earliest due times.
    """
    key = (*KEY, "target")
    sends = _with_id(scheduled).groupBy(*key).agg(F.array_sort(F.collect_list("due")).alias("dues"))
    renamed = (F.col(name).alias(f"that_{name}") for name in key)
    deliveries = _with_id(delivered).groupBy(*renamed).agg(F.count(F.lit(1)).alias("deliveries"))
    # eqNullSafe, because a target may be null.
    same = reduce(lambda some, more: some & more, (F.col(name).eqNullSafe(F.col(f"that_{name}")) for name in key))
    count = F.coalesce("deliveries", F.lit(0)).cast("int")
    remaining = F.slice("dues", count + 1, F.size("dues"))
    return (
        sends.join(deliveries, same, "left")
        .where(F.size("dues") > count)
        .withColumn("waiting", F.transform(remaining, lambda due: F.struct(F.col("target"), due.alias("due"))))
        .groupBy(*KEY)
        .agg(F.flatten(F.collect_list("waiting")).alias("waiting"))
    )


def _last_due() -> Column:
    """The last due time that a message waits for; null if it waits for none."""
    return F.array_max(F.transform("waiting", lambda one: one["due"]))


def _with_id(tapped: DataFrame) -> DataFrame:
    """The facts of messages that have an id."""
    return tapped.where(F.col("message_id").isNotNull())


def _is_first() -> Column:
    """Whether a message is as its sender sent it, rather than a retry of an endpoint or a copy of an operator.

    A copy of an operator has no count of retries, but its due time differs from the first one.
    """
    return (F.coalesce("retries", F.lit(0)) == 0) & F.col("due").eqNullSafe(F.col("first_due"))


def _distinct(events: DataFrame) -> DataFrame:
    """Remove duplicate events, which an endpoint publishes when a confirm is lost."""
    return events.dropDuplicates(["message_id", "day", "endpoint", "kind", "retries", "attempt", "started", "ended"])


def _overdue(due: Column, now: datetime) -> Column:
    return due <= F.timestamp_micros(F.lit(to_microseconds(now - GRACE)))


def _floor(time: Column, seconds: int) -> Column:
    """Round a time down to a multiple of *seconds* since 1970 in UTC, in any time zone of the session."""
    micros = F.unix_micros(time)
    return F.timestamp_micros(micros - F.pmod(micros, F.lit(seconds * _MICROS)))


def _milliseconds(until: str | Column, since: Column) -> Column:
    return (F.unix_micros(until) - F.unix_micros(since)) / F.lit(1000.0)


def _rank(kinds: Sequence[str], column: str) -> Column:
    return F.array_position(F.array(*(F.lit(kind) for kind in kinds)), F.col(column))


def _earliest(column: str) -> Column:
    """The value with the earliest time; of several at the same time, the smallest, which does not depend on order."""
    return F.min(F.when(F.col(column).isNotNull(), F.struct("at", column)))[column]
