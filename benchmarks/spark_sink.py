"""Throughput of the Spark sink with one task and several, compared with the bulk publisher.

``python -m benchmarks.spark_sink [--messages 200000] [--rounds 3] [--tasks 1 2 4]`` starts a broker of its own, and
prints messages per second, round by round, both kinds in turn so that both meet the same machine. Messages have 200
bytes, are persistent, and delayed by 10 to 60 minutes at random; the table is a Parquet file per task. ``--stream``
also writes the rows without delay into a stream, with the bulk publisher, and once each with the sink; ``--no-queue``
leaves out the queue. Figures "without start" leave out the seconds that a table of one row per task takes, which are
those of Spark's planning and processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bide
import bide.spark
from benchmarks.suite.machine import circumstances
from bide.client.bulk.sync import BulkPublisher
from bide.local_broker import LocalBroker

BODY = "x" * 200


def bulk(url: str, queue: str, count: int) -> float:
    """Messages per second of the bulk publisher, including the time to create them."""
    delays = [timedelta(minutes=random.randint(10, 60)) for _ in range(count)]
    body = BODY.encode()
    started = time.monotonic()
    with BulkPublisher(url) as publisher:
        for delay in delays:
            publisher.put(bide.OutgoingMessage(body, to=queue, delay=delay))
    return count / (time.monotonic() - started)


def bulk_into_stream(url: str, count: int) -> float:
    """Messages per second of the bulk publisher into a stream, over AMQP 0-9-1 and without delays."""
    body = BODY.encode()
    started = time.monotonic()
    with BulkPublisher(url) as publisher:
        for _ in range(count):
            publisher.put(bide.OutgoingMessage(body, to="s"))
    return count / (time.monotonic() - started)


def sink(frame: Any, **options: Any) -> float:
    """Seconds of a write."""
    started = time.monotonic()
    frame.write.format("rabbitmq").mode("append").options(**options).save()
    return time.monotonic() - started


def rates(name: str, count: int, small: Any, large: Any, **options: Any) -> dict[str, float]:
    """Messages per second of the sink, with the start of Spark and without."""
    start = sink(small, **options)
    if "producerName" in options:
        options["producerName"] += "-large"
    seconds = sink(large, **options)
    # The small table is written before the large one, so that both find Spark's processes running.
    return {name: count / seconds, f"{name} without start": count / (seconds - start) if seconds > start else math.inf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1])
    parser.add_argument("--stream", action="store_true", help="write into a stream too")
    parser.add_argument("--no-queue", action="store_true", help="do not write into a queue")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    facts = {**circumstances(), "messages": arguments.messages}
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.files.openCostInBytes", 1 << 30)  # no two files in one task
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    bide.spark.register(spark)
    measured: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, LocalBroker.start(ephemeral=True, chroot=arguments.chroot) as broker:
        facts["rabbitmq"] = broker.release
        tables = {}
        for tasks in arguments.tasks:
            for size in (tasks, arguments.messages):
                path = f"{folder}/{tasks}-{size}"
                table = spark.range(0, size, 1, tasks)
                delay = "(10 + int(rand() * 51)) * 60000 as delay"
                table.selectExpr(f"'{BODY}' as value", "id as publishing_id", delay).write.parquet(path)
            tables[tasks] = [spark.read.parquet(f"{folder}/{tasks}-{size}") for size in (tasks, arguments.messages)]
            assert [one.rdd.getNumPartitions() for one in tables[tasks]] == [tasks, tasks]
        for number in range(arguments.rounds + 1):
            url = broker.add_vhost(f"v{number}")
            with bide.connect_sync(url) as client:
                client.declare(
                    bide.Topology(
                        queues=[bide.Queue.quorum("q"), bide.Queue("s", arguments={"x-queue-type": "stream"})]
                    )
                )
                client.publish(b"", to="q", delay="1s")
            found: dict[str, float] = {}
            if not arguments.no_queue:
                found["bulk"] = bulk(url, "q", arguments.messages)
                for tasks, both in tables.items():
                    small, large = (one.drop("publishing_id") for one in both)
                    found |= rates(f"sink {tasks}", arguments.messages, small, large, url=url, queue="q")
                found["bulk after"] = bulk(url, "q", arguments.messages)
            if arguments.stream:
                found["stream: bulk"] = bulk_into_stream(url, arguments.messages)
                for tasks, both in tables.items():
                    small, large = (one.drop("delay") for one in both)
                    once = {"url": url, "queue": "s", "streamPort": broker.stream_port, "producerName": f"n{tasks}"}
                    found |= rates(f"stream: sink {tasks}", arguments.messages, small, large, **once)
                found["stream: bulk after"] = bulk_into_stream(url, arguments.messages)
            broker.delete_vhost(f"v{number}")
            warming = " (warming up)" if not number else ""
            print(", ".join(f"{name} {rate:,.0f}/s" for name, rate in found.items()) + warming, flush=True)
            if number:
                for name, rate in found.items():
                    measured.setdefault(name.removesuffix(" after"), []).append(rate)
                    base = "stream: bulk" if name.startswith("stream") else "bulk"
                    if not name.endswith(" after"):
                        # The machine may do other work: a round is compared with the bulk publisher before and after.
                        ratio = rate / statistics.mean((found[base], found[f"{base} after"]))
                        ratios.setdefault(name, []).append(ratio)
    for name, found_ratios in ratios.items():
        rate, ratio = statistics.median(measured[name]), statistics.median(found_ratios)
        print(f"{name}: median {rate:,.0f}/s, {ratio:.2f} of the bulk publisher in the same round")
    if arguments.result is not None:
        per_second = {name: [round(rate) for rate in values if rate < math.inf] for name, values in measured.items()}
        rounded = {name: [round(ratio, 2) for ratio in values if ratio < math.inf] for name, values in ratios.items()}
        arguments.result.write_text(json.dumps({**facts, "per_second": per_second, "ratios": rounded}, indent=1) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
