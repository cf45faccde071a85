"""An archive of Spark's classes, which the Javas of the tests share (class data sharing).

``python -m tests.spark.class_archive`` writes it, if it is missing. A Java that starts Spark loads thousands of
classes; from the archive, that saves a third of the processor time of a session with its first queries. A Java that
the archive does not fit, of another release or with other jars, loads its classes as usual.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

from tests.spark.spark_processes import CLASS_ARCHIVE, QUICK_JAVA, session_builder, set_environment

_SCHEMA: Final = "number int, name string, at timestamp"


class _Batch(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        yield from ()


class _Stream(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - a name of Spark
        return {"offset": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[Any, ...]], dict[str, int]]:
        return iter(()), {"offset": start["offset"] + 1}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[Any, ...]]:  # noqa: N802 - as above
        return iter(())


class _Empty(DataSource):
    @classmethod
    def name(cls) -> str:
        return "empty"

    def schema(self) -> str:
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Batch()

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: N802 - as above
        return _Stream()


def _query(spark: SparkSession, folder: Path) -> None:
    """Load the classes of what the tests do: files, grouping, joins, Python data sources, streams."""
    spark.dataSource.register(_Empty)
    rows = spark.createDataFrame([(1, "one", None)], _SCHEMA).union(spark.read.format("empty").load())
    for kind in ("parquet", "json", "csv"):
        rows.write.format(kind).partitionBy("number").mode("append").save(str(folder / kind))
        _group(spark.read.schema(_SCHEMA).format(kind).load(str(folder / kind))).collect()
    stream = spark.readStream.format("empty").load().withWatermark("at", "1 minute").dropDuplicates(["name"])
    query = (
        stream.writeStream.foreachBatch(_count)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _count(batch: DataFrame, number: int) -> None:
    batch.count()


def _group(rows: DataFrame) -> DataFrame:
    lengths = f.udf(len, "int")
    others = rows.select("number", f.date_trunc("hour", "at").alias("hour"), lengths("name").alias("length"))
    counts = rows.join(others, "number", "left").groupBy("number", "hour")
    return counts.agg(f.count("*"), f.percentile_approx("length", 0.5), f.max(f.to_json(f.struct("name")))).orderBy(
        "hour"
    )


def main() -> None:
    if CLASS_ARCHIVE.exists():
        return
    sys.stderr.write("class_archive: archiving the classes of Spark\n")
    with tempfile.TemporaryDirectory(dir=CLASS_ARCHIVE.parent) as name:
        made = Path(name, CLASS_ARCHIVE.name)
        session = (
            session_builder(Path(name), java=f"{QUICK_JAVA} -Xlog:disable -XX:ArchiveClassesAtExit={made}")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "OFF")
            .getOrCreate()
        )
        gateway = session.sparkContext._gateway
        assert gateway is not None
        _query(session, Path(name))
        session.stop()
        # Java writes the archive when it ends, which closing its standard input makes it do.
        gateway.proc.stdin.close()
        gateway.proc.wait()
        made.replace(CLASS_ARCHIVE)


if __name__ == "__main__":
    set_environment()
    main()
