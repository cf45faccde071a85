"""Rows with keys: schedules that are applied once, however often their task is repeated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pytest

import bide
from bide.errors import InvalidRowError
from bide.schedules.names import ScheduleNames, partition_of
from bide.spark.rows import RowConverter
from bide.spark.sending import TaskResult, WriteTask, send
from bide.spark.sink_settings import SinkSettings
from tests.broker.schedule_log import gating
from tests.polling import wait_until
from tests.spark.receiving import drain, new_queue
from tests.spark.spark_processes import kill_python_workers
from tests.support import Vhost
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_Result = TypeVar("_Result")

ROWS = 16_000
SLOWLY = {"window": "2", "messagesPerSecond": "400"}
"""For a write that is killed: it lasts 20 s or longer, and the kill comes in its middle even if this process pauses."""
DUE = datetime(2040, 1, 2, tzinfo=UTC)
LATER = {"deliver_at": DUE.isoformat()}
SOME_RECORDS = 30
"""Records in one partition of the log, long before the last of 2,000."""


def with_gate(url: str, state: Path, use: Callable[[bide.Client], Awaitable[_Result]]) -> _Result:
    """What a client does while a gate is running."""

    async def run() -> _Result:
        async with gating(url, state), bide.connect(url, timeout=timedelta(seconds=TIMEOUT)) as client:
            return await use(client)

    return asyncio.run(run())


async def versions(client: bide.Client) -> dict[str, str]:
    return {one.key: str(one.version) async for one in client.list_scheduled()}


async def meddle(client: bide.Client) -> tuple[set[str], dict[str, str]]:
    """Cancel all waiting keys that begin with ``c``, and replace all others; returns the former, and the versions of
    the latter."""
    waiting = await versions(client)
    assert 0 < len(waiting) < ROWS, "the kill came in the middle"
    await client.cancel_scheduled(prefix="c")
    others = [bide.OutgoingSchedule(b"", key=key, to="q", deliver_at=DUE) for key in waiting if key[0] == "r"]
    replaced = {one.message.key: str(one.schedule_id) async for one in client.publish_many(others)}  # type: ignore[union-attr]  # all are schedules
    assert replaced
    return {key for key in waiting if key[0] == "c"}, replaced


def assert_nothing_came_back(
    waiting: dict[str, str], every: set[str], cancelled: set[str], replaced: dict[str, str]
) -> None:
    assert waiting.keys() == every - cancelled, "every row that no one cancelled is there, and no other"
    assert {key: waiting[key] for key in replaced} == replaced, "a replacement stays"


@pytest.fixture
def log(vhost: Vhost) -> str:
    """The stream of one partition of the log, which the first schedule of a client would declare."""

    async def declare() -> None:
        async with bide.connect(vhost.url) as client:
            await client.declare(ScheduleNames().topology())

    asyncio.run(declare())
    return ScheduleNames().log(0)


def wait_for_records(url: str, log: str) -> None:
    """Read the log until some rows are in it, because the broker counts a stream's messages every 5 seconds only."""
    first = {"x-stream-offset": "first"}
    timeout = timedelta(seconds=TIMEOUT)
    with bide.connect_sync(url) as client, client.consume(log, arguments=first, timeout=timeout) as records:
        for number, record in enumerate(records):
            record.ack()
            if number == SOME_RECORDS:
                return
    raise AssertionError(f"less than {SOME_RECORDS} records came")


def keyed(spark: SparkSession, rows: int = ROWS, partitions: int = 2) -> DataFrame:
    return spark.range(0, rows, 1, partitions).selectExpr(
        "cast(id as string) as value", "concat(if(id % 2 = 0, 'c', 'r'), id) as key"
    )


ALL_KEYS = {f"{'cr'[number % 2]}{number}" for number in range(ROWS)}


def write(spark: SparkSession, url: str, **options: str) -> None:
    writer: Any = keyed(spark).write.format("rabbitmq").mode("append")
    writer.options(url=url, queue="q", idPrefix="job-1", **LATER, **options).save()


@pytest.mark.slow
def test_a_repeated_write_after_a_kill_brings_back_nothing_that_was_cancelled_or_replaced(
    spark: SparkSession, vhost: Vhost, log: str, tmp_path: Path
) -> None:
    ended = threading.Event()

    def kill() -> None:
        wait_for_records(vhost.url, log)
        # One that has nothing to do at the moment is replaced without a word.
        wait_until(lambda: ended.is_set() or kill_python_workers(spark) < 0, "the write has ended")

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            # In this thread: in others Spark looks in vain for data sources that are written in Python.
            with pytest.raises(Exception, match="Python worker exited unexpectedly"):
                write(spark, vhost.url, **SLOWLY)
        finally:
            ended.set()
            killing.result()
    cancelled, replaced = with_gate(vhost.url, tmp_path / "gate", meddle)
    write(spark, vhost.url)
    waiting = with_gate(vhost.url, tmp_path / "gate", versions)
    assert_nothing_came_back(waiting, ALL_KEYS, cancelled, replaced)


@pytest.mark.long
@pytest.mark.slow
def test_a_restarted_query_brings_back_nothing_that_was_cancelled_or_replaced(
    spark: SparkSession, vhost: Vhost, log: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    keyed(spark, partitions=4).write.parquet(str(source))

    def start(**more: str) -> StreamingQuery:
        stream = (
            spark.readStream.schema("value string, key string").option("maxFilesPerTrigger", 1).parquet(str(source))
        )
        options = {"url": vhost.url, "queue": "q", "checkpointLocation": str(tmp_path / "checkpoint"), **LATER}
        return stream.writeStream.format("rabbitmq").options(**options, **more).trigger(availableNow=True).start()

    query = start(**SLOWLY)
    wait_for_records(vhost.url, log)
    # One that has nothing to do at the moment is replaced without a word.
    wait_until(lambda: not (query.isActive and kill_python_workers(spark) >= 0), "the query has ended")
    assert query.exception() is not None
    cancelled, replaced = with_gate(vhost.url, tmp_path / "gate", meddle)
    start().awaitTermination()
    waiting = with_gate(vhost.url, tmp_path / "gate", versions)
    assert_nothing_came_back(waiting, ALL_KEYS, cancelled, replaced)


def test_keyed_rows_are_delivered_with_their_key_and_properties(
    spark: SparkSession, vhost: Vhost, tmp_path: Path
) -> None:
    queue = new_queue(vhost.url)
    frame = spark.sql(
        f"select 'soon' as value, 'a' as key, '{queue}' as queue, '1s' as delay, map('tenant', 'acme') as headers"
        " union all select 'first', 'b', 'nowhere', '1h', null"
        f" union all select 'last', 'b', '{queue}', '1200ms', null"
    )
    frame.coalesce(1).write.format("rabbitmq").mode("append").options(url=vhost.url, type="Remind").save()

    async def receive(client: bide.Client) -> list[Any]:
        return await asyncio.to_thread(drain, vhost.url, queue, 2)

    found = {one.body: one for one in with_gate(vhost.url, tmp_path / "gate", receive)}
    assert {body: one.key for body, one in found.items()} == {b"soon": "a", b"last": "b"}, (
        "the last row of a key decides"
    )
    soon = found[b"soon"]
    assert (soon.type, soon.headers["tenant"]) == ("Remind", "acme")
    assert soon.message_id is not None
    assert soon.message_id.split("-")[1:3] == ["0", "0"], "an id that the sink generates"


def rows_of(*keys: str | None) -> pa.RecordBatch:
    return pa.record_batch([pa.array([b"x"] * len(keys)), pa.array(keys, pa.string())], ["value", "key"])


def test_rows_that_are_left_out_the_second_time_change_no_id(vhost: Vhost, tmp_path: Path) -> None:
    """In a repeated micro-batch, more rows are overdue."""
    settings = SinkSettings.make(vhost.url, infrastructure=bide.Clock(), constants={"to": "q"}, past="drop")
    rows = RowConverter(("value", "key", "deliver_at"), settings.constants, settings.infrastructure)
    dues = [DUE - timedelta(minutes=number) for number in range(2_000)]
    batch = rows_of(*(f"k{number}" for number in range(2_000))).append_column(
        "deliver_at", pa.array(dues, pa.timestamp("us", "UTC"))
    )

    def attempt(begun: datetime) -> TaskResult:
        return send(iter([batch]), rows, settings, WriteTask(run="w", partition=0), file="x", begun=begun)

    assert attempt(datetime.now(UTC)).confirmed == 2_000

    async def cancel(client: bide.Client) -> int:
        await client.cancel_scheduled(prefix="k")
        return await client.count_scheduled()

    assert with_gate(vhost.url, tmp_path / "gate", cancel) == 0
    again = attempt(DUE - timedelta(minutes=1_000))
    assert 0 < again.dropped < 2_000
    assert again.confirmed == 2_000 - again.dropped
    assert with_gate(vhost.url, tmp_path / "gate", versions) == {}


def test_other_rows_of_a_repeated_task_are_scheduled(vhost: Vhost, tmp_path: Path) -> None:
    """They must not be taken for the rows that were at their place before."""
    constants = {"to": "q", "deliver_at": DUE}
    settings = SinkSettings.make(vhost.url, infrastructure=bide.Clock(), constants=constants)
    rows = RowConverter(("value", "key"), constants, settings.infrastructure)
    other = next(f"d{number}" for number in range(1_000) if partition_of(f"d{number}") == partition_of("a"))
    for keys in (("a", "b", "c"), (other, "b", "c")):
        send(iter([rows_of(*keys)]), rows, settings, WriteTask(run="w", partition=0), file="x", begun=datetime.now(UTC))
    assert with_gate(vhost.url, tmp_path / "gate", versions).keys() == {"a", "b", "c", other}


def test_rows_without_a_valid_key_or_a_time_fail_the_task_or_are_rejected(
    spark: SparkSession, vhost: Vhost, tmp_path: Path
) -> None:
    frame = spark.sql(
        "select 'a' as value, 'good' as key, '1h' as delay union all select 'b', cast(null as string), '1h'"
        " union all select 'c', '', '1h' union all select 'd', repeat('x', 256), '1h'"
        " union all select 'e', 'no-time', null"
    ).coalesce(1)
    writer = frame.write.format("rabbitmq").mode("append").options(url=vhost.url, queue="q")
    with pytest.raises(Exception, match=InvalidRowError.__name__) as raised:
        writer.save()
    assert "4 of the rows 0 to 4 of this partition cannot be sent, and nothing was sent: row 1: the column key " in str(
        raised.value
    )
    writer.options(rejects=str(tmp_path / "rejects")).save()
    rejected = spark.read.parquet(str(tmp_path / "rejects"))
    assert {(one["value"], one["reject_status"]) for one in rejected.collect()} == {(x, "invalid") for x in "bcde"}
    assert "request" not in rejected.columns
    assert with_gate(vhost.url, tmp_path / "gate", versions).keys() == {"good"}
