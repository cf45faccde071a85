"""The writing half of the data source: tables, and streams of them, as messages.

A task first checks all its rows and puts them aside, and publishes only when nothing is wrong with any: see
:class:`bide.spark.spool.Spool`. It is done when the broker has confirmed all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from bide.client.bulk.publish import KEPT_FAILURES
from bide.client.bulk.sync import BulkPublisher
from bide.client.publish_result import PublishSummary
from bide.errors import BulkPublishError, InvalidOptionError, InvalidRowError
from bide.runtime.logs import logger
from bide.spark.options import Options
from bide.spark.overdue import GRACE, STATUS, Overdue, Past
from bide.spark.rejects import Rejects
from bide.spark.rows import Rows
from bide.spark.sink_columns import columns_to_send
from bide.spark.sink_settings import SinkSettings
from bide.spark.spool import Spool

log = logger(__name__)

CHUNK: Final = 50_000
"""Messages after which a task waits until all are confirmed: it fails no later, and keeps no more rows in memory."""

CHUNK_BYTES: Final = 64 << 20
"""And bytes of them: rows may be large."""

NAMED: Final = 5
"""Offenders that an error names."""

PLACE: Final = "place in the partition"
"""The column that keeps it while rows are put aside. No column of a table is called so: they are checked."""

_OF_STREAM: Final = ("sql.streaming.queryId", "streaming.sql.batchId")
"""Properties of the tasks of a streaming query."""

_ALL: Final = 10_000_000
_ROWS_AT_ONCE: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlace:
    """Which part of which write a task is at, the same for every attempt at it.

    Attributes:
        run: what all parts have in common: the query and batch of a stream, or an id of the write.
        partition: the number of the part.
        batch: the query and batch of a stream, or None.
    """

    run: str
    partition: int
    batch: str | None = None

    @classmethod
    def of_task(cls, settings: SinkSettings, write_id: str) -> SinkPlace:
        """The place of the task that calls it.

        Spark passes to tasks of a streaming query its id, which outlives restarts, and the number of the micro-batch.

        Args:
            write_id: of this write, where the settings have no prefix and there is no streaming query.
        """
        context = TaskContext.get()
        assert context is not None, "a write happens in a task"
        query, batch = (context.getLocalProperty(name) for name in _OF_STREAM)
        if not query or batch is None:
            return cls(run=settings.id_prefix or write_id, partition=context.partitionId())
        return cls(
            run=f"{settings.id_prefix or query}-{batch}", partition=context.partitionId(), batch=f"{query}-{batch}"
        )

    def __str__(self) -> str:
        return f"{self.run}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(WriterCommitMessage):
    """The results of the rows of one task.

    Attributes:
        confirmed: how many the broker has.
        rejected: how many lie in the folder for rejects.
        dropped: how many were left out, because they were overdue.
        overdue: how many were overdue, whatever became of them.
        first: when the first of these was due, None where there is none.
        last: when the last of them was due.
    """

    confirmed: int
    rejected: int = 0
    dropped: int = 0
    overdue: int = 0
    first: datetime | None = None
    last: datetime | None = None


def send(
    batches: Iterator[pa.RecordBatch],
    rows: Rows,
    settings: SinkSettings,
    place: SinkPlace,
    *,
    file: str,
    begun: datetime,
) -> Sent:
    """Send the rows of one task.

    Args:
        file: the name of a file with its rejects: the same for every attempt at the task, and no other task's.
        begun: when the write began, which rows are overdue by.

    Raises:
        InvalidRowError: rows cannot be sent, or are overdue; nothing was published.
        BulkPublishError: the broker did not take some; it has the others.
        BrokerError: the broker cannot be reached, or refuses.
    """
    overdue = Overdue(begun)
    held = nullcontext() if settings.rejects is None else Rejects(settings.rejects, file)
    with held as rejects, Spool() as spool:
        _set_aside(batches, rows, spool, rejects, overdue, settings.past)
        confirmed = _publish(spool.batches(), rows, settings, place, rejects)
    return Sent(
        confirmed=confirmed,
        rejected=0 if rejects is None else rejects.count,
        dropped=overdue.count if settings.past == "drop" else 0,
        overdue=overdue.count,
        first=overdue.first,
        last=overdue.last,
    )


def _set_aside(
    batches: Iterator[pa.RecordBatch],
    rows: Rows,
    spool: Spool,
    rejects: Rejects | None,
    overdue: Overdue,
    past: Past | None,
) -> None:
    """Check all rows, and keep the good ones with their places in the partition."""
    first = 0
    for given in batches:
        batch = given.rename_columns([name.lower() for name in given.schema.names])
        problems = rows.problems(batch, datetime.now(UTC))
        placed = batch.append_column(PLACE, pa.array(range(first, first + len(batch)), pa.int64()))
        if problems and rejects is None:
            raise _cannot_be_sent(problems, first, first + len(batch) - 1)
        late = overdue.add(batch, problems) if "deliver_at" in rows.columns else []
        refused = {index: ("invalid", reason, None) for index, reason in problems.items()}
        if past == "reject":
            refused |= dict.fromkeys(late, (STATUS, "it was due before the write began", None))
        if refused and rejects is not None:
            rejects.add(batch, refused)
        if gone := {*refused, *(late if past == "drop" else ())}:
            placed = placed.filter(pa.array([index not in gone for index in range(len(batch))]))
        if len(placed):
            spool.put(placed)
        first += len(batch)
    if past is None:
        overdue.refuse("Give the option past: send (at once), drop, or reject (into the folder of the option rejects)")


def _publish(
    batches: Iterator[pa.RecordBatch], rows: Rows, settings: SinkSettings, place: SinkPlace, rejects: Rejects | None
) -> int:
    """Publish what was put aside, and say how many messages the broker has confirmed."""
    batch = next(batches, None)
    if batch is None:
        return 0
    chunk: list[tuple[int, pa.RecordBatch]] = []
    put = settled = kept = confirmed = 0
    with BulkPublisher(
        settings.url,
        infrastructure=settings.infrastructure,
        declare=settings.declare,
        timeout=settings.timeout,
        window=settings.window,
        keep=KEPT_FAILURES if rejects is None else _ALL,
    ) as publisher:
        while batch is not None:
            chunk.append((put, batch))
            for message in rows.messages(batch, batch.column(PLACE).to_pylist(), run=str(place)):
                publisher.put(message)
            put += len(batch)
            kept += batch.nbytes
            batch = next(batches, None)
            if batch is None or put - settled >= CHUNK or kept >= CHUNK_BYTES:
                confirmed += _settle(publisher, chunk, rejects)
                chunk, settled, kept = [], put, 0
    return confirmed


def _settle(publisher: BulkPublisher, chunk: list[tuple[int, pa.RecordBatch]], rejects: Rejects | None) -> int:
    """Wait until everything is confirmed, and say how much that is.

    Args:
        chunk: record batches since the last time, each with the position of its first message.

    Raises:
        BulkPublishError: some were not taken, and there is no place for them.
    """
    try:
        return publisher.flush().confirmed
    except BulkPublishError as error:
        report: PublishSummary = error.report
        if rejects is None:
            raise _not_taken(report, chunk) from error
        for first, batch in chunk:
            found = {
                one.position - first: (one.status, str(one.error), one.message_id)
                for one in report.failures
                if first <= one.position < first + len(batch)
            }
            if found:
                rejects.add(batch.drop_columns([PLACE]), found)
        return report.confirmed


def _cannot_be_sent(problems: Mapping[int, str], first: int, last: int) -> InvalidRowError:
    named = [f"row {first + index}: {problems[index]}" for index in sorted(problems)[:NAMED]]
    more = len(problems) - len(named)
    return InvalidRowError(
        f"of the rows {first} to {last} of this partition {len(problems)} cannot be sent, and nothing of it was: "
        f"{'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}; mend or filter them, or name a folder for them by the option rejects"
    )


def _not_taken(report: PublishSummary, chunk: list[tuple[int, pa.RecordBatch]]) -> BulkPublishError:
    named = []
    for one in report.failures[:NAMED]:
        first, batch = next((first, batch) for first, batch in reversed(chunk) if first <= one.position)
        row = batch.column(PLACE)[one.position - first].as_py()
        named.append(f"row {row}, message id {one.message_id}, {one.status}: {one.error}")
    failed = report.total - report.confirmed
    more = failed - len(named)
    return BulkPublishError(
        f"of the last {report.total} messages {failed} were not taken ({report}): {'; '.join(named)}"
        f"{f'; and {more} more' if more else ''}; all others are on the broker; to go on without such rows, name a "
        "folder for them by the option rejects",
        report=replace(report, failures=()),
    )


class Sink:
    """What the writers of tables and of streams have in common. Made on the driver, and sent to the tasks.

    Raises:
        InvalidOptionError: an option is unknown, cannot be read, or contradicts another or a column.
        InvalidColumnError: a column is missing, unknown, or of another type.
    """

    def __init__(
        self, options: Mapping[str, str], environment: Mapping[str, str], schema: StructType, *, overwrite: bool
    ) -> None:
        if overwrite:
            raise InvalidOptionError(
                "what was published cannot be overwritten: write with mode('append'), or in the output mode append or "
                "update"
            )
        self._settings = SinkSettings.read(Options(options), environment)
        self._columns = columns_to_send(schema, self._settings.constants)
        self._schema = schema
        # One for all tasks and all their attempts.
        self._write_id = uuid4().hex
        self._begun = datetime.now(UTC)

    def send(self, batches: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of the task that calls it; see :func:`send`."""
        settings = self._settings
        rows = Rows(self._columns, settings.constants, settings.infrastructure)
        place = SinkPlace.of_task(settings, self._write_id)
        # A stream makes its writer anew for a micro-batch that it repeats; and several tables may be written under one
        # id prefix, or in one foreachBatch.
        run = place.batch if isinstance(self, DataSourceStreamWriter) else None
        file = f"part-{place.partition:05}-{run or self._write_id}"
        return send(batches, rows, settings, place, file=file, begun=self._begun)

    def _say_overdue(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Warn of rows that were overdue, with what was done with them."""
        sent = [one for one in messages if isinstance(one, Sent) and one.first is not None and one.last is not None]
        if sent:
            log.warning(
                "%d rows were due more than %d min before this write began, from %s to %s: past=%s",
                *(sum(one.overdue for one in sent), GRACE // timedelta(minutes=1)),
                *(min(one.first for one in sent if one.first), max(one.last for one in sent if one.last)),
                self._settings.past,
            )


class TableWriter(Sink, DataSourceArrowWriter):
    """Writes a table."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of one task."""
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        self._say_overdue(messages)


class RowStreamWriter(Sink, DataSourceStreamWriter):
    """Writes a stream, on a Spark whose streams come in rows alone: 4.0."""

    def write(self, iterator: Iterator[Row]) -> Sent:
        """Send the rows of one task."""
        return self.send(batches_of(iterator, self._schema))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """All tasks of a micro-batch are done."""
        self._say_overdue(messages)


def batches_of(rows: Iterator[Row], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows as Spark hands them to a writer, as record batches."""
    # 4.0 has no such parameter, and means UTC.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    arrow_schema = to_arrow_schema(schema, **zone)
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = zip(*some, strict=True)
        yield pa.record_batch(
            [
                pa.array([_plain(one) for one in column], field.type)
                for column, field in zip(columns, arrow_schema, strict=True)
            ],
            schema=arrow_schema,
        )


def _plain(value: Any) -> Any:
    """A value of a row as Arrow takes it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, Row):
        return {name: _plain(one) for name, one in value.asDict().items()}
    if isinstance(value, datetime):
        # Rows have times of the worker's own zone, without saying so.
        return value.astimezone(UTC)
    return [(name, _plain(one)) for name, one in value.items()] if isinstance(value, dict) else value
