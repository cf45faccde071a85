"""What follows from new facts, worked out without the history.

The messages that new facts tell of are worked out anew, from all their facts, and no others. A table of Parquet files
has no rows to replace: a round writes its messages as a batch of their own, and writes those earlier batches again,
without them, that had some of them. Messages are told of again soon after, so these are few and recent ones.

All that is looked at of the rest is the column of message ids, in the days that the new facts belong to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import date, datetime
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from bide.pipelines.audit import facts, tables
from bide.pipelines.audit.folder import Batch, Folder, Note

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_BATCHES: Final = 20
"""Small batches of a day of a table, of which there are more, are put together into one."""

SMALL_BYTES: Final = 64 * 1024 * 1024
"""Batches as large as this stay as they are: else all that is old would be written again and again."""

BROADCAST_IDS: Final = 300_000
"""Message ids, up to so many, are sent to all tasks: else what is looked through for them would be sorted."""

FACTS: Final = tuple(facts.SCHEMAS)

UNDECODABLE: Final = "undecodable"
"""The table of what could not be decoded, from which nothing follows. It is divided by source, too: each has batches of
the same numbers."""

SOURCES: Final = ("scheduled", "delivered", "events")

_GROWING: Final = {**facts.SCHEMAS, **{f"{UNDECODABLE}/source={source}": facts.UNDECODABLE for source in SOURCES}}

_MESSAGES: Final = "messages"
_PENDING: Final = "_state/pending"
_FAILURES: Final = "_state/failures"
_OF_MINUTE: Final = ("minute", "target", "day")


def refresh(spark: SparkSession, folder: Folder, notes: Iterable[Note], *, now: datetime) -> set[date]:
    """Work out anew what follows from new facts, and which messages have become overdue.

    Whoever is interrupted in between does it all again with the same notes, and comes to the same: days of which it had
    begun to replace something are worked out as a whole.

    Args:
        notes: of batches from which nothing was worked out yet.
        now: until when the streams were read.

    Returns:
        the days of which something was written.
    """
    fresh: defaultdict[str, set[Batch]] = defaultdict(set)
    for note in notes:
        for table in (table for table in FACTS if note.rows.get(table)):
            fresh[table] |= note.batches
    unfinished = folder.unfinished_work()
    for table in FACTS:
        # Of a day that is half replaced, other messages than those that are new may be gone, or there twice.
        fresh[table] |= {(day, one) for day in unfinished.days for one in folder.batches(table, day)}
    ripe = tables.ripe(folder.read(spark, _PENDING, tables.PENDING_PARTS), now=now)
    again = {(row["day"], row["batch"]) for row in ripe.collect()} | unfinished.batches
    days = {day for some in (*fresh.values(), again) for day, _ in some}
    failed = {day for day, _ in fresh["failed"]}
    if days:
        _refresh_messages(spark, folder, fresh, again, now=now)
        if fresh["delivered"]:
            _refresh_lateness(spark, folder, fresh["delivered"])
        if failed:
            parts = tables.failures_parts(folder.read(spark, "failed", facts.SCHEMAS["failed"], failed))
            folder.write(parts.repartition("day"), _FAILURES)
    if days or not folder.has("pending"):
        pending = tables.pending(folder.read(spark, _PENDING, tables.PENDING_PARTS))
        folder.write_whole(pending, "pending", "due_hour", "target")
    if failed or not folder.has("failures"):
        failures = tables.failures(folder.read(spark, _FAILURES, tables.FAILURES_PARTS))
        folder.write_whole(failures, "failures", F.desc("recent"), F.desc("count"), "group")
    folder.finish_work()
    return days


def compact(spark: SparkSession, folder: Folder, days: Collection[date]) -> None:
    """Put facts of days that came in many small batches together.

    To be called when nothing is written to them, and no notes tell of them.
    """
    for table, schema in _GROWING.items():
        for day in days:
            batches = folder.batches(table, day, under=SMALL_BYTES)
            if len(batches) > MOST_BATCHES:
                rows = folder.read_batches(spark, table, schema, {(day, one) for one in batches})
                folder.merge(rows.drop(tables.BATCH), table, day, batches)


def _refresh_messages(
    spark: SparkSession, folder: Folder, fresh: Mapping[str, set[Batch]], again: set[Batch], *, now: datetime
) -> None:
    """Bring the table of messages up to date, and the counts of what waits.

    Args:
        again: batches of messages that have to be looked at for another reason.
    """
    days = {day for some in fresh.values() for day, _ in some}
    new = {table: folder.read_batches(spark, table, facts.SCHEMAS[table], fresh.get(table, ())) for table in FACTS}
    rows = reduce(lambda some, more: some.union(more), (one.select(*tables.KEY) for one in new.values()))
    known = rows.where(F.col("message_id").isNotNull()).distinct().persist()
    try:
        ids = F.broadcast(known) if known.count() <= BROADCAST_IDS else known
        found = _holding(spark, folder, fresh, days, ids)
        old = {
            table: folder.read_batches(spark, table, facts.SCHEMAS[table], found[table]).join(
                ids, list(tables.KEY), "left_semi"
            )
            for table in FACTS
            if found[table]
        }
        whole = (new[table].unionByName(old[table]) if table in old else new[table] for table in FACTS)
        number = 1 + max((one for day in days for one in folder.batches(_MESSAGES, day)), default=-1)
        made = tables.messages(*whole, now=now).withColumn(tables.BATCH, F.lit(number).cast("long"))

        joined = _to_join(folder, days)
        replaced = found[_MESSAGES] | again | joined
        kept = folder.read_batches(spark, _MESSAGES, tables.MESSAGES, replaced).join(ids, list(tables.KEY), "left_anti")
        if joined:
            batch = F.when(_is_one_of(joined), F.lit(number)).otherwise(F.col(tables.BATCH))
            kept = kept.withColumn(tables.BATCH, batch.cast("long"))
        touched = replaced | {(day, number) for day in days}
        folder.begin_work(touched)
        together = made.unionByName(tables.aged(kept, now=now))
        folder.replace(together.hint("rebalance", "day", tables.BATCH), _MESSAGES, replaced)
    finally:
        known.unpersist()
    parts = tables.pending_parts(folder.read_batches(spark, _MESSAGES, tables.MESSAGES, touched), now=now)
    folder.replace(parts.repartition("day", tables.BATCH), _PENDING, touched)


def _holding(
    spark: SparkSession, folder: Folder, fresh: Mapping[str, set[Batch]], days: Collection[date], ids: DataFrame
) -> defaultdict[str, set[Batch]]:
    """Earlier batches that have any of these messages, by table."""
    looked_at = []
    for table in (*FACTS, _MESSAGES):
        old = {(day, one) for day in days for one in folder.batches(table, day)} - fresh.get(table, set())
        if old:
            rows = folder.read_batches(spark, table, facts.schema_of("message_id string, day date"), old)
            looked_at.append(rows.withColumn("table", F.lit(table)))
    found: defaultdict[str, set[Batch]] = defaultdict(set)
    if looked_at:
        rows = reduce(lambda some, more: some.union(more), looked_at).join(ids, list(tables.KEY), "left_semi")
        for row in rows.select("table", "day", tables.BATCH).distinct().collect():
            found[row["table"]].add((row["day"], row["batch"]))
    return found


def _to_join(folder: Folder, days: Collection[date]) -> set[Batch]:
    """Batches of messages that become part of the new one, because their day has so many small ones."""
    found: set[Batch] = set()
    for day in days:
        batches = folder.batches(_MESSAGES, day, under=SMALL_BYTES)
        if len(batches) > MOST_BATCHES:
            found |= {(day, one) for one in batches}
    return found


def _is_one_of(batches: Collection[Batch]) -> Column:
    by_day: defaultdict[date, list[int]] = defaultdict(list)
    for day, number in sorted(batches):
        by_day[day].append(number)
    each = ((F.col("day") == F.lit(day)) & F.col(tables.BATCH).isin(numbers) for day, numbers in by_day.items())
    return reduce(lambda some, more: some | more, each)


def _refresh_lateness(spark: SparkSession, folder: Folder, fresh: set[Batch]) -> None:
    """Work out anew those minutes in which messages were due that new facts tell of."""
    schema, days = facts.SCHEMAS["delivered"], {day for day, _ in fresh}
    delivered = folder.read_batches(spark, "delivered", schema, fresh)
    minutes = tables.released(delivered).select(*_OF_MINUTE).distinct().persist()
    try:
        span = minutes.agg(*(F.unix_micros(one("minute")) for one in (F.min, F.max))).collect()[0]
        old = {(day, one) for day in days for one in folder.batches("delivered", day)} - fresh
        if old and span[0] is not None:
            # What was released together was written together: most files have no row of that time.
            first, end = (F.timestamp_micros(F.lit(one)) for one in (span[0], span[1] + 60_000_000))
            rows = folder.read_batches(spark, "delivered", schema, old)
            rows = tables.released(rows.where((F.col("due") >= first) & (F.col("due") < end)))
            delivered = delivered.unionByName(_of_minutes(rows, minutes, "left_semi").drop("minute"))
        kept = _of_minutes(folder.read(spark, "lateness", tables.LATENESS, days), minutes, "left_anti")
        folder.write(tables.lateness(delivered).unionByName(kept).repartition("day"), "lateness")
    finally:
        minutes.unpersist()


def _of_minutes(rows: DataFrame, minutes: DataFrame, how: str) -> DataFrame:
    """Those rows that are of these minutes and targets, or those that are not."""
    named = minutes.select(*(F.col(name).alias(f"that_{name}") for name in _OF_MINUTE))
    # A target may be null.
    same = (F.col(name).eqNullSafe(F.col(f"that_{name}")) for name in _OF_MINUTE)
    return rows.join(named, reduce(lambda some, more: some & more, same), how)
