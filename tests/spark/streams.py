"""Streams for Spark to read, filled without bide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika

from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class Streams:
    """A virtual host with streams."""

    def __init__(self, vhost: Vhost, spark: SparkSession, channel: Any) -> None:
        self.vhost = vhost
        self.spark = spark
        self.channel = channel

    def declare(self, *names: str, **arguments: Any) -> None:
        for name in names:
            self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream", **arguments})

    def declare_super(self, name: str, *numbers: int) -> None:
        """Some streams of a super stream; more may come."""
        self.channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
        for number in numbers:
            self.declare(f"{name}-{number}")
            self.channel.queue_bind(f"{name}-{number}", name, str(number), {"x-stream-partition-order": number})

    def fill(self, name: str, bodies: Any, **properties: Any) -> None:
        for body in bodies:
            self.channel.basic_publish("", name, str(body).encode(), pika.BasicProperties(**properties))

    def options(self, **more: Any) -> dict[str, Any]:
        return {"url": self.vhost.url, "streamPort": stream_port(self.vhost.broker), **more}

    def batch(self, **more: Any) -> DataFrame:
        return self.spark.read.format("rabbitmq").options(**self.options(**more)).load()

    def query(self, **more: Any) -> DataFrame:
        return self.spark.readStream.format("rabbitmq").options(**self.options(**more)).load()

    def run(self, checkpoint: Path, files: Path, **more: Any) -> StreamingQuery:
        """Read the available messages into files, and end."""
        query = (
            self.query(**more)
            .writeStream.format("parquet")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start(str(files))
        )
        assert query.awaitTermination(int(TIMEOUT))
        return query

    def stored(self, files: Path) -> list[str]:
        rows = self.spark.read.parquet(str(files)).orderBy("stream", "offset").collect()
        return [row.value.decode() for row in rows]
