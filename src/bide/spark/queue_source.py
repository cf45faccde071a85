"""Reading a queue in a batch: a look at its messages, which stay where they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bide.client.sync import connect_sync
from bide.delay.protocol import HEADER_DUE, HEADER_SENT
from bide.error_queues.error_queue import ErrorQueue
from bide.recoverability.failed import FailedMessage
from bide.spark.batches import microseconds, text_of
from bide.spark.columns import QUEUE_COLUMNS, arrow_schema
from bide.spark.read_options import QueueOptions

_AT_ONCE: Final = 1000


def rows_of(queue: str, messages: Iterable[FailedMessage], schema: pa.Schema) -> pa.RecordBatch:
    """Messages of a queue as a record batch."""
    rows = [_row(queue, one) for one in messages]
    return pa.RecordBatch.from_arrays(
        [pa.array([row[field.name] for row in rows], type=field.type) for field in schema], schema=schema
    )


def _row(queue: str, message: FailedMessage) -> dict[str, Any]:
    headers = message.values.get("headers") or {}
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
        "correlation_id": text_of(message.values.get("correlation_id")),
        "content_type": text_of(message.values.get("content_type")),
        "due": microseconds(headers.get(HEADER_DUE)),
        "scheduled": microseconds(headers.get(HEADER_SENT)),
        "headers": [(str(name), text_of(value)) for name, value in headers.items()] or None,
        "type": message.message_type,
    }


class QueueReader(DataSourceReader):
    """Looks through a queue, in one task: the order of its messages is theirs."""

    def __init__(self, options: QueueOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema, QUEUE_COLUMNS)

    def partitions(self) -> Sequence[InputPartition]:
        """One."""
        return [InputPartition(self._options.queue)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages that are in the queue now. They go back to their places when all are read.

        Raises:
            DelayQueueError: the queue belongs to a delay infrastructure.
            TargetNotFoundError: there is no such queue.
            BrokerError: the broker cannot be reached, or refuses, or the queue is a stream.
        """
        queue = self._options.queue
        left = self._options.limit
        with connect_sync(self._options.url, declare=False) as client:
            messages = ErrorQueue(client.client, queue, audit=False).messages()
            try:
                while left is None or left > 0:
                    found = client.wait_for(some(messages, _AT_ONCE if left is None else min(left, _AT_ONCE)))
                    if not found:
                        return
                    if left is not None:
                        left -= len(found)
                    yield rows_of(queue, found, self._schema)
            finally:
                client.wait_for(messages.aclose())


async def some(messages: AsyncIterator[Any], most: int) -> list[Any]:
    """The next ones, up to *most*; none at the end."""
    found: list[Any] = []
    async for one in messages:
        found.append(one)
        if len(found) >= most:
            break
    return found
