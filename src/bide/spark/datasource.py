"""The data source ``rabbitmq``, as Spark's Python Data Source API has it.

Spark makes it anew in several processes, pickles it, and asks it for readers and writers more than once: it holds
the options and nothing else. Options are checked where a reader or writer is made, on the driver.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS, table_schema
from bide.spark.options import VARIABLES, Options


class RabbitMQDataSource(DataSource):
    """Streams and queues of RabbitMQ as tables. Options and columns: docs/spark-source.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # The driver's environment, taken along to the executors.
        self.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "rabbitmq"

    def schema(self) -> StructType:
        """The columns of a read. A schema of the user's may choose some of them."""
        given = Options(self.options)
        headers = given.flag("includeHeaders", default=False)
        if "queue" in given:
            return table_schema(QUEUE_COLUMNS, include_headers=headers)
        raw = given.choice("undecodable", "fail", "raw") == "raw"
        return table_schema(STREAM_COLUMNS, include_headers=headers, undecodable=raw)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        from bide.spark.queue_source import QueueReader
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsReader

        given = Options(self.options)
        if "queue" in given:
            return QueueReader(QueueOptions.read(given, self.environment, streaming=False), schema)
        return StreamsReader(ReadOptions.read(given, self.environment, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """A query's read."""
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsQueryReader

        given = Options(self.options)
        if "queue" in given:
            QueueOptions.read(given, self.environment, streaming=True)  # which refuses it
        return StreamsQueryReader(ReadOptions.read(given, self.environment, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What writes a table; see docs/spark-sink.md."""
        from bide.spark.sink import TableWriter

        return TableWriter(self.options, self.environment, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        """What writes a stream; see docs/spark-sink.md."""
        # From 4.1 on Spark has streams of record batches.
        if hasattr(datasource, "DataSourceStreamArrowWriter"):
            from bide.spark.sink_stream import StreamWriter

            return StreamWriter(self.options, self.environment, schema, overwrite=overwrite)
        from bide.spark.sink import RowStreamWriter

        return RowStreamWriter(self.options, self.environment, schema, overwrite=overwrite)
