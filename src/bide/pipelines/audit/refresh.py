"""Incremental refresh of the tables that are computed from facts.

A round computes only messages with new facts again, from all facts of these messages. Rows of Parquet files cannot be
replaced. Therefore the round writes these messages as a new batch, and rewrites the earlier batches that have any of
them, to leave them out. The facts of a message usually arrive within a short time, so these batches are few and recent.

An index finds these batches (:mod:`bide.pipelines.audit.id_index`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import date, datetime
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.pipelines.audit import facts, merging, tables
from bide.pipelines.audit.columns import APPENDED_TABLES, FACT_COLUMNS, FAILURES_STATE, PENDING_STATE
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.id_index import IdIndex, union_of_digests
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.round_work import RoundWork
from bide.pipelines.audit.table_files import files_of_day, sizes_of_batches
from bide.pipelines.audit.unfinished_work import BatchKey
from bide.pipelines.memory_database import memory_database

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_BROADCAST_IDS: Final = 300_000
"""The largest number of message ids that are broadcast to all tasks. A join with more ids sorts both sides."""

_MESSAGES: Final = "messages"
_MINUTE_KEY: Final = ("minute", "target", "day")


def refresh(spark: SparkSession, folder: Folder, notes: Iterable[Note], *, now: datetime) -> set[date]:
    """Compute the tables again for messages with new facts, and for messages that have become overdue.

    After an interruption, a refresh with the same notes has the same result: days that the interrupted refresh changed
    are computed again as a whole.

    Args:
        notes: the notes of batches whose facts are new.
        now: the time until which the streams were read.

    Returns:
        The days that were written.
    """
    overdue = tables.newly_overdue(folder.read(spark, PENDING_STATE, tables.PENDING_PARTS_SCHEMA), now=now)
    work = RoundWork.of(
        folder,
        notes,
        overdue=[(row["day"], row["batch"]) for row in overdue.collect()],
        batches=lambda table, day: sizes_of_batches(files_of_day(folder, table, day)),
    )
    days, failed = work.days, work.days_with_failures
    if days:
        _refresh_messages(spark, folder, work, now=now)
        if work.fresh["delivered"]:
            _refresh_lateness(spark, folder, work.fresh["delivered"])
        if failed:
            parts = tables.failures_parts(folder.read(spark, "failed", facts.SCHEMAS["failed"], failed))
            folder.write(parts.repartition("day"), FAILURES_STATE)
    if days or not folder.has("pending"):
        pending = tables.pending(folder.read(spark, PENDING_STATE, tables.PENDING_PARTS_SCHEMA))
        folder.write_whole(pending, "pending", "due_hour", "target")
    if failed or not folder.has("failures"):
        failures = tables.failures(folder.read(spark, FAILURES_STATE, tables.FAILURES_PARTS_SCHEMA))
        folder.write_whole(failures, "failures", F.desc("recent"), F.desc("count"), "group")
    folder.finish_work()
    return days


def compact(spark: SparkSession, folder: Folder, days: Collection[date]) -> None:
    """Merge the small batches of facts of these days."""
    for table, day, batches in merging.facts_to_merge(folder, days):
        rows = folder.read_batches(
            spark, table, facts.schema_of(APPENDED_TABLES[table]), {(day, one) for one in batches}
        )
        folder.write(rows.coalesce(1).drop("day", BATCH), merging.MERGED_FOLDER, by=())
        merging.replace_batches(folder, table, day, batches)


def _refresh_messages(spark: SparkSession, folder: Folder, work: RoundWork, *, now: datetime) -> None:
    """Refresh the table of messages, and the counts of pending messages."""
    fresh, days = work.fresh, work.days_with_facts
    new = {table: folder.read_batches(spark, table, facts.SCHEMAS[table], fresh[table]) for table in FACT_COLUMNS}
    rows = reduce(lambda some, more: some.union(more), (one.select(*tables.MESSAGE_KEY) for one in new.values()))
    known = rows.where(F.col("message_id").isNotNull()).distinct().persist()
    try:
        ids = F.broadcast(known) if known.count() <= MAX_BROADCAST_IDS else known
        found = _batches_with(folder, work)
        old = {
            table: folder.read_batches(spark, table, facts.SCHEMAS[table], found[table]).join(
                ids, list(tables.MESSAGE_KEY), "left_semi"
            )
            for table in FACT_COLUMNS
            if found[table]
        }
        whole = (new[table].unionByName(old[table]) if table in old else new[table] for table in FACT_COLUMNS)
        sizes = {day: sizes_of_batches(files_of_day(folder, _MESSAGES, day)) for day in days}
        number = 1 + max((one for some in sizes.values() for one in some), default=-1)
        computed = tables.messages(*whole, now=now).withColumn(BATCH, F.lit(number).cast("long"))

        merged = {(day, one) for day, some in sizes.items() for one in merging.to_merge(some)}
        replaced = found[_MESSAGES] | work.to_rewrite | merged
        unchanged = folder.read_batches(spark, _MESSAGES, tables.MESSAGES_SCHEMA, replaced).join(
            ids, list(tables.MESSAGE_KEY), "left_anti"
        )
        if merged:
            batch = F.when(_is_in_batches(merged), F.lit(number)).otherwise(F.col(BATCH))
            unchanged = unchanged.withColumn(BATCH, batch.cast("long"))
        touched = replaced | {(day, number) for day in days}
        folder.begin_work(touched)
        together = computed.unionByName(tables.mark_overdue(unchanged, now=now))
        folder.replace(together.hint("rebalance", "day", BATCH), _MESSAGES, replaced)
    finally:
        known.unpersist()
    parts = tables.pending_parts(folder.read_batches(spark, _MESSAGES, tables.MESSAGES_SCHEMA, touched), now=now)
    folder.replace(parts.repartition("day", BATCH), PENDING_STATE, touched)


def _batches_with(folder: Folder, work: RoundWork) -> defaultdict[str, set[BatchKey]]:
    """The earlier batches of facts and of messages that have any of the messages with new facts, by table."""
    found: defaultdict[str, set[BatchKey]] = defaultdict(set)
    with memory_database() as database:
        index = IdIndex(folder, database)
        for day in sorted(work.days_with_facts):
            files = {table: files_of_day(folder, table, day) for table in (*FACT_COLUMNS, _MESSAGES)}
            new = {
                table: [one for one in some if (day, one.first) in work.fresh.get(table, ())]
                for table, some in files.items()
            }
            wanted = union_of_digests(index.digests_of_files(table, some) for table, some in new.items())
            for table, some in files.items():
                index.prune(table, day, some)
                others = index.files_with(wanted, table, set(some).difference(new[table]))
                found[table] |= {(day, one.first) for one in others}
    return found


def _is_in_batches(batches: Collection[BatchKey]) -> Column:
    by_day: defaultdict[date, list[int]] = defaultdict(list)
    for day, number in sorted(batches):
        by_day[day].append(number)
    each = ((F.col("day") == F.lit(day)) & F.col(BATCH).isin(numbers) for day, numbers in by_day.items())
    return reduce(lambda some, more: some | more, each)


def _refresh_lateness(spark: SparkSession, folder: Folder, fresh: set[BatchKey]) -> None:
    """Refresh the table of lateness, for the minutes in which newly delivered messages were due."""
    schema, days = facts.SCHEMAS["delivered"], {day for day, _ in fresh}
    delivered = folder.read_batches(spark, "delivered", schema, fresh)
    minutes = tables.with_due_minute(delivered).select(*_MINUTE_KEY).distinct().persist()
    try:
        span = minutes.agg(*(F.unix_micros(one("minute")) for one in (F.min, F.max))).collect()[0]
        old = {(day, one.first) for day in days for one in files_of_day(folder, "delivered", day)} - fresh
        if old and span[0] is not None:
            # This filter lets Spark skip most files, because messages of the same time are in the same files.
            first, end = (F.timestamp_micros(F.lit(one)) for one in (span[0], span[1] + 60_000_000))
            rows = folder.read_batches(spark, "delivered", schema, old)
            rows = tables.with_due_minute(rows.where((F.col("due") >= first) & (F.col("due") < end)))
            delivered = delivered.unionByName(_join_minutes(rows, minutes, "left_semi").drop("minute"))
        unchanged = _join_minutes(folder.read(spark, "lateness", tables.LATENESS_SCHEMA, days), minutes, "left_anti")
        folder.write(tables.lateness(delivered).unionByName(unchanged).repartition("day"), "lateness")
    finally:
        minutes.unpersist()


def _join_minutes(rows: DataFrame, minutes: DataFrame, how: str) -> DataFrame:
    """The rows of these minutes, targets and days (``left_semi``), or all other rows (``left_anti``)."""
    renamed = minutes.select(*(F.col(name).alias(f"that_{name}") for name in _MINUTE_KEY))
    # eqNullSafe, because a target may be null.
    same = (F.col(name).eqNullSafe(F.col(f"that_{name}")) for name in _MINUTE_KEY)
    return rows.join(renamed, reduce(lambda some, more: some & more, same), how)
