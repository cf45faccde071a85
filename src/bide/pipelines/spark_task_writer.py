"""Tables that are written by an object of ours, in tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write(rows: DataFrame, writer: DataSourceArrowWriter) -> None:
    """Have a task for each partition call the writer, which is pickled for it.

    A format of its own is the only way to hand a task what is no text. (``mapInArrow`` would be one, and wants Pandas.)

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
    # A classic Spark looks formats up in the session that is active in this thread, which may be another than that of
    # the rows. This makes theirs the active one; there is no call for that alone.
    session.createDataFrame([], "nothing int")
    rows.write.format(format_name).mode("append").save()
