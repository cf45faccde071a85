"""Batch reader of a queue, which leaves the messages in the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bide.client.sync import connect_sync
from bide.delay.protocol import HEADER_DUE, HEADER_SENT
from bide.durations import to_microseconds
from bide.error_queues.error_queue import ErrorQueue
from bide.recoverability.failed import FailedMessage
from bide.spark.columns import QUEUE_COLUMNS, arrow_schema
from bide.spark.read_options import QueueOptions
from bide.spark.stream_rows import PERSISTENT, expiration_of, microseconds, text_of
from bide.spark.typed_headers import headers_to_json

_BATCH_ROWS: Final = 1000


def rows_of(queue: str, messages: Iterable[FailedMessage], schema: pa.Schema) -> pa.RecordBatch:
    """Messages of a queue as a record batch."""
    rows = [_row(queue, one) for one in messages]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[field.name] for row in rows], type=field.type) for field in schema], schema=schema
    )


def _row(queue: str, message: FailedMessage) -> dict[str, Any]:
    values = message.values
    headers = values.get("headers") or {}
    mode, created = values.get("delivery_mode"), values.get("timestamp")
    return {
        "value": message.body,
        "queue": queue,
        "id": message.id,
        "reason": message.reason,
        "failed_queue": message.queue,
        "failed_at": message.failed_at,
        "exception": message.exception,
        "error": message.text,
        "group": message.group,
        "endpoint": message.endpoint,
        "attempts": message.history.attempts,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "message_id": message.message_id,
        "correlation_id": text_of(values.get("correlation_id")),
        "content_type": text_of(values.get("content_type")),
        "due": microseconds(headers.get(HEADER_DUE)),
        "scheduled": microseconds(headers.get(HEADER_SENT)),
        "headers": [(str(name), text_of(value)) for name, value in headers.items()] or None,
        "headers_json": headers_to_json(headers) if headers else None,
        "type": message.message_type,
        **{name: values.get(name) for name in ("content_encoding", "reply_to", "app_id", "user_id", "priority")},
        "expiration": expiration_of(values.get("expiration")),
        "persistent": None if mode is None else mode == PERSISTENT,
        "creation_time": None if not isinstance(created, datetime) else to_microseconds(created),
    }


class QueueReader(DataSourceReader):
    """Reads a queue without consuming it, in a single task to keep the order of its messages."""

    def __init__(self, options: QueueOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema, QUEUE_COLUMNS)

    def partitions(self) -> Sequence[InputPartition]:
        """A single partition, the queue."""
        return [InputPartition(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages that are in the queue now. They are requeued after all have been read.

        Raises:
            DelayQueueError: the queue belongs to a delay infrastructure.
            TargetNotFoundError: the queue does not exist.
            BrokerError: the broker cannot be reached, or refuses, or the queue is a stream.
        """
        queue = self._options.queue
        remaining = self._options.limit
        with connect_sync(self._options.url, declare=False) as client:
            messages = ErrorQueue(client.client, queue, audit=False).messages()
            try:
                while remaining is None or remaining > 0:
                    found = client.wait_for(
                        take(messages, _BATCH_ROWS if remaining is None else min(remaining, _BATCH_ROWS))
                    )
                    if not found:
                        return
                    if remaining is not None:
                        remaining -= len(found)
                    yield rows_of(queue, found, self._schema)
            finally:
                client.wait_for(messages.aclose())


async def take(messages: AsyncIterator[Any], most: int) -> list[Any]:
    """Take up to *most* items of an iterator; returns an empty list at its end."""
    found: list[Any] = []
    async for one in messages:
        found.append(one)
        if len(found) >= most:
            break
    return found
