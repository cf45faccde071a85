"""Queries that wait for a least number of messages, and the lag in their progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from bide.spark.source import LIMITS
from tests.polling import wait_until
from tests.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class IdleTriggers(StreamingQueryListener):
    """The time of the last trigger that started no batch."""

    def __init__(self) -> None:
        self._last = datetime.min.replace(tzinfo=UTC)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        """Ignore it."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 (Spark's name)
        """Ignore it."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 (Spark's name)
        """Keep the time."""
        self._last = datetime.fromisoformat(event.timestamp)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 (Spark's name)
        """Ignore it."""

    def wait_for_one(self) -> None:
        """Wait for such a trigger, which begins after this call."""
        now = datetime.now(UTC)
        wait_until(lambda: self._last > now, "a trigger has started no batch")


@pytest.fixture
def idle_triggers(spark: SparkSession) -> Iterator[IdleTriggers]:
    listener, interval = IdleTriggers(), "spark.sql.streaming.noDataProgressEventInterval"
    # Spark's default is a report in ten seconds.
    spark.conf.set(interval, "100")
    spark.streams.addListener(listener)
    yield listener
    spark.streams.removeListener(listener)
    spark.conf.unset(interval)


@contextmanager
def running(streams: Streams, folder: Path, **options: Any) -> Iterator[StreamingQuery]:
    writer = streams.query(**options).writeStream.format("parquet").option("checkpointLocation", str(folder / "c"))
    query = writer.start(str(folder / "f"))
    try:
        yield query
    finally:
        query.stop()


def has_rows(query: StreamingQuery, *expected: int) -> bool:
    """Whether the batches of a query have these numbers of rows."""
    assert query.exception() is None
    found = [one.numInputRows for one in query.recentProgress if one.numInputRows]
    assert found == list(expected[: len(found)])
    return len(found) == len(expected)


@pytest.mark.skipif(not LIMITS, reason="PySpark before 4.2 has no limits")
def test_a_query_waits_for_the_least_number_of_messages_or_for_the_delay(
    streams: Streams, idle_triggers: IdleTriggers, tmp_path: Path
) -> None:
    streams.declare("s")
    options = {"stream": "s", "startingOffsets": "earliest", "minOffsetsPerTrigger": 5}
    streams.fill("s", ["first"])
    with running(streams, tmp_path, **options) as query:
        wait_until(partial(has_rows, query, 1), "the first batch of a run does not wait")
        streams.fill("s", range(3))
        idle_triggers.wait_for_one()
        streams.fill("s", range(2))
        wait_until(partial(has_rows, query, 1, 5), "five messages are enough")
        latest = json.loads(query.recentProgress[-1].sources[0].latestOffset)
        assert (latest["streams"], latest["behind"]) == ({"s": 6}, {"s": 0})
        assert latest["arrivingPerSecond"] > 0
    streams.fill("s", ["first of the next run"])
    with running(streams, tmp_path, **options, maxTriggerDelay="2s") as query:
        wait_until(partial(has_rows, query, 1), "the first batch of a run does not wait")
        streams.fill("s", ["one"])
        wait_until(partial(has_rows, query, 1, 1), "the delay is over")
