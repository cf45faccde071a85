"""A program for ``spark-submit`` and Spark Connect; executors have bide by ``--py-files``.

Its argument and its output are JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

import bide.spark
from bide.spark.shipping import is_connect

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame

ROWS = 300


def look(_: Iterable[int]) -> list[tuple[str, str, str]]:
    """The folder of an executor, the file of its bide, and the error of importing bide without Spark."""
    import bide

    alone = subprocess.run([sys.executable, "-I", "-c", "import bide"], capture_output=True, text=True, check=False)
    return [(str(Path.cwd()), str(bide.__file__), alone.stderr.strip().rpartition("\n")[2])]


def use(spark: SparkSession, settings: dict[str, str]) -> dict[str, Any]:
    """Write, read what was written in a batch and in a query, write that in a query, and move it to another queue."""
    bide.spark.register(spark)
    places = [] if is_connect(spark) else spark.sparkContext.parallelize(range(4), 4).mapPartitions(look).collect()
    rabbitmq = {"url": settings["url"], "maxDelay": "5s", "resolution": "1s"}
    rows = spark.range(0, ROWS, 1, 4).selectExpr("concat('row ', id) as value", "concat('m-', id) as message_id")

    def write(rows: DataFrame, queue: str) -> None:
        rows.write.format("rabbitmq").mode("append").options(**rabbitmq, queue=queue).save()

    write(rows, "facts")
    of_stream = {
        "url": settings["url"],
        "streamPort": settings["port"],
        "stream": "facts",
        "startingOffsets": "earliest",
    }
    read = spark.read.format("rabbitmq").options(**of_stream, minPartitions="3").load()
    batch = {row["message_id"] for row in read.select("message_id").collect()}
    query = (
        spark.readStream.format("rabbitmq")
        .options(**of_stream)
        .load()
        .selectExpr("value", "message_id", "'1s' as delay")
        .writeStream.format("rabbitmq")
        .options(**rabbitmq, queue="orders", checkpointLocation=settings["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    moved = bide.spark.drain(
        spark,
        "orders",
        write=lambda rows: write(rows.select("value", "message_id"), "kept"),
        url=settings["url"],
        limit=ROWS,
        quiet="5m",
    )
    kept = spark.read.format("rabbitmq").options(url=settings["url"], queue="kept").load()
    found = kept.selectExpr("message_id", "cast(value as string) as value").collect()
    return {
        "places": places,
        "batch": sorted(batch),
        "moved": moved.messages,
        "kept": [(row["message_id"], row["value"]) for row in found],
    }


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    sys.stdout.write(json.dumps(use(session, json.loads(sys.argv[1]))) + "\n")
    session.stop()
