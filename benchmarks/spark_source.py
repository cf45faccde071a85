"""Throughput of reading a stream with Spark: all columns, and the body alone.

The stream is filled once, on a private broker. Nothing is written, so that the sink is not measured::

    .venv/bin/python -m benchmarks.spark_source --messages 1000000 --cores 4 --rounds 3

The first line is the cost of decoding alone: a range read in this process into record batches, without Spark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import bide
import bide.spark
from benchmarks.suite.machine import circumstances
from benchmarks.suite.spark_session import local_session
from bide.local_broker import LocalBroker
from bide.spark.batches import RecordBatchBuilder
from bide.spark.columns import STREAM_COLUMNS, arrow_schema, table_schema
from bide.streams.log import Address, StreamLogs
from bide.streams.range_reader import OffsetRange, read_range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = "measured"


async def fill(url: str, count: int) -> None:
    """Publish the messages."""
    stream = bide.Queue(STREAM, arguments={"x-queue-type": "stream"})
    async with bide.connect(url) as client:
        await client.declare(bide.Topology(queues=[stream]))
        await client.publish_many(bide.OutgoingMessage(b"x" * 200, to=STREAM) for _ in range(count))


def decoding(address: Address) -> float:
    """Microseconds of processor time a message, from the socket to record batches, in one process."""
    with StreamLogs(address) as logs:
        wanted = OffsetRange(stream=STREAM, start=0, end=logs.end(STREAM))
    batches = RecordBatchBuilder(
        arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False), STREAM_COLUMNS), STREAM, raw=False
    )
    begun = time.process_time()
    rows = 0
    for chunk, first, last in read_range(address, wanted, fail_on_data_loss=True):
        rows += sum(batch.num_rows for batch in batches.add(chunk, first, last))
    rows += batches.take().num_rows if batches.rows else 0
    return (time.process_time() - begun) / rows * 1e6


def rate(spark: SparkSession, options: dict[str, str], columns: str | None, count: int) -> float:
    """Messages a second."""
    reader = spark.read.format("rabbitmq").options(**options)
    if columns is not None:
        reader = reader.schema(columns)
    begun = time.monotonic()
    reader.load().write.format("noop").mode("overwrite").save()
    return count / (time.monotonic() - begun)


def main() -> None:
    """Measure, and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="the root folder of another system, whose RabbitMQ is to run")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    wanted = parser.parse_args()
    facts = {
        **circumstances(),
        "messages": wanted.messages,
        "tasks": wanted.cores,
    }
    with LocalBroker.start(ephemeral=True, chroot=wanted.root) as broker:
        facts["rabbitmq"] = broker.release
        assert broker.stream_url is not None
        port = int(broker.stream_url.rstrip("/").rpartition(":")[2])
        asyncio.run(fill(broker.url, wanted.messages))
        facts["decoding_us"] = round(decoding(Address.of(broker.url, port)), 2)
        print(json.dumps({"decoding_us": facts["decoding_us"]}))
        spark = local_session(wanted.cores)
        bide.spark.register(spark)
        options = {
            "url": broker.url,
            "streamPort": str(port),
            "stream": STREAM,
            "minPartitions": str(wanted.cores),
        }
        kinds = {"all columns": None, "value": "value binary"}
        rate(spark, options, None, wanted.messages)  # the workers and the JIT compiler start
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(wanted.rounds):
            for kind, columns in kinds.items():
                rates[kind].append(rate(spark, options, columns, wanted.messages))
        for kind, found in rates.items():
            print(
                json.dumps(
                    {
                        "read": kind,
                        "per_second": [round(one) for one in found],
                        "median": round(statistics.median(found)),
                        "load": os.getloadavg()[0],
                    }
                )
            )
        if wanted.result is not None:
            per_second = {kind: [round(one) for one in found] for kind, found in rates.items()}
            wanted.result.write_text(json.dumps({**facts, "per_second": per_second}, indent=1) + "\n")
        spark.stop()


if __name__ == "__main__":
    main()
