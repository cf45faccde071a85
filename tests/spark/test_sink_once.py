"""Rows that a stream stores once, however often and in whatever order they are sent."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pyarrow as pa
import pytest

from bide.errors import InvalidRowError, TargetNotFoundError
from bide.spark import stream_sending
from bide.spark.options import Options
from bide.spark.rows import RowConverter
from bide.spark.sending import WriteTask
from bide.spark.sink_settings import SinkSettings
from bide.spark.stream_sending import send_once
from bide.streams import frames
from bide.streams.connection import StreamConnection
from bide.streams.log import Address
from tests import stream_contents
from tests.polling import wait_until
from tests.spark.spark_processes import kill_python_workers
from tests.spark.streams import Streams
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

ROWS = 3_000
SMALL_FRAME = 50
PUBLISH_KEY = frames.PUBLISH.to_bytes(2)
PLACE = WriteTask(run="copy", partition=0)


def patient(url: str) -> str:
    """A URL that gives a broker without CPU time long to answer."""
    return f"{url}?timeout={TIMEOUT:.0f}"


@pytest.fixture
def address(vhost: Vhost) -> Address:
    with closing(pika.BlockingConnection(pika.URLParameters(vhost.url))) as connection:
        connection.channel().queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
    return Address.of(patient(vhost.url), stream_port(vhost.broker))


@pytest.fixture
def options(vhost: Vhost) -> dict[str, str]:
    port = stream_port(vhost.broker)
    given = {"url": patient(vhost.url), "streamPort": str(port), "timeout": f"{TIMEOUT:.0f}s"}
    return {**given, "queue": "s", "producerName": "copy"}


def table(ids: list[Any], values: list[str] | None = None) -> pa.RecordBatch:
    texts = [f"row {one}" for one in ids] if values is None else values
    return pa.record_batch([pa.array(texts), pa.array(ids)], names=["value", "publishing_id"])


def attempt(options: dict[str, str], *batches: pa.RecordBatch, place: WriteTask = PLACE) -> int:
    """One attempt at a task; returns the number of confirmed rows."""
    settings = SinkSettings.read(Options(options), {})
    rows = RowConverter(("value",), settings.constants, settings.infrastructure, bide_headers=settings.bide_headers)
    return send_once(iter(batches), rows, settings, place).confirmed


def shuffled(seed: int) -> list[pa.RecordBatch]:
    """The rows of the task in an order of this attempt, and in batches of its own sizes."""
    order = random.Random(seed)
    ids = order.sample(range(ROWS), ROWS)
    cuts = [0, *sorted(order.sample(range(1, ROWS), seed)), ROWS]
    return [table(ids[first:last]) for first, last in pairwise(cuts)]


def attempt_slowly(options: dict[str, str], seed: int) -> None:
    """An attempt that a test kills: it takes longer than any test."""
    attempt({**options, "messagesPerSecond": "50"}, *shuffled(seed))


def kill_in_mid_write(address: Address, options: dict[str, str], seed: int) -> None:
    before = stream_contents.count(address, "s")
    process = multiprocessing.get_context("spawn").Process(target=attempt_slowly, args=(options, seed))
    process.start()
    try:
        wait_until(
            lambda: stream_contents.count(address, "s") > before + 50 or not process.is_alive(),
            "the attempt has stored more rows",
        )
        assert process.is_alive(), "the kill comes in the middle"
    finally:
        process.kill()
        process.join()


def test_rows_of_killed_attempts_in_other_orders_are_stored_once(address: Address, options: dict[str, str]) -> None:
    for seed in (1, 2):
        kill_in_mid_write(address, options, seed)
    assert stream_contents.count(address, "s") < ROWS
    assert attempt(options, *shuffled(4)) == ROWS
    assert stream_contents.bodies(address, "s") == [f"row {number}" for number in range(ROWS)]
    assert attempt(options, *shuffled(4)) == ROWS
    assert len(stream_contents.bodies(address, "s")) == ROWS, "a write that is run again stores nothing twice"


def attempt_until_killed(options: dict[str, str], seed: int, frames_sent: int) -> None:
    """An attempt that is killed in the middle of a frame, while those before are not confirmed."""
    send, sent = StreamConnection._send, 0

    def send_or_die(self: StreamConnection, data: bytes, seconds: float | None = None) -> None:
        nonlocal sent
        sent += data[4:6] == PUBLISH_KEY
        if sent > frames_sent:
            send(self, data[: len(data) // 2], seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, data, seconds)

    stream_sending._FRAME_ROWS = SMALL_FRAME  # type: ignore[misc]  # in this process only
    StreamConnection._send = send_or_die  # type: ignore[method-assign]  # as above
    attempt(options, *shuffled(seed))


def test_rows_of_attempts_killed_with_frames_in_flight_are_stored_once(
    address: Address, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt begins while frames of a killed one may still arrive."""
    for seed, frames_sent in ((1, 2), (2, 10)):
        process = multiprocessing.get_context("spawn").Process(
            target=attempt_until_killed, args=(options, seed, frames_sent)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert stream_contents.count(address, "s") < ROWS
    monkeypatch.setattr(stream_sending, "_FRAME_ROWS", SMALL_FRAME)
    assert attempt(options, *shuffled(4)) == ROWS
    assert stream_contents.bodies(address, "s") == [f"row {number}" for number in range(ROWS)]


def test_two_attempts_at_the_same_time_store_each_row_once(
    address: Address, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_sending, "_FRAME_ROWS", SMALL_FRAME)
    with ThreadPoolExecutor(2) as pool:
        attempts = [pool.submit(attempt, options, *shuffled(seed)) for seed in (1, 2)]
        assert [one.result() for one in attempts] == [ROWS, ROWS]
    assert stream_contents.bodies(address, "s") == [f"row {number}" for number in range(ROWS)]


def test_an_attempt_with_other_rows_fails_and_publishes_nothing(address: Address, options: dict[str, str]) -> None:
    """A row has moved here from another partition, below the row that the stream has."""
    assert attempt(options, table([2, 4])) == 2
    for ids in ([1, 2, 4], [2], [2, 3], [4, 2, 0]):
        with pytest.raises(InvalidRowError, match=r"at partition 0 of a write published 2 of its rows"):
            attempt(options, table(ids))
    assert stream_contents.bodies(address, "s") == ["row 2", "row 4"]
    assert attempt({**options, "producerName": "copy"}, table([7]), place=WriteTask(run="another", partition=0)) == 1


def test_an_attempt_without_rows_fails_if_another_had_some(address: Address, options: dict[str, str]) -> None:
    """They would be in another partition now, and come twice."""
    assert attempt(options, table([1, 2])) == 2
    for batches in ((), (table([1]).slice(0, 0),)):
        with pytest.raises(InvalidRowError, match=r"at partition 0 of a write published 2 of its rows"):
            attempt(options, *batches)
    assert attempt(options, place=WriteTask(run="copy", partition=1)) == 0
    assert stream_contents.bodies(address, "s") == ["row 1", "row 2"]


def test_rows_that_the_stream_had_before_are_named_in_a_warning(
    address: Address, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Another write with the same ids and name would believe that its rows were stored."""
    assert attempt(options, table([1, 2])) == 2
    assert not caplog.records
    assert attempt(options, table([1, 2], ["other", "rows"])) == 2
    assert "has 2 rows with the ids of partition 0 already" in caplog.text
    assert stream_contents.bodies(address, "s") == ["row 1", "row 2"]


def test_an_attempt_whose_rows_the_stream_drops_for_another_one_fails(
    address: Address, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two attempts at the same time with different rows, the stream keeps those with the larger digest."""
    first, second = table([1, 2]), table([1, 3])
    if stream_sending._digest(pa.chunked_array([first[1]])) > stream_sending._digest(pa.chunked_array([second[1]])):
        first, second = second, first
    publish = stream_sending._publish

    def publish_after_the_other(*args: Any) -> None:
        monkeypatch.setattr(stream_sending, "_publish", publish)
        attempt(options, second)
        publish(*args)

    monkeypatch.setattr(stream_sending, "_publish", publish_after_the_other)
    with pytest.raises(InvalidRowError, match="and this one has other rows"):
        attempt(options, first)
    assert sorted(stream_contents.bodies(address, "s")) == sorted(second[0].to_pylist())


def test_a_stream_deleted_in_mid_write_is_named_at_once(
    vhost: Vhost, options: dict[str, str], address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, taken = stream_sending._messages, 0

    def messages_and_deletion(*args: Any, **more: Any) -> Iterator[bytes]:
        nonlocal taken
        for message in messages(*args, **more):
            taken += 1
            if taken == 10 * SMALL_FRAME:
                with closing(pika.BlockingConnection(pika.URLParameters(vhost.url))) as connection:
                    connection.channel().queue_delete("s")
            yield message

    monkeypatch.setattr(stream_sending, "_messages", messages_and_deletion)
    monkeypatch.setattr(stream_sending, "_FRAME_ROWS", SMALL_FRAME)
    with pytest.raises(TargetNotFoundError, match="there is no stream 's' on the virtual host"):
        attempt(options, *shuffled(1))
    # Until the deletion, and the frames in flight.
    assert taken <= 15 * SMALL_FRAME


def test_ids_can_be_text_and_order_the_rows(address: Address, options: dict[str, str]) -> None:
    assert attempt(options, table(["b", "ä", "a"]), table(["c", "B"])) == 5
    assert attempt(options, table(["c", "ä"]), table(["a", "b", "B"])) == 5
    assert stream_contents.bodies(address, "s") == ["row B", "row a", "row b", "row c", "row ä"]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([table([1, None])], "row 1: the column publishing_id is null"),
        ([table([1, 2]), table([3, 1])], "several rows of this partition have the publishing_id 1"),
        ([table([1, 1])], "several rows of this partition have the publishing_id 1"),
        ([table([1]), table([2], ["x" * (1 << 20)])], "row 1: its message has 1,048,"),
    ],
)
def test_rows_that_cannot_be_stored_once_are_refused_before_any_is_sent(
    address: Address, options: dict[str, str], batches: list[pa.RecordBatch], expected: str
) -> None:
    with pytest.raises(InvalidRowError, match=expected) as caught:
        attempt(options, *batches)
    assert "nothing was sent" in str(caught.value)
    assert stream_contents.bodies(address, "s") == []


def test_the_largest_message_fits(address: Address, options: dict[str, str]) -> None:
    with pytest.raises(InvalidRowError) as caught:
        attempt(options, table([1], ["x" * (1 << 20)]))
    excess = int(str(caught.value).partition("its message has ")[2].partition(" ")[0].replace(",", ""))
    room = int(str(caught.value).partition("has room for ")[2].partition(":")[0].replace(",", ""))
    body = "x" * ((1 << 20) - (excess - room))
    assert attempt(options, table([1, 2], [body, "small"])) == 2
    assert stream_contents.bodies(address, "s") == [body, "small"]


def test_many_partitions_are_refused(address: Address, options: dict[str, str]) -> None:
    assert attempt(options, table([1]), place=WriteTask(run="copy", partition=199)) == 1
    with pytest.raises(InvalidRowError, match=r"write df\.coalesce\(200\)"):
        attempt(options, table([1]), place=WriteTask(run="copy", partition=200))


def test_an_empty_task_needs_no_stream(options: dict[str, str]) -> None:
    assert attempt(options) == 0
    assert attempt(options, table([1]).slice(0, 0)) == 0
    with pytest.raises(TargetNotFoundError, match="there is no stream 's'"):
        attempt(options, table([1]))


def test_a_table_that_is_written_twice_is_stored_once(streams: Streams, options: dict[str, str]) -> None:
    streams.declare("s", "source")
    streams.fill("source", range(20), message_id="m", headers={"tenant": "acme"})
    source = streams.batch(stream="source", columns="offset,value,headers_json")
    copy = source.withColumnRenamed("offset", "publishing_id")
    for _ in range(2):
        copy.write.format("rabbitmq").mode("append").options(**options).save()
    rows = streams.batch(stream="s", includeHeaders="true").collect()
    assert sorted(int(row.value) for row in rows) == list(range(20))
    assert {(row.exchange, row.routing_key, row.headers["tenant"]) for row in rows} == {("", "s", "acme")}


@pytest.mark.long
@pytest.mark.slow
def test_a_query_with_a_shuffle_and_killed_workers_stores_each_row_once(
    streams: Streams, options: dict[str, str], tmp_path: Path
) -> None:
    rows, source = 2_000, tmp_path / "in"
    streams.declare("s")
    address = Address.of(options["url"], int(options["streamPort"]))
    frame = streams.spark.range(0, rows, 1, 4).selectExpr("cast(id as string) as value", "id as publishing_id")
    frame.write.parquet(str(source))

    def start(**more: str) -> StreamingQuery:
        stream = (
            streams.spark.readStream.schema("value string, publishing_id long")
            .option("maxFilesPerTrigger", 2)
            .parquet(str(source))
            # A shuffle gives the rows of a partition in the order in which they arrive.
            .repartition(3, "publishing_id")
        )
        given = {**options, **more, "checkpointLocation": str(tmp_path / "checkpoint")}
        return stream.writeStream.format("rabbitmq").options(**given).trigger(availableNow=True).start()

    def kill_in_mid_query() -> None:
        before = stream_contents.count(address, "s")
        query = start(messagesPerSecond="20")
        wait_until(
            lambda: stream_contents.count(address, "s") > before + 50 or not query.isActive, "more rows are stored"
        )
        # One that has nothing to do at the moment is replaced without a word.
        wait_until(lambda: not (query.isActive and kill_python_workers(streams.spark) >= 0), "the query has ended")
        assert query.exception() is not None, "the kill comes in the middle"

    for _ in range(2):
        kill_in_mid_query()
    assert stream_contents.count(address, "s") < rows
    start().awaitTermination()
    assert sorted(map(int, stream_contents.bodies(address, "s"))) == list(range(rows))
