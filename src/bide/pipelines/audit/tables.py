"""What follows from the facts of an audit: one row for each message, what is pending, how late, and what fails.

All of it is worked out anew for whole days, from all their facts. So it makes no difference in which order the facts
came, how late, or how often: the tables are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.types import ArrayType, StructField, StructType

from bide.durations import to_microseconds
from bide.pipelines.audit.facts import schema_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BATCH: Final = "batch"
"""Which of the rounds wrote a row: days are divided by it, so that a round has to replace little of them."""

WAITING: Final = ArrayType(schema_of("target string, due timestamp"))
"""What of a message is scheduled and not delivered."""

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
"""A message is overdue when its due time is over for so long, and it was not seen being delivered."""

SLICE_SECONDS: Final = 10
"""What is pending is counted by slices of the due time as long as this, before hours are made of them."""

WINDOW: Final = timedelta(hours=1)
"""``recent`` and ``before``, in the table of failures, are as long as this."""

_SEVERITY: Final = ("processed", "retried", "failed", "expired", "discarded", "parked")
"""Of several endpoints that a message went to, the one that fared worst gives its outcome."""

_LIFE: Final = ("failed", "retried", "processed", "expired", "discarded", "parked")
"""What comes after what, where two events are of the same millisecond."""

KEY: Final = ("message_id", "day")
"""What the rows of a message have in common."""

_MICROS: Final = 1_000_000


def messages(
    scheduled: DataFrame, delivered: DataFrame, processed: DataFrame, failed: DataFrame, *, now: datetime
) -> DataFrame:
    """One row for each message id, and day.

    Args:
        scheduled: and the others: the facts, of any days.
        now: until when they were read.
    """
    went = _known(scheduled).select(
        *KEY,
        "target",
        "type",
        "layout",
        "sent",
        F.when(_is_first(), F.col("scheduled")).alias("scheduled"),
        F.col("first_due").alias("due"),
        F.col("scheduled").alias("at"),
        F.lit(1).alias("gone"),
    )
    came = _known(delivered).select(
        *KEY,
        "target",
        "type",
        "layout",
        "sent",
        F.col("first_due").alias("due"),
        F.when(_is_first(), F.col("delivered")).alias("delivered"),
        F.col("delivered").alias("at"),
        F.lit(1).alias("come"),
    )
    dealt = _dealt(processed, failed)
    together = went.unionByName(came, allowMissingColumns=True).unionByName(dealt, allowMissingColumns=True)
    found = together.groupBy(*KEY).agg(
        *(_earliest(name).alias(name) for name in ("target", "type", "layout")),
        *(F.min(name).alias(name) for name in ("sent", "scheduled", "due", "delivered")),
        F.coalesce(F.sum("gone"), F.lit(0)).alias("gone"),
        F.coalesce(F.sum("come"), F.lit(0)).alias("come"),
        F.coalesce(F.sum("attempts"), F.lit(0)).cast("int").alias("attempts"),
        F.max("worst").alias("worst"),
    )
    found = found.join(_waiting(scheduled, delivered), list(KEY), "left")
    waiting = F.when(_overdue(_last_due(), now), F.lit("overdue")).otherwise(F.lit("scheduled"))
    start = F.coalesce("due", "sent")
    ended, started = F.col("worst.ended"), F.col("worst.started")
    outcome = F.coalesce(
        "worst.kind",
        F.when(F.col("gone") > F.col("come"), waiting).otherwise(F.lit("delivered")),
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
            # As NServiceBus defines them: of what was processed, from when it should have been there.
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


def aged(messages: DataFrame, *, now: datetime) -> DataFrame:
    """The same messages later: those are overdue of which nothing but time has told."""
    is_late = (F.col("outcome") == "scheduled") & _overdue(_last_due(), now)
    return messages.withColumn("outcome", F.when(is_late, F.lit("overdue")).otherwise(F.col("outcome")))


def pending_parts(messages: DataFrame, *, now: datetime) -> DataFrame:
    """What waits, by target and slice of the due time, for each day and batch.

    Args:
        messages: the table, with the batch of each row.
        now: until when the facts were read.
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
    """The table ``pending``, of the parts of all days."""
    return (
        parts.groupBy("target", _floor(F.col("due"), 3600).alias("due_hour"))
        .agg(F.sum("count").alias("count"), F.sum("overdue").alias("overdue"))
        .select(*PENDING.names)
    )


def ripe(parts: DataFrame, *, now: datetime) -> DataFrame:
    """Where messages have become overdue since they were counted: ``day`` and ``batch``."""
    whole = F.col("due") + F.make_dt_interval(secs=F.lit(SLICE_SECONDS))
    return parts.where(_overdue(whole, now) & (F.col("overdue") < F.col("count"))).select("day", BATCH).distinct()


def lateness(delivered: DataFrame) -> DataFrame:
    """The table ``lateness``, by the minute in which messages were due.

    Releases for a retry, of an endpoint or of an operator, are not counted.
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
    """Those facts that the table ``lateness`` counts, with the ``minute`` in which each was due."""
    first = delivered.where(_is_first() & F.col("lateness_ms").isNotNull())
    return first.withColumn("minute", _floor(F.col("due"), 60))


def failures_parts(failed: DataFrame) -> DataFrame:
    """Failures by group and minute, for each day. A message is counted in the minute of its first failure."""
    told = _distinct(failed).where((F.col("kind") != "expired") & F.col("exception").isNotNull())
    same = ("group", "exception", "endpoint")
    once = told.groupBy(*same, *KEY).agg(
        F.min("ended").alias("first"), F.array_sort(F.collect_list("ended")).alias("times")
    )
    each = once.select(*same, "day", "first", "message_id", F.posexplode("times").alias("place", "ended"))
    # Without an id, each failure counts as a message of its own.
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
    """The table ``failures``, of the parts of all days.

    ``recent`` counts the failures of the last hour that the facts tell of, ``before`` those of the hour before;
    ``trend`` is what the one is to the other: 2.0 for twice as many, null where there were none before.
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


def _dealt(processed: DataFrame, failed: DataFrame) -> DataFrame:
    """What endpoints made of each message: one row a message, with the outcome at the endpoint where it fared worst."""
    both = processed.withColumn("kind", F.lit("processed")).unionByName(failed, allowMissingColumns=True)
    latest = F.struct("ended", _place(_LIFE, "kind").alias("place"), "kind", "started")
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
    rank = _place(_SEVERITY, "latest.kind").alias("rank")
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
    """What was scheduled and not delivered, for each message of which there is such.

    A message that was scheduled several times (it was retried, or its publisher sent it twice) is delivered as often;
    what was due first has been delivered first.
    """
    which = (*KEY, "target")
    went = _known(scheduled).groupBy(*which).agg(F.array_sort(F.collect_list("due")).alias("dues"))
    those = (F.col(name).alias(f"that_{name}") for name in which)
    came = _known(delivered).groupBy(*those).agg(F.count(F.lit(1)).alias("come"))
    # A target may be null.
    same = reduce(lambda some, more: some & more, (F.col(name).eqNullSafe(F.col(f"that_{name}")) for name in which))
    come = F.coalesce("come", F.lit(0)).cast("int")
    left = F.slice("dues", come + 1, F.size("dues"))
    return (
        went.join(came, same, "left")
        .where(F.size("dues") > come)
        .withColumn("waiting", F.transform(left, lambda due: F.struct(F.col("target"), due.alias("due"))))
        .groupBy(*KEY)
        .agg(F.flatten(F.collect_list("waiting")).alias("waiting"))
    )


def _last_due() -> Column:
    """When the last of what waits is due; null where nothing does."""
    return F.array_max(F.transform("waiting", lambda one: one["due"]))


def _known(tapped: DataFrame) -> DataFrame:
    """Messages that have an id."""
    return tapped.where(F.col("message_id").isNotNull())


def _is_first() -> Column:
    """Whether a message goes the way that its sender gave it: no retry of an endpoint, no copy of an operator.

    Copies of an operator count no retries. They have a due time of their own, which the first messages of others need
    not tell.
    """
    return (F.coalesce("retries", F.lit(0)) == 0) & F.col("due").eqNullSafe(F.col("first_due"))


def _distinct(told: DataFrame) -> DataFrame:
    """Each event once: an endpoint writes one again when it does not know whether the broker has it."""
    return told.dropDuplicates(["message_id", "day", "endpoint", "kind", "retries", "attempt", "started", "ended"])


def _overdue(due: Column, now: datetime) -> Column:
    return due <= F.timestamp_micros(F.lit(to_microseconds(now - GRACE)))


def _floor(moment: Column, seconds: int) -> Column:
    """The beginning of a span, counted from 1970 in UTC whatever the session's time zone."""
    micros = F.unix_micros(moment)
    return F.timestamp_micros(micros - F.pmod(micros, F.lit(seconds * _MICROS)))


def _milliseconds(until: str | Column, since: Column) -> Column:
    return (F.unix_micros(until) - F.unix_micros(since)) / F.lit(1000.0)


def _place(kinds: Sequence[str], column: str) -> Column:
    return F.array_position(F.array(*(F.lit(kind) for kind in kinds)), F.col(column))


def _earliest(column: str) -> Column:
    """What was told first; of what was told at the same time the same each time, whatever the order of facts."""
    return F.min(F.when(F.col(column).isNotNull(), F.struct("at", column)))[column]
