"""Speed of reading a queue with Spark: ``bide.spark.drain``, and pika in ``foreachBatch``.

A streaming query cannot read a queue. The usual way around this is a query whose own rows do not matter, and whose
function for ``foreachBatch`` consumes messages with pika, writes them, and acknowledges them. Both ways remove the same
messages, in batches of the same size, from a queue that is filled before each measurement::

    .venv/bin/python -m benchmarks.spark_queue --messages 100000 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika

import bide
import bide.spark
from benchmarks.suite.machine import circumstances
from benchmarks.suite.spark_session import local_session
from bide.local_broker import LocalBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUEUE = "measured"
COLUMNS = ("value", "message_id", "routing_key")
SCHEMA = "value binary, message_id string, routing_key string"
BATCH = 10_000
TIMEOUT = 600
"""Seconds that reading may take."""


async def fill(url: str, count: int) -> None:
    """Publish persistent messages of 200 bytes."""
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(QUEUE)]))
        await client.publish_many(bide.OutgoingMessage(b"x" * 200, to=QUEUE) for _ in range(count))


def drain(spark: SparkSession, url: str, count: int, folder: str) -> None:
    """Read with bide."""

    def write(frame: DataFrame) -> None:
        frame.select(*COLUMNS).write.mode("append").parquet(folder)

    done = bide.spark.drain(spark, QUEUE, write=write, url=url, batch=BATCH, limit=count)
    assert done.messages == count


def read_in_foreach_batch(spark: SparkSession, url: str, count: int, folder: str) -> None:
    """Read with pika, in the function of a query."""
    read, finished = 0, threading.Event()
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=BATCH)

        def take(_: DataFrame, __: int) -> None:
            nonlocal read
            if finished.is_set():
                return
            rows: list[tuple[bytes, str | None, str]] = []
            tag = 0
            for method, properties, body in channel.consume(QUEUE, inactivity_timeout=1):
                if method is None:
                    break
                rows.append((body, properties.message_id, method.routing_key))
                tag = method.delivery_tag
                if len(rows) == BATCH or read + len(rows) == count:
                    break
            if rows:
                spark.createDataFrame(rows, SCHEMA).write.mode("append").parquet(folder)
                channel.basic_ack(tag, multiple=True)
            read += len(rows)
            if read == count:
                finished.set()

        # This source has new rows for each micro-batch, so one begins as soon as the last has ended.
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        query = rows.writeStream.foreachBatch(take).option("checkpointLocation", f"{folder}.checkpoint").start()
        try:
            deadline = time.monotonic() + TIMEOUT
            while not finished.wait(1):
                if not query.isActive or time.monotonic() > deadline:
                    raise query.exception() or TimeoutError(f"{read:,} of {count:,} messages after {TIMEOUT} s")
        finally:
            query.stop()


WAYS: dict[str, Callable[[Any, str, int, str], None]] = {"drain": drain, "foreachBatch": read_in_foreach_batch}


def main() -> None:
    """Measure, and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="the root folder of another system, whose RabbitMQ is to run")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    wanted = parser.parse_args()
    facts = {
        **circumstances(),
        "messages": wanted.messages,
        "batch": BATCH,
    }
    with LocalBroker.start(ephemeral=True, chroot=wanted.root) as broker, tempfile.TemporaryDirectory() as temporary:
        facts["rabbitmq"] = broker.release
        spark = local_session(2)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        # The first round warms up the JVM. The ways take turns in going first.
        for place in range(wanted.rounds + 1):
            for way in sorted(WAYS, reverse=bool(place % 2)):
                asyncio.run(fill(broker.url, wanted.messages))
                folder = f"{temporary}/{way}-{place}"
                begun = time.monotonic()
                WAYS[way](spark, broker.url, wanted.messages, folder)
                took = time.monotonic() - begun
                assert spark.read.parquet(folder).count() == wanted.messages
                if place:
                    seconds[way].append(took)
                    print(json.dumps({"way": way, "seconds": round(took, 2), "load": os.getloadavg()[0]}), flush=True)
        spark.stop()
    ratios = [other / own for own, other in zip(seconds["drain"], seconds["foreachBatch"], strict=True)]
    facts["seconds"] = {way: [round(one, 2) for one in some] for way, some in seconds.items()}
    facts["foreachBatch_by_drain"] = [round(one, 2) for one in ratios]
    print(json.dumps({"foreachBatch by drain, median of rounds": round(statistics.median(ratios), 2)}))
    if wanted.result is not None:
        wanted.result.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
