"""Writing a Spark table with a Python object, in one task per partition."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write(rows: DataFrame, writer: DataSourceArrowWriter) -> None:
    """Call the writer in a task for each partition. The writer is pickled for the tasks.

    A data source is registered for each writer, because an object cannot be passed as an option: options are text.
    (``mapInArrow`` accepts objects too, but needs pandas.)

    Raises:
        PySparkException: a task failed.
    """
    format_name = f"bide-{uuid4().hex}"

    class Target(DataSource):
        @classmethod
        def name(cls) -> str:
            return format_name

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            return writer

    session = rows.sparkSession
    session.dataSource.register(Target)
    # Classic Spark looks up formats in the active session of this thread, which may differ from the session of the
    # rows. Creating a DataFrame makes the session of the rows active; Spark has no other call for that.
    session.createDataFrame([], "nothing int")
    rows.write.format(format_name).mode("append").save()
