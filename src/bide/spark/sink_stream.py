"""Stream writer that takes record batches, for Spark 4.1 and newer."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from bide.spark.sink import Sink, TaskCommitMessage


class StreamWriter(Sink, DataSourceStreamArrowWriter):
    """Publishes the micro-batches of a streaming query, from record batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        """Send the rows of one task."""
        return self.send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Log overdue rows after all tasks of a micro-batch."""
        self._log_overdue(messages)
