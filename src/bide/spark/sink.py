"""Sink of the data source: tables and streaming queries, published as messages.

Each task sends its rows with :func:`bide.spark.sending.send`, or, with the option ``producerName``, with
:func:`bide.spark.stream_sending.send_once`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from bide.errors import InvalidOptionError
from bide.runtime.logs import logger
from bide.spark.options import Options
from bide.spark.overdue import OVERDUE_GRACE
from bide.spark.rows import RowConverter
from bide.spark.sending import TaskResult, WriteTask, send
from bide.spark.sink_columns import PUBLISHING_ID, columns_to_send
from bide.spark.sink_settings import SinkSettings
from bide.spark.stream_sending import send_once

log = logger(__name__)

_QUERY_PROPERTIES: Final = ("sql.streaming.queryId", "streaming.sql.batchId")
"""Local properties of the tasks of a streaming query."""

_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCommitMessage(TaskResult, WriterCommitMessage):
    """The result of one task, as Spark passes it to the driver."""

    @classmethod
    def of(cls, sent: TaskResult) -> TaskCommitMessage:
        """Convert the result of :func:`bide.spark.sending.send` or :func:`bide.spark.stream_sending.send_once`."""
        return cls(**{one.name: getattr(sent, one.name) for one in fields(sent)})


def current_task(settings: SinkSettings, write_id: str) -> WriteTask:
    """The write and the partition of the current task.

    Spark passes two values to the tasks of a streaming query: the id of the query, which stays the same when the query
    is restarted, and the number of the micro-batch.

    Args:
        write_id: the id of the write, used if there is neither an id prefix nor a streaming query.
    """
    context = TaskContext.get()
    assert context is not None, "a write happens in a task"
    query, batch = (context.getLocalProperty(name) for name in _QUERY_PROPERTIES)
    prefix = settings.producer or settings.id_prefix
    if not query or batch is None:
        return WriteTask(run=prefix or write_id, partition=context.partitionId())
    # Two queries may have the same producerName, and their batches have different rows.
    run = query if prefix is None else prefix if settings.producer is None else f"{prefix}-{query}"
    return WriteTask(run=f"{run}-{batch}", partition=context.partitionId(), batch=f"{query}-{batch}")


class Sink:
    """Base of the writers for batches and for streaming queries, created on the driver and pickled for the tasks.

    Raises:
        InvalidOptionError: an option is unknown or invalid, or contradicts another option or a column.
        InvalidColumnError: a column is missing, unknown, or has the wrong type.
    """

    def __init__(
        self, options: Mapping[str, str], environment: Mapping[str, str], schema: StructType, *, overwrite: bool
    ) -> None:
        if overwrite:
            raise InvalidOptionError(
                "published messages cannot be overwritten: write with mode('append'), or in the output mode append or "
                "update"
            )
        is_keyed = any(name.lower() == "key" for name in schema.fieldNames())
        self._settings = SinkSettings.read(Options(options), environment, is_keyed=is_keyed)
        columns = columns_to_send(schema, self._settings.constants, producer=self._settings.producer)
        self._columns = tuple(name for name in columns if name != PUBLISHING_ID)
        self._schema = schema
        # The same for all tasks and all their attempts.
        self._write_id = uuid4().hex
        self._begun = datetime.now(UTC)

    def send(self, batches: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        """Send the rows of the current task.

        See :func:`bide.spark.sending.send` and :func:`bide.spark.stream_sending.send_once`.
        """
        settings = self._settings
        converter = RowConverter(
            self._columns, settings.constants, settings.infrastructure, bide_headers=settings.bide_headers
        )
        task = current_task(settings, self._write_id)
        if settings.producer is not None:
            return TaskCommitMessage.of(send_once(batches, converter, settings, task))
        # A repeated micro-batch has a new writer and a new write id, so its file is named after the batch. The file of
        # a table is named after the write id, because one foreachBatch may write several tables.
        batch = task.batch if isinstance(self, DataSourceStreamWriter) else None
        file = f"part-{task.partition:05}-{batch or self._write_id}"
        return TaskCommitMessage.of(send(batches, converter, settings, task, file=file, begun=self._begun))

    def _log_overdue(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Warn of overdue rows, and log what was done with them."""
        sent = [
            one
            for one in messages
            if isinstance(one, TaskCommitMessage) and one.first is not None and one.last is not None
        ]
        if sent:
            log.warning(
                "%d rows were due more than %d min before this write began, from %s to %s: past=%s",
                *(sum(one.overdue for one in sent), OVERDUE_GRACE // timedelta(minutes=1)),
                *(min(one.first for one in sent if one.first), max(one.last for one in sent if one.last)),
                self._settings.past,
            )


class TableWriter(Sink, DataSourceArrowWriter):
    """Publishes the rows of a table."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        """Send the rows of one task."""
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log overdue rows after all tasks."""
        self._log_overdue(messages)


class RowStreamWriter(Sink, DataSourceStreamWriter):
    """Publishes the micro-batches of a streaming query, from rows, for Spark 4.0."""

    def write(self, iterator: Iterator[Row]) -> TaskCommitMessage:
        """Send the rows of one task."""
        return self.send(batches_of(iterator, self._schema))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Log overdue rows after all tasks of a micro-batch."""
        self._log_overdue(messages)


def batches_of(rows: Iterator[Row], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Convert rows, as Spark passes them to a writer, to record batches."""
    # In PySpark 4.0, to_arrow_schema has no such parameter, and uses UTC.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    arrow_schema = to_arrow_schema(schema, **zone)
    while batch := list(islice(rows, _BATCH_ROWS)):
        columns = zip(*batch, strict=True)
        yield pa.record_batch(
            [
                pa.array([_plain(one) for one in column], field.type)
                for column, field in zip(columns, arrow_schema, strict=True)
            ],
            schema=arrow_schema,
        )


def _plain(value: Any) -> Any:
    """Convert a value of a row to a value that Arrow accepts."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, Row):
        return {name: _plain(one) for name, one in value.asDict().items()}
    if isinstance(value, datetime):
        # Rows have naive datetimes in the time zone of the worker.
        return value.astimezone(UTC)
    return [(name, _plain(one)) for name, one in value.items()] if isinstance(value, dict) else value
