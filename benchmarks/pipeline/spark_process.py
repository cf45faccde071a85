"""A Spark session that reads and writes with the bide of any checkout.

``python -m benchmarks.pipeline.spark_process CORES`` runs with the other checkout's ``src`` first in PYTHONPATH, so
it imports of bide only what each release has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import bide.spark
from benchmarks.pipeline.answers import Times, answer_to_parent, serve, timed
from benchmarks.suite.spark_session import local_session


def main() -> None:
    """Start Spark, and serve."""
    answers = answer_to_parent()
    spark = local_session(int(sys.argv[1]))
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))  # no two files in one task
    bide.spark.register(spark)

    def read(options: Mapping[str, str], schema: str | None) -> Times:
        """Read a stream into a sink that writes nothing."""
        reader = spark.read.format("rabbitmq").options(**options)
        if schema is not None:
            reader = reader.schema(schema)
        with timed() as times:
            reader.load().write.format("noop").mode("overwrite").save()
        return times

    def write(path: str, tasks: int, columns: Sequence[str], options: Mapping[str, str]) -> Times:
        """Write a table of Parquet files, one for each task."""
        frame = spark.read.parquet(path).select(*columns)
        found = frame.rdd.getNumPartitions()
        if found != tasks:
            raise ValueError(f"{path} has {found} partitions instead of {tasks}")
        with timed() as times:
            frame.write.format("rabbitmq").mode("append").options(**options).save()
        return times

    serve({"read": read, "write": write}, answers)
    spark.stop()


if __name__ == "__main__":
    main()
