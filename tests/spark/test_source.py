"""Real streams, read with a real Spark."""

from __future__ import annotations

import json
import shutil
import time
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest
from pyspark.errors import PySparkException

from bide.spark.offsets import document
from bide.spark.source import LIMITS
from bide.streams.log import Address
from tests import stream_publisher
from tests.polling import wait_until
from tests.spark.streams import Streams
from tests.support import RawText, stream_port
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


def local(seconds: float) -> datetime:
    """A time as Spark gives it to Python: of the machine's zone, and without it."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().replace(tzinfo=None)


def values(frame: DataFrame) -> list[str]:
    return sorted(row.value.decode() for row in frame.select("value").collect())


def moment() -> int:
    """A time in milliseconds between stored and later messages, since the broker's clock has milliseconds."""
    time.sleep(0.05)  # tens of milliseconds after the stored ones
    between = time.time_ns() // 1_000_000
    time.sleep(0.05)  # and before the later ones
    return between


def test_a_table_ends_at_the_end_of_the_stream_at_first_use(streams: Streams) -> None:
    streams.declare("s")
    table = streams.batch(stream="s")
    streams.fill("s", "a")
    assert values(table) == ["a"]
    streams.fill("s", "b")
    assert values(table) == ["a"]
    assert values(streams.batch(stream="s")) == ["a", "b"]


def test_every_column_is_read(streams: Streams, release: tuple[int, ...]) -> None:
    streams.declare("s")
    streams.channel.exchange_declare("shop", "topic")
    streams.channel.queue_bind("s", "shop", "#")
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    streams.channel.basic_publish(
        "shop",
        "order.created",
        b"hello",
        pika.BasicProperties(
            message_id="m-1",
            correlation_id="c-1",
            content_type="text/plain",
            type="Shop.OrderCreated",
            headers={
                "bide-due": 1700000000123,
                "bide-sent": 1600000000000,
                "n": 5,
                "b": True,
                "t": "x",
                "raw": b"\xff",
            },
        ),
    )
    streams.fill("s", ["bare"])
    first, bare = streams.batch(stream="s", includeHeaders=True).orderBy("offset").collect()
    assert first.asDict() == {
        "value": b"hello",
        "stream": "s",
        "offset": 0,
        "timestamp": first.timestamp,
        "exchange": "shop",
        "routing_key": "order.created",
        "message_id": "m-1",
        "correlation_id": "c-1",
        "content_type": "text/plain",
        "due": local(1700000000.123),
        "scheduled": local(1600000000),
        "headers": {
            "bide-due": "1700000000123",
            "bide-sent": "1600000000000",
            "n": "5",
            "b": "true",
            "t": "x",
            "raw": "/w==",
        },
        "type": "Shop.OrderCreated",
        "content_encoding": None,
        "reply_to": None,
        "app_id": None,
        "user_id": None,
        "priority": None,
        "expiration": None,
        "persistent": None if release < (4,) else False,
        "creation_time": None,
    }
    stored = first.timestamp.astimezone(UTC)
    assert before <= stored <= datetime.now(UTC)
    assert (bare.value, bare.exchange, bare.routing_key, bare.offset) == (b"bare", "", "s", 1)
    assert (bare.message_id, bare.due, bare.scheduled, bare.headers, bare.type) == (None,) * 5
    assert "headers" not in streams.batch(stream="s").columns


def test_list_and_table_headers_become_json_on_4_0(streams: Streams, release: tuple[int, ...]) -> None:
    values: dict[str, Any] = {"list": [1, "a"], "table": {"k": "v"}}
    streams.declare("s")
    streams.fill("s", ["body"], headers={"n": 5, **values, **{f"x-{name}": value for name, value in values.items()}})
    (row,) = streams.batch(stream="s", includeHeaders=True).collect()
    # What begins with x- is an annotation of RabbitMQ 4, which may be anything.
    kept = {"x-list": '[1,"a"]', "x-table": '{"k":"v"}'} if release >= (4,) else {}
    assert row.headers == {"n": "5", **kept}


def test_text_that_is_not_utf_8_does_not_stop_reading(streams: Streams, release: tuple[int, ...]) -> None:
    """RabbitMQ takes any bytes for a text, and stores them as text in most places."""
    bad = RawText(b"o\xff\xfek")
    streams.declare("s")
    streams.channel.exchange_declare("shop", "topic")
    streams.channel.queue_bind("s", "shop", "#")
    properties = pika.BasicProperties(
        message_id=bad, correlation_id=bad, content_type=bad, type=bad, headers={"a": bad, bad: "name", "x-b": bad}
    )
    streams.channel.basic_publish("shop", bad, b"body", properties)
    streams.fill("s", ["after"])
    odd, after = streams.batch(stream="s", includeHeaders=True).orderBy("offset").collect()
    assert (odd.value, after.value) == (b"body", b"after")
    for name in ("routing_key", "message_id", "correlation_id", "content_type", "type"):
        assert odd[name] == "o\\xff\\xfek", name
    assert odd.headers == {"a": "b//+aw==", "o\\xff\\xfek": "name", "x-b": "b//+aw=="}


def test_undecodable_entries_do_not_hide_later_messages(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", ["before"])
    address = Address.of(streams.vhost.url, stream_port(streams.vhost.broker))
    lie, snappy = (
        stream_publisher.batch([b"one", b"two"], records=3),
        stream_publisher.batch([b"one", b"two"], compression=2),
    )
    entries = [stream_publisher.message(b"\0Sw" + b"\0" * 3_000), lie, snappy]
    assert stream_publisher.publish(address, "s", entries) == entries
    streams.fill("s", ["after"])
    # Also where the odd batch is cut into several tasks.
    rows = streams.batch(stream="s", undecodable="raw", minPartitions=6).orderBy("offset").collect()
    odd = [b"\0Sw" + b"\0" * 3_000, lie, snappy]
    assert [bytes(row.value) for row in rows] == [b"before", *odd, b"after"]
    assert [row.offset for row in rows] == [0, 1, 2, 5, 7]
    reasons = ["ends too early", "does not consist of the 3", "compressed with snappy"]
    assert all(part in row.undecodable for row, part in zip(rows[1:4], reasons, strict=True))
    assert (rows[0].undecodable, rows[4].undecodable) == (None, None)
    streams.run(tmp_path / "checkpoint", tmp_path / "files", stream="s", startingOffsets="earliest", undecodable="raw")
    stored = streams.spark.read.parquet(str(tmp_path / "files")).orderBy("offset").collect()
    assert [(row.offset, bytes(row.value)) for row in stored] == [(row.offset, bytes(row.value)) for row in rows]
    with pytest.raises(PySparkException, match=r"message at offset 1 of stream 's' .* undecodable=raw"):
        streams.batch(stream="s").collect()


def test_a_schema_chooses_columns(streams: Streams) -> None:
    streams.declare("s")
    streams.fill("s", ["a"])
    chosen = streams.spark.read.format("rabbitmq").options(**streams.options(stream="s")).schema("offset long").load()
    assert [row.asDict() for row in chosen.collect()] == [{"offset": 0}]


def test_a_batch_reads_between_offsets(streams: Streams) -> None:
    streams.declare("a", "b", "empty")
    streams.fill("a", range(10))
    between = moment()
    streams.fill("b", range(10, 20))
    assert values(streams.batch(stream="a,b,empty")) == sorted(map(str, range(20)))
    start, end = json.dumps({"a": 3, "b": "earliest"}), json.dumps({"a": "latest", "b": 2})
    assert values(streams.batch(stream="a,b", startingOffsets=start, endingOffsets=end)) == sorted(
        map(str, range(3, 12))
    )
    assert values(streams.batch(stream="a,b", startingTimestamp=between)) == sorted(map(str, range(10, 20)))
    assert values(streams.batch(stream="a,b", endingTimestamp=between)) == sorted(map(str, range(10)))
    assert values(streams.batch(stream="empty")) == []


def test_offsets_can_be_given_by_time(streams: Streams, tmp_path: Path) -> None:
    """Of a batch and of a query, in every way to write one down, for all streams or for one of them."""
    streams.declare("a", "b")
    streams.fill("a", range(5))
    streams.fill("b", range(10, 15))
    between = moment()
    streams.fill("a", range(5, 10))
    streams.fill("b", range(15, 20))
    utc = datetime.fromtimestamp(between / 1000, UTC).isoformat()
    elsewhere = datetime.fromtimestamp(between / 1000, timezone(timedelta(hours=-7))).isoformat()
    before, after = [*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]
    assert values(streams.batch(stream="a,b", startingOffsets=utc)) == sorted(map(str, after))
    assert values(streams.batch(stream="a,b", endingOffsets=elsewhere)) == sorted(map(str, before))
    start, end = json.dumps({"a": elsewhere, "b": 2}), json.dumps({"a": "latest", "b": utc})
    expected = [*range(5, 10), *range(12, 15)]
    assert values(streams.batch(stream="a,b", startingOffsets=start, endingOffsets=end)) == sorted(map(str, expected))

    streams.run(tmp_path / "checkpoint", tmp_path / "files", stream="a,b", startingTimestamp=between)
    assert streams.stored(tmp_path / "files") == [str(number) for number in after]
    # Only a new query heeds where to begin.
    streams.fill("b", [20])
    streams.run(tmp_path / "checkpoint", tmp_path / "files", stream="a,b", startingTimestamp=between)
    assert streams.stored(tmp_path / "files") == [str(number) for number in [*after, 20]]


def test_min_partitions_splits_a_stream_into_tasks(streams: Streams) -> None:
    streams.declare("s")
    streams.fill("s", range(10))
    frame = streams.batch(stream="s", minPartitions=4)
    assert frame.rdd.getNumPartitions() == 4
    assert values(frame) == sorted(map(str, range(10)))


def test_every_partition_of_a_super_stream_is_read(streams: Streams) -> None:
    streams.declare_super("super", *range(3))
    for number in range(3):
        streams.fill(f"super-{number}", [number])
    rows = streams.batch(superStream="super").collect()
    assert {(row.stream, row.value.decode()) for row in rows} == {
        (f"super-{number}", str(number)) for number in range(3)
    }


def test_a_query_continues_from_its_checkpoint(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    checkpoint, files = tmp_path / "checkpoint", tmp_path / "files"
    streams.fill("s", range(5))
    streams.run(checkpoint, files, stream="s", startingOffsets="earliest")
    streams.run(checkpoint, files, stream="s", startingOffsets="earliest")
    streams.fill("s", range(5, 8))
    streams.run(checkpoint, files, stream="s", startingOffsets="earliest")
    assert streams.stored(files) == [str(number) for number in range(8)]


def test_max_offsets_per_trigger_limits_a_batch(streams: Streams, tmp_path: Path) -> None:
    streams.declare("a", "b")
    streams.fill("a", range(20))
    streams.fill("b", range(5))
    query = streams.run(
        tmp_path / "c", tmp_path / "f", stream="a,b", startingOffsets="earliest", maxOffsetsPerTrigger=10
    )
    rows = [progress.numInputRows for progress in query.recentProgress]
    assert [count for count in rows if count] == [10, 10, 5]
    assert streams.stored(tmp_path / "f") == [str(number) for number in [*range(20), *range(5)]]


def test_available_now_reads_what_was_there_at_the_start(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", range(6))

    def write(frame: DataFrame, number: int) -> None:
        frame.write.mode("append").parquet(str(tmp_path / "files"))
        streams.fill("s", ["late"])

    query = (
        streams.query(stream="s", startingOffsets="earliest", maxOffsetsPerTrigger=3)
        .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .foreachBatch(write)
        .start()
    )
    assert query.awaitTermination(int(TIMEOUT))
    assert streams.stored(tmp_path / "files") == [str(number) for number in range(6)]


def test_available_now_from_latest_reads_only_later_messages(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", ["before"])
    streams.run(tmp_path / "checkpoint", tmp_path / "files", stream="s")
    streams.fill("s", ["1", "2"])
    streams.run(tmp_path / "checkpoint", tmp_path / "files", stream="s")
    assert streams.stored(tmp_path / "files") == ["1", "2"]


def test_a_new_partition_of_a_super_stream_is_read_from_its_start(streams: Streams, tmp_path: Path) -> None:
    """A new stream is read from its beginning, wherever a new query would begin."""
    streams.declare_super("super", 0)
    streams.fill("super-0", ["before"])
    streams.run(tmp_path / "checkpoint", tmp_path / "files", superStream="super")
    streams.declare_super("super", 1)
    streams.fill("super-0", ["1"])
    streams.fill("super-1", ["2", "3"])
    streams.run(tmp_path / "checkpoint", tmp_path / "files", superStream="super")
    assert streams.stored(tmp_path / "files") == ["1", "2", "3"]


def test_a_stream_left_out_of_one_start_is_an_error(streams: Streams, tmp_path: Path) -> None:
    """PySpark before 4.2 has the end of the batch in the checkpoint before anything can be said about it."""
    streams.declare("a", "b")
    checkpoint, files = tmp_path / "checkpoint", tmp_path / "files"
    for name in ("a", "b"):
        streams.fill(name, [f"{name}1", f"{name}2"])
    streams.run(checkpoint, files, stream="a,b", startingOffsets="earliest")
    for name in ("a", "b"):
        streams.fill(name, [f"{name}3"])
    with pytest.raises(Exception, match="the checkpoint has positions of b, which the"):
        streams.run(checkpoint, files, stream="a")
    first, begun = checkpoint / "offsets" / "0", checkpoint / "offsets" / "1"
    if not begun.exists():  # of PySpark 4.2 or newer, which may find such a checkpoint
        settings = first.read_text().splitlines()[:-1]
        begun.write_text("\n".join([*settings, json.dumps(document({"a": 3}))]))
    with pytest.raises(Exception, match="of b, which the batch that it has begun leaves out: name them and delete "):
        streams.run(checkpoint, files, stream="a,b")
    begun.unlink()
    # Spark takes it for another query's work where it finds this one alone.
    begun.with_name(".1.crc").unlink(missing_ok=True)
    streams.run(checkpoint, files, stream="a,b")
    assert streams.stored(files) == ["a1", "a2", "a3", "b1", "b2", "b3"]


def test_a_running_query_reads_new_messages(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", ["before"])
    query = (
        streams.query(stream="s")
        .writeStream.format("memory")
        .queryName("running")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_until(lambda: query.lastProgress is not None)
        streams.fill("s", range(3))
        wait_until(lambda: streams.spark.table("running").count() == 3)
        assert values(streams.spark.table("running")) == ["0", "1", "2"]
    finally:
        query.stop()


def test_a_failed_first_batch_is_repeated_from_its_start(streams: Streams, tmp_path: Path) -> None:
    """Spark does not keep where a new query begins: what came while it was down would be skipped."""
    streams.declare("s")
    streams.fill("s", ["before"])
    attempts: list[list[str]] = []

    def write(frame: DataFrame, number: int) -> None:
        attempts.append(values(frame))
        if len(attempts) == 1:
            raise RuntimeError("the first attempt dies")

    def start() -> StreamingQuery:
        return (
            streams.query(stream="s", startingOffsets="latest")
            .writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
            .foreachBatch(write)
            .start()
        )

    died = start()
    wait_until(lambda: not died.isActive)
    assert attempts == [[]]
    streams.fill("s", ["1", "2"])
    query = start()
    try:
        wait_until(lambda: ["1", "2"] in attempts)
    finally:
        query.stop()
    assert [one for one in attempts if one] == [["1", "2"]]


def test_a_failed_batch_is_repeated_unchanged(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", ["1", "2"])
    checkpoint, attempts = tmp_path / "checkpoint", []

    def write(frame: DataFrame, number: int) -> None:
        attempts.append((number, values(frame)))
        if len(attempts) == 1:
            raise RuntimeError("the first attempt dies")

    for _ in range(2):
        query = (
            streams.query(stream="s", startingOffsets="earliest")
            .writeStream.option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .foreachBatch(write)
            .start()
        )
        wait_until(partial(stopped, query))
        streams.fill("s", ["3"])
    assert attempts == [(0, ["1", "2"]), (0, ["1", "2"]), (1, ["3"])]


def test_a_checkpoint_of_version_1_is_continued(streams: Streams, tmp_path: Path) -> None:
    """Written by Spark 4.3 and the first bide with this source; it stands after offset 2."""
    streams.declare("s")
    streams.fill("s", range(5))
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(Path(__file__).parent / "checkpoint-v1", checkpoint)
    seen: list[tuple[int, list[str]]] = []
    query = (
        streams.query(stream="s", startingOffsets="earliest")
        .writeStream.option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, number: seen.append((number, values(frame))))
        .start()
    )
    assert query.awaitTermination(int(TIMEOUT))
    assert seen == [(2, ["3", "4"])]


def stopped(query: StreamingQuery) -> bool:
    return not query.isActive


def test_filters_read_only_what_they_select(streams: Streams) -> None:
    """A message that cannot be decoded fails each read that reaches it."""
    address = Address.of(streams.vhost.url, stream_port(streams.vhost.broker))
    streams.declare_super("super", 0, 1)
    streams.fill("super-0", range(3))
    bad = [stream_publisher.message(b"\0Sw")]
    assert stream_publisher.publish(address, "super-0", bad) == bad
    assert stream_publisher.publish(address, "super-1", bad) == bad
    stored = datetime.fromtimestamp(moment() / 1000, UTC)
    streams.fill("super-0", range(4, 7))
    setting = "spark.sql.python.filterPushdown.enabled"
    streams.spark.conf.set(setting, "true")
    try:
        late = streams.batch(superStream="super").where(f"stream = 'super-0' and timestamp > '{stored.isoformat()}'")
        assert sorted(row.offset for row in late.select("offset").collect()) == [4, 5, 6]
        early = streams.batch(superStream="super", columns="offset, stream").where("stream = 'super-0' and offset < 3")
        assert sorted(early.collect()) == [(0, "super-0"), (1, "super-0"), (2, "super-0")]
        assert streams.batch(superStream="super").where("offset > 6").collect() == []
    finally:
        streams.spark.conf.unset(setting)
    with pytest.raises(Exception, match="cannot be decoded"):
        streams.batch(superStream="super").where("stream = 'super-0' and offset < 3").collect()


@pytest.mark.skipif(not LIMITS, reason="PySpark before 4.2 has no limits")
def test_limits_in_bytes_and_a_least_number_do_not_hold_up_available_now(streams: Streams, tmp_path: Path) -> None:
    streams.declare("s")
    streams.fill("s", ["x" * 1_000] * 6)
    query = streams.run(
        tmp_path / "c", tmp_path / "f", stream="s", startingOffsets="earliest", maxBytesPerTrigger=3_500
    )
    counts = [one.numInputRows for one in query.recentProgress if one.numInputRows]
    assert sum(counts) == 6
    assert counts[0] < 4
    progress = json.loads(query.recentProgress[0].sources[0].latestOffset)
    assert progress["streams"] == {"s": 6}
    assert progress["behind"] == {"s": 6 - counts[0]}
    streams.fill("s", ["more"])
    more = streams.run(tmp_path / "c", tmp_path / "f", stream="s", minOffsetsPerTrigger=1_000)
    assert sum(one.numInputRows for one in more.recentProgress) == 1
