"""Run of an audit: taps and the events stream are appended to Parquet tables.

A round (:func:`run`) reads each source from the position in its checkpoint, with a streaming query, and appends the
facts (:mod:`bide.pipelines.audit.facts`). Then it computes the other tables (:mod:`bide.pipelines.audit.tables`) again
for the messages with new facts (:mod:`bide.pipelines.audit.refresh`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

import bide.spark
from bide.pipelines.audit import facts, tables
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.occurrence_files import TABLE as OCCURRENCES
from bide.pipelines.audit.refresh import FACTS, UNDECODABLE, compact, refresh
from bide.pipelines.audit.schedule_log import PendingSchedules, read_schedule_log
from bide.pipelines.session import NO_WORKER, error_of_query, parallelism
from bide.runtime.logs import logger
from bide.spark.source import LIMITS
from bide.streams.log import Address

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logger(__name__)

BATCH_ROWS: Final = 1_000_000
"""The largest number of messages in a batch. After a crash, at most one batch per source is read again."""

_ATTEMPTS: Final = 3
"""Attempts to start a query that fails for a moment. A query continues from its checkpoint."""

_TEMPORARY: Final = (NO_WORKER, "java.util.ConcurrentModificationException")
"""Errors after which another attempt may succeed: a Python process started too slowly for Spark, or Spark 4.2 started a
query while another one was running, where it has a race."""

_Split = Callable[["DataFrame"], "DataFrame"]
_Starter = Callable[[], "StreamingQuery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of an audit.

    Attributes:
        url: the URL of the broker, with the password.
        scheduled: the streams of taps with scheduled messages, each with its layout.
        delivered: the streams of taps with delivered messages, each with its layout.
        events: the events streams.
        schedules: the streams of the schedule log.
        port: the port of the stream protocol; None for the default.
        batch_rows: the largest number of messages in a batch. PySpark before 4.2 reads all messages in one batch.
        allow_gaps: continue when the retention of a stream has removed messages before they were read, or when a
            stream of an earlier round does not exist or is not named any more.
    """

    url: str = field(repr=False)
    scheduled: Mapping[str, str] = field(default_factory=dict)
    delivered: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[str] = ()
    schedules: Sequence[str] = ()
    port: int | None = None
    batch_rows: int = BATCH_ROWS
    allow_gaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of a round.

    Attributes:
        rows: new facts by table, including those of an earlier run that was killed before it refreshed the tables.
        ended: new occurrences of schedules by outcome.
        schedules: schedules that have not ended; None without a schedule log.
        undecodable: messages that were written as raw bytes, because they are not AMQP 1.0.
        days: the number of days whose messages were computed again.
        pending: messages that are scheduled and not delivered, without those in the schedule log.
        overdue: those of them whose due time is over.
        read_seconds: time to read and write facts.
        seconds: time of the whole round.
    """

    rows: Mapping[str, int]
    ended: Mapping[str, int]
    schedules: PendingSchedules | None
    undecodable: int
    days: int
    pending: int
    overdue: int
    read_seconds: float
    seconds: float


def run(spark: SparkSession, sources: Sources, folder: Folder) -> Round:
    """Run one round: read the messages that are in the streams now, and refresh all tables.

    A round locks the folder. To keep the lock between several rounds, hold :meth:`Folder.lock` around them.

    Raises:
        FolderInUseError: another audit uses the folder.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`.
        InvalidInputError: the folder contains other files, or the state of another release of bide.
        OffsetsLostError: the schedule log has lost records that were not read, and gaps are not allowed.
        ScheduleLogError: the beginning of the schedule log was removed, and it has no complete snapshot.
        BrokerError: the schedule log cannot be read.
    """
    folder.begin()
    with folder.lock():
        return _run(spark, sources, folder)


def _run(spark: SparkSession, sources: Sources, folder: Folder) -> Round:
    began = time.monotonic()
    # Taken before the streams are read: a message that was due by now and delivered on time is then in the streams.
    now = datetime.now(UTC)
    folder.finish_merges()
    bide.spark.register(spark)
    starts: list[_Starter] = [
        partial(_start, spark, sources, folder, name, streams, make, tables_of)
        for name, streams, make, tables_of in (
            (
                "scheduled",
                tuple(sources.scheduled),
                partial(facts.scheduled, layouts=sources.scheduled),
                {"scheduled": partial(facts.decoded, table="scheduled")},
            ),
            (
                "delivered",
                tuple(sources.delivered),
                partial(facts.delivered, layouts=sources.delivered),
                {"delivered": partial(facts.decoded, table="delivered")},
            ),
            ("events", tuple(sources.events), facts.events, {"processed": facts.processed, "failed": facts.failed}),
        )
        # A source without streams is queried if it has a checkpoint, so that the missing streams are reported.
        if streams or folder.has_positions(name)
    ]
    for attempt in range(1, _ATTEMPTS + 1):
        starts = _finish(starts, is_last=attempt == _ATTEMPTS)
        if not starts:
            break
    schedules = read_schedule_log(
        Address.of(sources.url, sources.port),
        tuple(sources.schedules),
        folder,
        now=now,
        allow_gaps=sources.allow_gaps,
    )
    read = time.monotonic()
    notes = folder.notes()
    days = refresh(spark, folder, notes, now=now)
    folder.delete_notes(notes)
    compact(spark, folder, {day for note in notes for day in note.days})
    rows = Counter(dict.fromkeys(FACTS, 0))
    for note in notes:
        rows.update(note.rows)
    counts = folder.read(spark, "pending", tables.PENDING).agg(F.sum("count"), F.sum("overdue")).collect()[0]
    ended = time.monotonic()
    return Round(
        undecodable=rows.pop(UNDECODABLE, 0),
        ended={name.partition("/")[2]: count for name, count in rows.items() if "/" in name},
        rows={name: rows[name] for name in FACTS if name != OCCURRENCES},
        schedules=schedules,
        days=len(days),
        pending=counts[0] or 0,
        overdue=counts[1] or 0,
        read_seconds=read - began,
        seconds=ended - began,
    )


def _start(
    spark: SparkSession,
    sources: Sources,
    folder: Folder,
    name: str,
    streams: Sequence[str],
    make: _Split,
    tables_of: Mapping[str, _Split],
) -> StreamingQuery:
    """Start a query that appends the facts of a source, and ends after the messages that exist now.

    Args:
        make: converts a batch of messages to facts.
        tables_of: table -> function that selects its rows from these facts.
    """
    options: dict[str, Any] = {
        "url": sources.url,
        "stream": json.dumps(sorted(streams)),
        "startingOffsets": "earliest",
        "includeHeaders": name != "events",
        "failOnDataLoss": not sources.allow_gaps,
        # One undecodable message must not end the audit of all others.
        "undecodable": "raw",
        # Otherwise each stream would be a single task.
        "minPartitions": parallelism(spark),
    }
    if sources.port is not None:
        options["streamPort"] = sources.port
    if LIMITS:
        options["maxOffsetsPerTrigger"] = sources.batch_rows

    def append(batch: DataFrame, number: int) -> None:
        rows: dict[str, int] = {}
        days: set[date] = set()
        # Cached, because several tables are written, and reading the streams takes longest.
        kept = make(facts.mark_undecodable(batch)).persist()

        def write(found: DataFrame, table: str, *, always: bool) -> int:
            summary = found.agg(F.count(F.lit(1)).alias("rows"), F.collect_set("day").alias("days")).collect()[0]
            if summary["rows"] or always:
                folder.append(found, table, number)
            days.update(summary["days"])
            return int(summary["rows"])

        try:
            for table, split in tables_of.items():
                rows[table] = write(split(kept), table, always=True)
            if undecodable := write(facts.undecodable(kept), f"{UNDECODABLE}/source={name}", always=False):
                rows[UNDECODABLE] = undecodable
        finally:
            kept.unpersist()
        folder.add_note(Note(name=f"{name}-{number}", rows=rows, days=tuple(sorted(days))))

    read = spark.readStream.format("rabbitmq").options(**options).load()
    return (
        read.writeStream.foreachBatch(append)
        .option("checkpointLocation", folder.location("_checkpoint", name))
        .queryName(f"bide audit {name}")
        .trigger(availableNow=True)
        .start()
    )


def _finish(starts: Sequence[_Starter], *, is_last: bool) -> list[_Starter]:
    """Start queries and wait for all of them. If one fails, the others end too, so that none writes after the error.

    Args:
        is_last: whether this is the last attempt, in which a temporary error is final too.

    Returns:
        The queries to start again.
    """

    def may_retry(error: Exception) -> bool:
        return not is_last and any(text in str(error) for text in _TEMPORARY)

    failures: list[Exception] = []
    again: list[_Starter] = []
    queries: list[tuple[_Starter, StreamingQuery]] = []
    try:
        for start in starts:
            try:
                queries.append((start, start()))
            except Exception as error:
                # Spark Connect starts the Python process of a foreachBatch before the query.
                if not may_retry(error):
                    raise
                again.append(start)
        for start, query in queries:
            try:
                query.awaitTermination()
            except Exception as error:  # noqa: BLE001 (raised or logged below)
                if may_retry(error):
                    again.append(start)
                else:
                    failures.append(error)
    finally:
        for _, query in queries:
            query.stop()
    if failures:
        first, *others = failures
        for one in others:
            first.add_note(f"another query failed too: {error_of_query(one)}")
        raise first
    if again:
        log.info("starting %d queries again that Spark could not start", len(again))
    return again
