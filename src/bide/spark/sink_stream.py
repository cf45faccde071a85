"""The writer of streams by record batches, which Spark has from 4.1 on."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from bide.spark.sink import Sent, Sink


class StreamWriter(Sink, DataSourceStreamArrowWriter):
    """Writes a stream."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of one task."""
        return self.send(iterator)
