"""The writer of streams by record batches, which Spark has from 4.1 on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from bide.spark.sink import Sent, Sink


class StreamWriter(Sink, DataSourceStreamArrowWriter):
    """Writes a stream."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of one task."""
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """All tasks of a micro-batch are done."""
        self._say_overdue(messages)
