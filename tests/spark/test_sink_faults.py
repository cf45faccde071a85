"""Spark killed during a write: every message at least once, duplicates with equal ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.conftest import clock_url
from tests.polling import wait_until
from tests.spark.receiving import drain_all, new_queue
from tests.spark.spark_processes import QUICK_JAVA, Counter, kill_python_workers, started

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["clock_url"]

ROWS = 16_000
SLOWLY = {"window": "200"}
LONG = {"messagesPerSecond": "500"}
"""For a write that is killed: it lasts 16 s or longer, and the kill comes in its middle even if this process pauses."""

STREAM = """
import sys
from pyspark.sql import SparkSession
java, url, queue, source, checkpoint = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", java).getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
stream = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).parquet(source).writeStream
options = {"url": url, "queue": queue, "checkpointLocation": checkpoint, "window": "200", "messagesPerSecond": "500"}
stream.format("rabbitmq").options(**options).trigger(availableNow=True).start().awaitTermination()
"""


@pytest.fixture
def queue(clock_url: str) -> str:
    return new_queue(clock_url)


@pytest.fixture
def counted(clock_url: str, queue: str) -> Iterator[Counter]:
    counter = Counter(clock_url, queue)
    yield counter
    counter.close()


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Path:
    """Four files, each a micro-batch of its own."""
    path = tmp_path / "in"
    spark.range(0, ROWS, 1, 4).selectExpr("cast(id as string) as value").write.parquet(str(path))
    return path


def assert_at_least_once_with_equal_ids(url: str, queue: str, sent_before: int) -> None:
    bodies: dict[str | None, set[bytes]] = {}
    ids: dict[bytes, set[str | None]] = {}
    for one in drain_all(url, queue, ROWS):
        bodies.setdefault(one.message_id, set()).add(one.body)
        ids.setdefault(one.body, set()).add(one.message_id)
    assert {int(body) for body in ids} == set(range(ROWS)), "every message arrived"
    assert all(len(one) == 1 for one in ids.values()), "a message that came twice has the same id"
    assert all(len(one) == 1 for one in bodies.values()), "and no other message has it"
    assert 0 < sent_before < ROWS, "the kill came in the middle"


def start(spark: SparkSession, source: Path, **options: str) -> StreamingQuery:
    stream = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).parquet(str(source))
    writer = stream.writeStream.format("rabbitmq").options(**options, **SLOWLY)
    return writer.trigger(availableNow=True).start()


@pytest.mark.slow
def test_a_killed_python_worker_in_a_batch_write_loses_nothing(
    spark: SparkSession, clock_url: str, queue: str, counted: Counter
) -> None:
    def write(**more: str) -> None:
        frame = spark.range(0, ROWS, 1, 2).selectExpr("cast(id as string) as value")
        writer: Any = frame.write.format("rabbitmq").mode("append")
        writer.options(url=clock_url, queue=queue, idPrefix="job-1", **SLOWLY, **more).save()

    def kill() -> int:
        wait_until(lambda: counted() > 1_000, "a thousand messages are there")
        return kill_python_workers(spark)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        # In this thread: in others Spark looks in vain for data sources that are written in Python.
        with pytest.raises(Exception, match="Python worker exited unexpectedly"):
            write(**LONG)
        assert killing.result()
    sent_before = counted()
    write()
    assert_at_least_once_with_equal_ids(clock_url, queue, sent_before)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_python_worker_of_a_stream_loses_nothing(
    spark: SparkSession, clock_url: str, queue: str, counted: Counter, source: Path, tmp_path: Path
) -> None:
    options = {"url": clock_url, "queue": queue, "checkpointLocation": str(tmp_path / "checkpoint")}
    query = start(spark, source, **options, **LONG)
    wait_until(lambda: counted() > ROWS // 4 + 500, "the second micro-batch has begun")
    # One that has nothing to do at the moment is replaced without a word.
    wait_until(lambda: not (query.isActive and kill_python_workers(spark) >= 0), "the query has ended")
    assert query.exception() is not None
    sent_before = counted()
    start(spark, source, **options).awaitTermination()
    assert_at_least_once_with_equal_ids(clock_url, queue, sent_before)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_jvm_of_a_stream_loses_nothing(
    spark: SparkSession, clock_url: str, queue: str, counted: Counter, source: Path, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    with started([sys.executable, "-c", STREAM, QUICK_JAVA, clock_url, queue, source, checkpoint]) as program:
        program.wait_until(lambda: counted() > ROWS // 4 + 500, "the second micro-batch has begun")
        program.kill()
    sent_before = counted()
    start(spark, source, url=clock_url, queue=queue, checkpointLocation=checkpoint).awaitTermination()
    assert_at_least_once_with_equal_ids(clock_url, queue, sent_before)
