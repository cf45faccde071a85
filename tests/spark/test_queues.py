"""Browsing and draining queues with a real Spark."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel as Channel
from pyspark.errors import AnalysisException, PySparkException

import bide.spark
from bide.errors import BrokerError, DelayQueueError, DeliveryLostError, InvalidInputError, TargetNotFoundError
from bide.topology import Argument
from tests.spark.spark_processes import QUICK_JAVA
from tests.support import Vhost
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LONG = "5m"
"""Drains that end with a number of messages do not wait for this, however long the broker takes to deliver them."""


@pytest.fixture
def channel(vhost: Vhost) -> Iterator[Channel]:
    connection = pika.BlockingConnection(pika.URLParameters(vhost.idle_url))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
    yield channel
    if connection.is_open:
        connection.close()


def fill(channel: Channel, count: int, **properties: Any) -> None:
    for number in range(count):
        channel.basic_publish("", "q", b"%d" % number, pika.BasicProperties(message_id=f"m-{number}", **properties))


def left(channel: Channel, queue: str = "q") -> int:
    """Ready messages. RabbitMQ waits 250 ms for a queue that is too busy to count, and then replies 0."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        asked_at = time.monotonic()
        count = int(channel.queue_declare(queue, passive=True).method.message_count)
        if count or time.monotonic() - asked_at < 0.2:
            return count
        assert time.monotonic() < deadline, f"{queue} is too busy to count its messages"


def holds(channel: Channel, count: int) -> bool:
    """Whether the queue gets to have ``count`` messages; requeueing takes a moment."""
    deadline = time.monotonic() + TIMEOUT
    while (found := left(channel)) != count and time.monotonic() < deadline:
        channel.connection.process_data_events(0.02)
    return found == count


def peek(spark: SparkSession, url: str, **more: Any) -> DataFrame:
    return spark.read.format("rabbitmq").options(url=url, queue="q", **more).load()


def test_peeking_leaves_messages_in_the_queue(spark: SparkSession, vhost_url: str, channel: Channel) -> None:
    fill(
        channel,
        5,
        correlation_id="c",
        content_type="text/plain",
        type="T",
        headers={"bide-due": 1000, "x": [1, Decimal("1.5")]},
    )
    rows = peek(spark, vhost_url, includeHeaders=True).collect()
    assert [row.value for row in rows] == [b"%d" % number for number in range(5)]
    first = rows[0]
    assert (first.queue, first.exchange, first.routing_key, first.message_id) == ("q", "", "q", "m-0")
    assert (first.correlation_id, first.content_type, first.type) == ("c", "text/plain", "T")
    assert first.reason == "unknown"
    assert first.headers == {"bide-due": "1000", "x": '[1,"1.5"]'}
    assert first.due is not None
    assert len({row.id for row in rows}) == 5
    assert [row.value for row in peek(spark, vhost_url, limit=2).collect()] == [b"0", b"1"]
    assert holds(channel, 5)


def test_dead_letters_have_their_reason_and_queue(spark: SparkSession, vhost_url: str, channel: Channel) -> None:
    channel.queue_declare(
        "short", arguments={"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"}
    )
    channel.basic_publish("", "short", b"late")
    assert holds(channel, 1)
    (row,) = peek(spark, vhost_url).select("reason", "failed_queue", "routing_key").collect()
    assert (row.reason, row.failed_queue, row.routing_key) == ("expired", "short", "short")


def test_invalid_reads_of_a_queue_are_refused(spark: SparkSession, vhost_url: str) -> None:
    with pytest.raises(AnalysisException, match=r"bide\.spark\.drain"):
        peek(spark, vhost_url, mode="drain").collect()
    with pytest.raises(AnalysisException, match="unknown option for reading a queue: startingoffsets"):
        peek(spark, vhost_url, startingOffsets="earliest").collect()
    with pytest.raises(Exception, match="there is no queue 'q' on the virtual host") as caught:
        peek(spark, vhost_url).collect()
    assert "--queue" not in str(caught.value), "which is not a Spark option"
    with pytest.raises(Exception, match="cannot read a queue, which has no offsets"):
        (
            spark.readStream.format("rabbitmq")
            .options(url=vhost_url, queue="q")
            .load()
            .writeStream.format("noop")
            .start()
            .awaitTermination(int(TIMEOUT))
        )


def test_a_drain_writes_and_then_acknowledges(
    spark: SparkSession, vhost_url: str, channel: Channel, tmp_path: Path
) -> None:
    fill(channel, 10)
    seen: list[int] = []

    def write(frame: DataFrame) -> None:
        # Held, and neither ready nor gone.
        seen.append(left(channel))
        frame.write.mode("append").parquet(str(tmp_path / "files"))

    done = bide.spark.drain(spark, "q", write=write, url=vhost_url, batch=4, limit=10, quiet=LONG)
    assert (done.messages, done.batches) == (10, 3)
    assert seen[0] == 6
    assert holds(channel, 0)
    rows = spark.read.parquet(str(tmp_path / "files")).collect()
    assert sorted(int(row.value) for row in rows) == list(range(10))
    assert bide.spark.drain(spark, "q", write=write, url=vhost_url, quiet="200ms").messages == 0


def test_a_drain_stops_at_its_limit(spark: SparkSession, vhost_url: str, channel: Channel) -> None:
    fill(channel, 5)
    values: list[bytes] = []
    done = bide.spark.drain(
        spark, "q", write=lambda frame: values.extend(row.value for row in frame.collect()), url=vhost_url, limit=3
    )
    assert (done.messages, values) == (3, [b"0", b"1", b"2"])
    assert holds(channel, 2)


def test_messages_that_could_not_be_written_stay_in_the_queue(
    spark: SparkSession, vhost_url: str, channel: Channel
) -> None:
    fill(channel, 4)

    def fail(frame: DataFrame) -> None:
        frame.collect()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        bide.spark.drain(spark, "q", write=fail, url=vhost_url, batch=2)
    assert holds(channel, 4)


def limited(channel: Channel, limit: int) -> None:
    """The queue once more, with a delivery limit."""
    channel.queue_delete("q")
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": limit})


@pytest.mark.parametrize("limit", [0, 3])
def test_repeated_write_failures_lose_nothing_to_the_delivery_limit(
    spark: SparkSession, vhost: Vhost, channel: Channel, limit: int
) -> None:
    """More often than the queue lets a message come back."""
    limited(channel, limit)
    fill(channel, 2)
    channel.basic_publish("", "q", b"without an id")
    ids: list[set[str]] = []

    def fail(frame: DataFrame) -> None:
        ids.append({row.id for row in frame.collect()})
        raise OSError("the disk is full")

    for _ in range(2 * limit + 2):
        with pytest.raises(OSError, match="the disk is full"):
            bide.spark.drain(
                spark,
                "q",
                write=fail,
                url=vhost.url,
                batch=3,
                quiet=LONG,
                management_url=vhost.broker.management_url,
            )
    assert holds(channel, 3)
    assert len(ids[0]) == 3
    assert all(one == ids[0] for one in ids)


def test_messages_of_a_killed_drain_stay_in_the_queue(spark: SparkSession, vhost: Vhost, channel: Channel) -> None:
    """It gives nothing back in order, and does so again and again."""
    limited(channel, 2)
    fill(channel, 2)
    channel.connection.close()

    def cut(frame: DataFrame) -> None:
        vhost.broker.rabbitmqctl("close_all_connections", "--vhost", vhost.name, "test")

    for _ in range(4):
        with pytest.raises(DeliveryLostError, match="2 written messages"):
            bide.spark.drain(
                spark,
                "q",
                write=cut,
                url=vhost.url,
                batch=2,
                quiet=LONG,
                management_url=vhost.broker.management_url,
            )
    values: list[bytes] = []
    bide.spark.drain(
        spark,
        "q",
        write=lambda frame: values.extend(row.value for row in frame.collect()),
        url=vhost.url,
        limit=2,
        quiet=LONG,
    )
    assert sorted(values) == [b"0", b"1"]


def test_messages_that_arrive_during_a_failed_drain_stay_in_the_queue(
    spark: SparkSession, vhost: Vhost, channel: Channel
) -> None:
    limited(channel, 2)
    fill(channel, 2)
    (first, *_), (second, *_) = channel.basic_get("q"), channel.basic_get("q")
    channel.basic_nack(first.delivery_tag)
    assert holds(channel, 1)
    (first, *_) = channel.basic_get("q")
    channel.basic_nack(second.delivery_tag)
    assert holds(channel, 1)

    def fail(_: DataFrame) -> None:
        # The next time is once too often. It came before the third is confirmed.
        channel.basic_nack(first.delivery_tag)
        fill(channel, 1)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        bide.spark.drain(spark, "q", write=fail, url=vhost.url, management_url=vhost.broker.management_url)
    assert holds(channel, 3)


def test_written_but_unacknowledged_messages_are_reported(spark: SparkSession, vhost: Vhost, channel: Channel) -> None:
    fill(channel, 2)
    channel.connection.close()

    def cut(frame: DataFrame) -> None:
        frame.collect()
        vhost.broker.rabbitmqctl("close_all_connections", "--vhost", vhost.name, "test")

    with pytest.raises(DeliveryLostError, match="2 written messages of 'q' could not be acknowledged"):
        bide.spark.drain(spark, "q", write=cut, url=vhost.url, batch=2, quiet=LONG)


def test_invalid_drains_are_refused(spark: SparkSession, vhost_url: str, channel: Channel) -> None:
    channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
    with pytest.raises(TargetNotFoundError):
        bide.spark.drain(spark, "missing", write=print, url=vhost_url)
    channel.basic_publish("", "s", b"x")
    with pytest.raises(BrokerError, match="'s' is a stream: nothing can be taken out of it"):
        bide.spark.drain(spark, "s", write=print, url=vhost_url)
    with pytest.raises(InvalidInputError, match="the batch 0"):
        bide.spark.drain(spark, "q", write=print, url=vhost_url, batch=0)


KILLED = """
import os, signal, sys
from pyspark.sql import SparkSession
import bide.spark

java, url, files = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.extraJavaOptions", java)
    .getOrCreate()
)

def write(frame):
    frame.write.mode("append").parquet(files)
    os.kill(os.getpid(), signal.SIGKILL)

bide.spark.drain(spark, "q", write=write, url=url, batch=3, quiet="5m")
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_driver_killed_before_its_acks_duplicates_but_loses_nothing(
    spark: SparkSession, vhost_url: str, channel: Channel, tmp_path: Path
) -> None:
    fill(channel, 3)
    files = str(tmp_path / "files")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, QUICK_JAVA, vhost_url, files], check=False, timeout=600, capture_output=True
    )
    assert killed.returncode == -9, killed.stderr
    done = bide.spark.drain(
        spark, "q", write=lambda frame: frame.write.mode("append").parquet(files), url=vhost_url, limit=3, quiet=LONG
    )
    assert done.messages == 3
    assert holds(channel, 0)
    # Twice, as documented, and marked as redelivered.
    rows = spark.read.parquet(files).collect()
    assert sorted(row.value for row in rows) == [b"0", b"0", b"1", b"1", b"2", b"2"]
    assert len({row.id for row in rows}) == 3


@pytest.mark.parametrize("management", [True, False], ids=["management", "amqp"])
def test_neither_a_look_nor_a_drain_hastens_what_waits(
    spark: SparkSession, vhost: Vhost, channel: Channel, management: bool
) -> None:
    """Of a level by its name, and of one under another name by its arguments or the keys of its messages."""
    url = vhost.broker.management_url if management else "http://127.0.0.1:1"
    level: dict[str, Argument] = {"x-message-ttl": 3_600_000, "x-dead-letter-exchange": "bide.v1.c"}
    binding = bide.Binding("bide.v1.m", "mine", "~m9")
    mine = bide.Topology(queues=[bide.Queue.quorum("mine", level)], bindings=[binding])
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Clock().core_topology() | mine)
        client.publish(b"x", to="q", delay="20m")
        client.publish(b"y", to="q", delay="9m")
    written: list[DataFrame] = []
    for queue in ("bide.v1.m20", "mine"):
        with pytest.raises(DelayQueueError, match="messages wait there until they are due"):
            bide.spark.drain(spark, queue, write=written.append, url=vhost.url, management_url=url)
        with pytest.raises(PySparkException, match="messages wait there until they are due"):
            spark.read.format("rabbitmq").options(url=vhost.url, queue=queue).load().collect()
    assert not written
    assert holds(channel, 0)
    for name in ("bide.v1.m20", "mine"):
        assert left(channel, name) == 1
