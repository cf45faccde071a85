"""Taps and the events stream as Parquet tables, which grow with what is new.

A round (:func:`run`) reads each source from where the last one ended, with a streaming query whose checkpoint is the
only truth, and appends its facts (:mod:`bide.pipelines.audit.facts`). Then it works out what follows from them
(:mod:`bide.pipelines.audit.tables`), for the messages that they are about (:mod:`bide.pipelines.audit.refresh`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

import bide.spark
from bide.pipelines.audit import facts, tables
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.refresh import FACTS, UNDECODABLE, compact, refresh
from bide.pipelines.session import NO_WORKER, parallelism
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logger(__name__)

BATCH_ROWS: Final = 1_000_000
"""Messages of a batch, at most: what is read again after a kill."""

_ATTEMPTS: Final = 3
"""At a query for whose Python Spark did not wait: it goes on from its checkpoint, as after a kill."""

_Split = Callable[["DataFrame"], "DataFrame"]
_Starter = Callable[[], "StreamingQuery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What an audit reads.

    Attributes:
        url: the broker's, with the password.
        scheduled: the taps' streams with what was scheduled, each with its layout.
        delivered: the same for what was delivered.
        events: the events streams.
        port: of the stream protocol, None for the usual one.
        batch_rows: messages of a batch at most. PySpark before 4.2 reads all at once.
        allow_gaps: go on where messages were dropped by a stream's retention before they were read, or where a stream
            that was read is not there, or not named, any more.
    """

    url: str = field(repr=False)
    scheduled: Mapping[str, str] = field(default_factory=dict)
    delivered: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[str] = ()
    port: int | None = None
    batch_rows: int = BATCH_ROWS
    allow_gaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round did.

    Attributes:
        rows: facts that were written, by table; with those of a run before that was killed before it could use them.
        undecodable: messages that were written as their bytes, because they are not AMQP 1.0.
        days: of how many days messages were worked out anew.
        pending: messages that are scheduled and not delivered.
        overdue: those of them whose due time is over.
        read_seconds: for reading and writing facts.
        seconds: in all.
    """

    rows: Mapping[str, int]
    undecodable: int
    days: int
    pending: int
    overdue: int
    read_seconds: float
    seconds: float


def run(spark: SparkSession, sources: Sources, folder: Folder) -> Round:
    """One round: read what is there now, and bring all tables up to date.

    No other may run in the folder meanwhile. Who runs many holds :meth:`Folder.lock` around them.

    Raises:
        FolderInUseError: another does.
        BrokerError: and other errors of bide, as PySparkException with their text; see
            :func:`bide.pipelines.session.spark_errors`.
        InvalidInputError: the folder has something else in it.
    """
    folder.begin()
    with folder.lock():
        return _run(spark, sources, folder)


def _run(spark: SparkSession, sources: Sources, folder: Folder) -> Round:
    began = time.monotonic()
    # Whatever is due before this moment, and delivered in time, is in the streams when they are read.
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
        # One of which no stream is left is asked too: its checkpoint knows what was read, and that it is missing.
        if streams or folder.has_positions(name)
    ]
    for attempt in range(1, _ATTEMPTS + 1):
        starts = _finish(starts, is_last=attempt == _ATTEMPTS)
        if not starts:
            break
    read = time.monotonic()
    notes = folder.notes()
    days = refresh(spark, folder, notes, now=now)
    folder.strike_out(notes)
    compact(spark, folder, {day for note in notes for day in note.days})
    rows = Counter(dict.fromkeys(FACTS, 0))
    for note in notes:
        rows.update(note.rows)
    waiting = folder.read(spark, "pending", tables.PENDING).agg(F.sum("count"), F.sum("overdue")).collect()[0]
    ended = time.monotonic()
    return Round(
        undecodable=rows.pop(UNDECODABLE, 0),
        rows=dict(rows),
        days=len(days),
        pending=waiting[0] or 0,
        overdue=waiting[1] or 0,
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
    """A query that appends the facts of a source, and ends when it has read what is there.

    Args:
        make: all facts of a batch of messages.
        tables_of: which of them each table has.
    """
    import json

    from bide.spark.source import LIMITS

    options: dict[str, Any] = {
        "url": sources.url,
        "stream": json.dumps(sorted(streams)),
        "startingOffsets": "earliest",
        "includeHeaders": name != "events",
        "failOnDataLoss": not sources.allow_gaps,
        # One message of a stranger must not end the reading of all others.
        "undecodable": "raw",
        # A stream would be one task.
        "minPartitions": parallelism(spark),
    }
    if sources.port is not None:
        options["streamPort"] = sources.port
    if LIMITS:
        options["maxOffsetsPerTrigger"] = sources.batch_rows

    def append(batch: DataFrame, number: int) -> None:
        rows: dict[str, int] = {}
        days: set[date] = set()
        # Made once: reading the streams again takes the longest of all.
        kept = make(facts.marked(batch)).persist()

        def write(found: DataFrame, table: str, *, always: bool) -> int:
            told = found.agg(F.count(F.lit(1)).alias("rows"), F.collect_set("day").alias("days")).collect()[0]
            if told["rows"] or always:
                folder.append(found, table, number)
            days.update(told["days"])
            return int(told["rows"])

        try:
            for table, split in tables_of.items():
                rows[table] = write(split(kept), table, always=True)
            if odd := write(facts.undecodable(kept), f"{UNDECODABLE}/source={name}", always=False):
                rows[UNDECODABLE] = odd
        finally:
            kept.unpersist()
        folder.note(Note(name=f"{name}-{number}", rows=rows, days=tuple(sorted(days))))

    read = spark.readStream.format("rabbitmq").options(**options).load()
    return (
        read.writeStream.foreachBatch(append)
        .option("checkpointLocation", folder.location("_checkpoint", name))
        .queryName(f"bide audit {name}")
        .trigger(availableNow=True)
        .start()
    )


def _finish(starts: Sequence[_Starter], *, is_last: bool) -> list[_Starter]:
    """Start queries and wait for all, also when one fails: none may go on writing behind the caller's back.

    Args:
        is_last: whether those whose Python was too slow to start have failed, too.

    Returns:
        Those that are to be started again.
    """

    def may_come_again(error: Exception) -> bool:
        return not is_last and NO_WORKER in str(error)

    failures: list[Exception] = []
    again: list[_Starter] = []
    queries: list[tuple[_Starter, StreamingQuery]] = []
    try:
        for start in starts:
            try:
                queries.append((start, start()))
            except Exception as error:
                # On Spark Connect the Python of a foreachBatch is there before the query is.
                if not may_come_again(error):
                    raise
                again.append(start)
        for start, query in queries:
            try:
                query.awaitTermination()
            except Exception as error:  # noqa: BLE001 (raised, or told, below)
                if may_come_again(error):
                    again.append(start)
                else:
                    failures.append(error)
    finally:
        for _, query in queries:
            query.stop()
    if failures:
        first, *others = failures
        for one in others:
            first.add_note(f"another query failed, too: {one}")
            log.warning("another query failed, too: %s", one)
        raise first
    if again:
        log.info("Spark did not wait for the Python of %d queries: they are started again", len(again))
    return again
