"""Round of an audit: new messages become facts, and the computed tables are refreshed.

A round (:func:`run`) reads the streams of each source from the positions in the folder, and appends the facts
(:mod:`bide.pipelines.audit.fact_rows`). Then the round reads the schedule log, and computes the other tables
(:mod:`bide.pipelines.audit.queries`) again. An engine appends and computes: this process
(:mod:`bide.pipelines.audit.small`), or Spark (:mod:`bide.pipelines.audit.with_spark`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Final, Protocol

from bide.errors import InvalidInputError
from bide.pipelines.audit import merging
from bide.pipelines.audit.columns import FACT_COLUMNS, TABLES_BY_SOURCE, UNDECODABLE
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.occurrence_files import OCCURRENCES_TABLE
from bide.pipelines.audit.positions import (
    PositionFile,
    Positions,
    find_new_messages,
    import_checkpoints,
    remove_checkpoints,
)
from bide.pipelines.audit.reading import FactReader
from bide.pipelines.audit.schedule_log import PendingSchedules, read_schedule_log
from bide.pipelines.audit.table_format import PREVIOUS_VERSION
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH_ROWS: Final = 1_000_000
"""The largest number of messages in a batch. After a crash, at most one batch is read again."""


class AuditEngine(Protocol):
    """An engine that appends facts to the tables of a folder, and computes the other tables."""

    def append(self, reader: FactReader, ranges: Sequence[OffsetRange], batch: int) -> tuple[dict[str, int], set[date]]:
        """Append the facts of a batch. Returns the number of rows by table, and their days."""
        ...

    def refresh(self, notes: Collection[Note], *, now: datetime) -> set[date]:
        """Compute the tables again after new facts. Returns the days that were written."""
        ...

    def compact(self, days: Collection[date]) -> None:
        """Merge the small batches of facts of these days."""
        ...

    def pending(self) -> tuple[int, int]:
        """The number of pending messages, and how many of them are overdue."""
        ...


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
        batch_rows: the largest number of messages in a batch.
        allow_gaps: whether to continue when the retention of a stream has removed messages before they were read, when
            a stream of an earlier round was deleted or declared again, or when it is not named any more.
        time_zone: the time zone of Celery's due times without an offset.
    """

    url: str = field(repr=False)
    scheduled: Mapping[str, str] = field(default_factory=dict)
    delivered: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[str] = ()
    schedules: Sequence[str] = ()
    port: int | None = None
    batch_rows: int = BATCH_ROWS
    allow_gaps: bool = False
    time_zone: str = "UTC"

    def streams_of(self, source: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """The streams of a source, and their layouts.

        Args:
            source: one of :data:`bide.pipelines.audit.columns.TABLES_BY_SOURCE`.
        """
        if source == "events":
            return self.events, {}
        layouts = self.scheduled if source == "scheduled" else self.delivered
        return tuple(layouts), layouts

    @property
    def address(self) -> Address:
        """The address of the broker's streams."""
        return Address.of(self.url, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The result of a round.

    Attributes:
        rows: new facts by table, including those of an earlier round that was killed before it refreshed the tables.
        ended: occurrences of schedules that have newly ended, by outcome.
        schedules: schedules that have not ended; None without a schedule log.
        undecodable: messages that were written as raw bytes, because they are not AMQP 1.0.
        days: the number of days of messages that were computed again.
        pending: messages that are scheduled and not delivered, without those in the schedule log.
        overdue: the pending messages that were due more than :data:`bide.pipelines.audit.queries.DELIVERY_GRACE` ago.
        read_seconds: the time that it took to read the streams and to write facts.
        seconds: the time that the whole round took.
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


def run(spark: SparkSession | None, sources: Sources, folder: Folder, *, largest: int | None = None) -> RoundResult:
    """Run one round: read the messages that are in the streams now, and refresh all tables.

    A round locks the folder. To keep the lock between several rounds, hold :meth:`Folder.lock` around them.

    Args:
        spark: the session; None to run in this process, without Spark. Rounds with and without Spark can take turns.
        largest: the largest size in bytes of the files with earlier messages that a round in this process reads; None
            for any size.

    Raises:
        FolderInUseError: another audit uses the folder.
        NeedsSparkError: files with earlier messages are too large for this process. The new facts are in the folder;
            a round with Spark continues.
        PySparkException: a task failed, with the error of bide in its message; see
            :func:`bide.pipelines.session.spark_errors`.
        InvalidInputError: the folder contains other files, or the state of another release of bide, or tables in a
            format that Spark does not write or whose package is not installed.
        InvalidOptionError: a stream of an earlier round is not named any more, and gaps are not allowed.
        OffsetsLostError: messages were lost before the audit read them, and gaps are not allowed.
        ScheduleLogError: the beginning of the schedule log was removed, and the log has no complete snapshot.
        NewerRecordError: a later release of bide wrote to the schedule log.
        BrokerError: a stream cannot be read.
    """
    folder.begin()
    with folder.lock():
        return _run(_engine(spark, folder, largest), sources, folder)


def _engine(spark: SparkSession | None, folder: Folder, largest: int | None) -> AuditEngine:
    if spark is None:
        from bide.pipelines.audit.small import SmallAudit

        return SmallAudit(folder, largest=largest)
    if folder.table_format != "parquet":
        raise InvalidInputError(
            f"Spark writes Parquet tables only, and the audit in {folder.place} has tables of the format "
            f"{folder.table_format}: run it without Spark"
        )
    from bide.pipelines.audit.with_spark import SparkAudit

    return SparkAudit(spark, folder)


def _run(engine: AuditEngine, sources: Sources, folder: Folder) -> RoundResult:
    began = time.monotonic()
    # The time before the streams are read: a message that was due by then and delivered on time is in the streams.
    now = datetime.now(UTC)
    if folder.version == PREVIOUS_VERSION:
        import_checkpoints(folder)
        folder.write_version()
    remove_checkpoints(folder)
    merging.finish_replacing(folder)
    with StreamLogs(sources.address) as logs:
        for source in TABLES_BY_SOURCE:
            _append_facts(engine, sources, folder, source, logs)
    schedules = read_schedule_log(
        sources.address, tuple(sources.schedules), folder, now=now, allow_gaps=sources.allow_gaps
    )
    read = time.monotonic()
    notes = folder.notes()
    days = engine.refresh(notes, now=now)
    folder.delete_notes(notes)
    engine.compact({day for note in notes for day in note.days})
    rows = Counter(dict.fromkeys(FACT_COLUMNS, 0))
    for note in notes:
        rows.update(note.rows)
    pending, overdue = engine.pending()
    ended = time.monotonic()
    return RoundResult(
        undecodable=rows.pop(UNDECODABLE, 0),
        ended={name.partition("/")[2]: count for name, count in rows.items() if "/" in name},
        rows={name: rows[name] for name in FACT_COLUMNS if name != OCCURRENCES_TABLE},
        schedules=schedules,
        days=len(days),
        pending=pending,
        overdue=overdue,
        read_seconds=read - began,
        seconds=ended - began,
    )


def _append_facts(engine: AuditEngine, sources: Sources, folder: Folder, source: str, logs: StreamLogs) -> None:
    """Append the facts of the messages that the streams of a source have now."""
    file = PositionFile(folder, source)
    known = file.clear()
    streams, layouts = sources.streams_of(source)
    if not streams and not known.offsets:
        return
    new = find_new_messages(logs, streams, known.offsets, allow_gaps=sources.allow_gaps)
    reader = FactReader(
        address=sources.address,
        source=source,
        layouts=layouts,
        time_zone=sources.time_zone,
        allow_gaps=sources.allow_gaps,
    )
    position = Positions(batch=known.batch, offsets=new.begin)
    if position != known:
        # Streams are new or, with gaps allowed, left out or read from the beginning.
        file.write(position)
    for ranges, offsets in new.batches(sources.batch_rows):
        file.write(replace(position, is_begun=True))
        batch = position.batch + 1
        rows, days = engine.append(reader, ranges, batch)
        folder.add_note(Note(name=file.note_name(batch), rows=rows, days=tuple(sorted(days))))
        position = Positions(batch=batch, offsets=offsets)
        file.write(position)
