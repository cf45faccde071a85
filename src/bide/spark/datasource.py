"""The data source ``rabbitmq`` for Spark's Python Data Source API.

Spark creates the data source in several processes, pickles it, and asks it for readers and writers more than once, so
it holds nothing but the options. Options are checked when a reader or writer is created, on the driver.
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
        # The environment of the driver, because executors have another one.
        self.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "rabbitmq"

    def schema(self) -> StructType:
        """The columns of a read, of which a schema given by the user may select some."""
        given = Options(self.options)
        headers = given.flag("includeHeaders", default=False)
        if "queue" in given:
            return table_schema(QUEUE_COLUMNS, include_headers=headers)
        raw = given.choice("undecodable", "fail", "raw") == "raw"
        return table_schema(STREAM_COLUMNS, include_headers=headers, undecodable=raw)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader for a batch."""
        from bide.spark.queue_source import QueueReader
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsReader

        given = Options(self.options)
        if "queue" in given:
            return QueueReader(QueueOptions.read(given, self.environment, streaming=False), schema)
        return StreamsReader(ReadOptions.read(given, self.environment, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Create a reader for a streaming query."""
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsQueryReader

        given = Options(self.options)
        if "queue" in given:
            QueueOptions.read(given, self.environment, streaming=True)  # always raises
        return StreamsQueryReader(ReadOptions.read(given, self.environment, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Create a writer for a table; see docs/spark-sink.md."""
        from bide.spark.sink import TableWriter

        return TableWriter(self.options, self.environment, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        """Create a writer for a streaming query; see docs/spark-sink.md."""
        # Spark passes record batches since 4.1, and rows before.
        if hasattr(datasource, "DataSourceStreamArrowWriter"):
            from bide.spark.sink_stream import StreamWriter

            return StreamWriter(self.options, self.environment, schema, overwrite=overwrite)
        from bide.spark.sink import RowStreamWriter

        return RowStreamWriter(self.options, self.environment, schema, overwrite=overwrite)
