"""Throughput of the Spark sink with one task and several, compared with the bulk publisher.

``python -m benchmarks.spark_sink [--messages 200000] [--rounds 3] [--tasks 1 2 4]`` starts a broker of its own, and
prints messages per second, round by round, both kinds in turn so that both meet the same machine. Messages have 200
bytes, are persistent, and delayed by 10 to 60 minutes at random; the table is a Parquet file per task. ``--stream``
also writes the rows without delay into a stream, with the bulk publisher, and once each with the sink.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bide
import bide.spark
from benchmarks.suite.machine import busy_cores, describe, source
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1])
    parser.add_argument("--stream", action="store_true", help="write into a stream too")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    facts: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
        "source": source(),
    }
    facts |= {"cores_in_use_before": round(busy_cores(), 2), "messages": arguments.messages}
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
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, LocalBroker.start(ephemeral=True, chroot=arguments.chroot) as broker:
        facts["rabbitmq"] = broker.release
        frames = {}
        for tasks in arguments.tasks:
            path = f"{folder}/{tasks}"
            table = spark.range(0, arguments.messages, 1, tasks)
            table.selectExpr(f"'{BODY}' as value", "id", "(10 + int(rand() * 51)) * 60000 as delay").write.parquet(path)
            frames[tasks] = spark.read.parquet(path)
            assert frames[tasks].rdd.getNumPartitions() == tasks
        for number in range(arguments.rounds + 1):
            url = broker.add_vhost(f"v{number}")
            with bide.connect_sync(url) as client:
                client.declare(
                    bide.Topology(
                        queues=[bide.Queue.quorum("q"), bide.Queue("s", arguments={"x-queue-type": "stream"})]
                    )
                )
                client.publish(b"", to="q", delay="1s")
            found = {"bulk": bulk(url, "q", arguments.messages)}
            for tasks, frame in frames.items():
                started = time.monotonic()
                frame.drop("id").write.format("rabbitmq").mode("append").options(url=url, queue="q").save()
                found[f"sink {tasks}"] = arguments.messages / (time.monotonic() - started)
            found["bulk after"] = bulk(url, "q", arguments.messages)
            if arguments.stream:
                found["stream: bulk"] = bulk_into_stream(url, arguments.messages)
                for tasks, frame in frames.items():
                    rows = frame.selectExpr("value", "id as publishing_id")
                    once = {"url": url, "queue": "s", "producerName": f"once-{tasks}"}
                    started = time.monotonic()
                    port = broker.stream_port
                    rows.write.format("rabbitmq").mode("append").options(**once, streamPort=port).save()
                    found[f"stream: sink {tasks}"] = arguments.messages / (time.monotonic() - started)
            broker.delete_vhost(f"v{number}")
            warming = " (warming up)" if not number else ""
            print(", ".join(f"{name} {rate:,.0f}/s" for name, rate in found.items()) + warming, flush=True)
            if number:
                for name, rate in found.items():
                    rates.setdefault(name.removesuffix(" after"), []).append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        base = medians["stream: bulk" if name.startswith("stream") else "bulk"]
        print(f"{name}: median {rate:,.0f}/s, {rate / base:.2f} of the bulk publisher")
    if arguments.result is not None:
        per_second = {name: [round(rate) for rate in values] for name, values in rates.items()}
        arguments.result.write_text(json.dumps({**facts, "per_second": per_second}, indent=1) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
