"""The data source ``rabbitmq`` for Spark's Python Data Source API.

Spark creates the data source in several processes, pickles it, and asks it for readers and writers more than once, so
it holds only the options and the environment variables that locate the broker. Options are checked when a reader or
writer is created, on the driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Final

from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from bide.errors import InvalidOptionError
from bide.spark.columns import QUEUE_COLUMNS, STREAM_COLUMNS, schema_of_names, table_schema
from bide.spark.options import BROKER_VARIABLES, Options

_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class RabbitMQDataSource(DataSource):
    """Streams and queues of RabbitMQ as tables. Options and columns: docs/spark-source.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # The environment of the driver, because executors have another one.
        self.environment = {name: os.environ[name] for name in BROKER_VARIABLES if name in os.environ}

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "rabbitmq"

    def schema(self) -> StructType:
        """The columns of a read. The user may give a schema with some of them instead."""
        given = Options(self.options)
        columns = QUEUE_COLUMNS if "queue" in given else STREAM_COLUMNS
        if (names := given.names("columns")) is not None:
            if "includeHeaders" in given:
                raise InvalidOptionError(
                    "the options columns and includeHeaders were both given: leave out includeHeaders, and name the "
                    "column headers (values as text) or headers_json (values with types) in the option columns"
                )
            return schema_of_names(columns, names)
        headers = given.choice("includeHeaders", "false", "true", "json")
        return table_schema(
            columns,
            include_headers=headers == "true",
            headers_as_json=headers == "json",
            undecodable=columns is STREAM_COLUMNS and given.choice("undecodable", "fail", "raw") == "raw",
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader for a batch."""
        from bide.spark.queue_source import QueueReader
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsReader

        given = Options(self.options)
        _check_columns(given, schema)
        if "queue" in given:
            return QueueReader(QueueOptions.read(given, self.environment, streaming=False), schema)
        options = ReadOptions.read(given, self.environment, streaming=False)
        if is_pushing_filters():
            from bide.spark.pushdown import FilteredStreamsReader

            return FilteredStreamsReader(options, schema)
        return StreamsReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Create a reader for a streaming query."""
        from bide.spark.read_options import QueueOptions, ReadOptions
        from bide.spark.source import StreamsQueryReader

        given = Options(self.options)
        _check_columns(given, schema)
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


def _check_columns(given: Options, schema: StructType) -> None:
    """Refuse the option ``columns`` if the user also gave a different schema, which Spark would use instead."""
    names = given.names("columns")
    if names is not None and list(names) != schema.fieldNames():
        raise InvalidOptionError(
            f"the option columns names {', '.join(names)}, but the schema has {', '.join(schema.fieldNames())}: "
            "leave out the option or the schema"
        )


def is_pushing_filters() -> bool:
    """Whether this process is the worker in which Spark pushes filters down (since 4.1, off by default).

    In other processes, Spark refuses a reader that has the method ``pushFilters``.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_WORKER in sys.modules or getattr(main, "name", None) == _PUSHDOWN_WORKER
