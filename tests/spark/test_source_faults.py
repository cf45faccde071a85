"""Faults while Spark reads streams."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel as Channel
from pika.exceptions import ChannelClosedByBroker

from bide.local_broker import LocalBroker
from tests.spark.spark_processes import QUICK_JAVA, started
from tests.support import Rabbitmq, Vhost, apply_retention, flush_declarations, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

KILLED = """
import sys
from pyspark.sql import SparkSession

java, url, port, checkpoint, files = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.extraJavaOptions", java)
    .getOrCreate()
)
(
    spark.readStream.format("rabbitmq")
    .options(url=url, streamPort=port, stream="s", startingOffsets="earliest", maxOffsetsPerTrigger=25, minPartitions=2)
    .load()
    .writeStream.format("parquet")
    .option("checkpointLocation", checkpoint)
    .start(files)
    .awaitTermination()
)
"""


SHORT = {"x-max-length-bytes": 100_000, "x-stream-max-segment-size-bytes": 50_000}
"""Arguments of a stream that keeps the last few of many large messages."""


@pytest.fixture
def channel(vhost: Vhost) -> Iterator[Channel]:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.idle_url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def declare(channel: Channel, **arguments: Any) -> None:
    channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream", **arguments})


def fill(channel: Channel, numbers: range, size: int = 0) -> None:
    for number in numbers:
        channel.basic_publish("", "s", str(number).encode().ljust(size))


def read(spark: SparkSession, vhost: Vhost, folder: Path, **more: Any) -> None:
    """Read what there is now into files."""
    query = (
        spark.readStream.format("rabbitmq")
        .options(url=vhost.url, streamPort=stream_port(vhost.broker), stream="s", **more)
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "files"))
    )
    assert query.awaitTermination(int(TIMEOUT))


def stored(spark: SparkSession, folder: Path) -> list[int]:
    return sorted(int(row.value) for row in spark.read.parquet(str(folder / "files")).collect())


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_query_writes_every_message_once_after_its_restart(
    spark: SparkSession, vhost: Vhost, channel: Channel, tmp_path: Path
) -> None:
    """JVM and Python, with SIGKILL, in the middle of a query: every message is in the files, once."""
    declare(channel)
    fill(channel, range(1000))
    folders = [str(tmp_path / "checkpoint"), str(tmp_path / "files")]
    committed = tmp_path / "checkpoint" / "commits"
    # With a name that Spark finds the data source by itself: nothing is registered.
    command = [sys.executable, "-c", KILLED, QUICK_JAVA, vhost.url, str(stream_port(vhost.broker)), *folders]
    with started(command, stderr=subprocess.DEVNULL) as program:
        program.wait_until(lambda: len(list(committed.glob("[0-9]*"))) >= 3, "three micro-batches are written")
        program.kill()
    at_the_kill = len(list(committed.glob("[0-9]*")))
    assert 3 <= at_the_kill < 40, "it was killed after the end"
    fill(channel, range(1000, 1010))
    read(spark, vhost, tmp_path, startingOffsets="earliest")
    assert stored(spark, tmp_path) == list(range(1010))


@pytest.mark.long
def test_a_query_survives_a_restart_of_the_broker(spark: SparkSession, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """The query notices nothing."""
    seen: list[int] = []
    with rabbitmq.start(ephemeral=True) as broker:
        publish(broker, range(3))
        flush_declarations(broker)
        query = (
            spark.readStream.format("rabbitmq")
            .options(url=broker.url, streamPort=stream_port(broker), stream="s", startingOffsets="earliest")
            .load()
            .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .foreachBatch(lambda frame, number: seen.extend(int(row.value) for row in frame.collect()))
            .start()
        )
        try:
            until(query, lambda: sorted(seen) == [0, 1, 2])
            broker.kill()
            broker.restart()
            publish(broker, range(3, 6))
            until(query, lambda: sorted(seen) == list(range(6)))
        finally:
            query.stop()
    assert sorted(seen) == list(range(6))


def publish(broker: LocalBroker, numbers: range) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection:
        deadline = time.monotonic() + TIMEOUT
        while True:
            channel = connection.channel()
            channel.confirm_delivery()
            try:
                declare(channel)
                break
            except ChannelClosedByBroker:
                # Just started, it has no leader for the stream yet.
                assert time.monotonic() < deadline
                time.sleep(0.1)  # before the next attempt
        fill(channel, numbers)


def until(query: StreamingQuery, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert query.isActive, str(query.exception())
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)  # there is no event to wait for


def test_lost_messages_fail_the_query_until_allowed(
    spark: SparkSession, vhost: Vhost, channel: Channel, tmp_path: Path
) -> None:
    declare(channel, **SHORT)
    fill(channel, range(3))
    read(spark, vhost, tmp_path, startingOffsets="earliest")
    # Far more than is kept.
    fill(channel, range(3, 103), size=5_000)
    apply_retention(vhost.broker)
    with pytest.raises(Exception, match=r"does not have offsets 3 to .* retention removed them"):
        read(spark, vhost, tmp_path)
    read(spark, vhost, tmp_path, failOnDataLoss=False)
    found = stored(spark, tmp_path)
    assert found[:3] == [0, 1, 2]
    assert found[3] > 3
    assert found[3:] == list(range(found[3], 103))


def test_lost_messages_fail_a_batch_until_allowed(spark: SparkSession, vhost: Vhost, channel: Channel) -> None:
    declare(channel, **SHORT)
    fill(channel, range(100), size=5_000)
    apply_retention(vhost.broker)
    batch = spark.read.format("rabbitmq").options(
        url=vhost.url, streamPort=stream_port(vhost.broker), stream="s", startingOffsets='{"s": 3}'
    )
    with pytest.raises(Exception, match=r"does not have offsets 3 to .* retention removed them"):
        batch.load().collect()
    # Of the first task, which reads up to the middle, nothing is left.
    rows = batch.options(failOnDataLoss=False, minPartitions=2).load().collect()
    found = sorted(int(row.value) for row in rows)
    assert found[0] > 50
    assert found == list(range(found[0], 100))


def test_a_recreated_stream_fails_the_query_until_allowed(
    spark: SparkSession, vhost: Vhost, channel: Channel, tmp_path: Path
) -> None:
    declare(channel)
    fill(channel, range(5))
    read(spark, vhost, tmp_path, startingOffsets="earliest")
    channel.queue_delete("s")
    declare(channel)
    fill(channel, range(5, 7))
    with pytest.raises(Exception, match="was read up to offset 5, and now it ends at 2"):
        read(spark, vhost, tmp_path)
    read(spark, vhost, tmp_path, failOnDataLoss=False)
    assert stored(spark, tmp_path) == list(range(7))


def test_missing_streams_and_unknown_options_are_named(spark: SparkSession, vhost: Vhost, channel: Channel) -> None:
    port = stream_port(vhost.broker)
    source = spark.read.format("rabbitmq").options(url=vhost.url, streamPort=port)
    with pytest.raises(Exception, match="there is no stream 'missing' on the virtual host"):
        source.option("stream", "missing").load().collect()
    with pytest.raises(Exception, match="unknown option for reading streams: stat"):
        spark.read.format("rabbitmq").options(url=vhost.url, streamPort=port, stat="s", stream="s").load().collect()
    declare(channel)
    fill(channel, range(3))
    with pytest.raises(Exception, match="endingOffsets is 9 for 's', which ends at 3"):
        spark.read.format("rabbitmq").options(
            url=vhost.url, streamPort=port, stream="s", endingOffsets='{"s": 9}'
        ).load().collect()
