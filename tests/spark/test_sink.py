"""Tables and streaming queries, written to a broker by a real Spark."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException

import bide
from bide.errors import BulkPublishError
from bide.spark import sending
from bide.spark.options import Options
from bide.spark.rows import RowConverter
from bide.spark.sending import WriteTask, send
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import clock_url
from tests.spark.receiving import drain, new_queue, rest
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.readwriter import DataFrameWriter

__all__ = ["clock_url"]

SMALL = {"maxDelay": "20s", "resolution": "50ms"}


def writer(frame: DataFrame, url: str, **options: object) -> DataFrameWriter:
    given = {"url": url, **SMALL, **options}
    return frame.write.format("rabbitmq").mode("append").options(**{name: str(one) for name, one in given.items()})


@pytest.fixture
def queue(clock_url: str) -> str:
    return new_queue(clock_url)


def test_a_table_with_only_a_value_column_can_be_written(spark: SparkSession, clock_url: str, queue: str) -> None:
    frame = spark.range(1_000).selectExpr("cast(id as string) as value").repartition(3)
    writer(frame, clock_url, queue=queue).save()
    found = drain(clock_url, queue, 1_000)
    assert sorted(int(one.body) for one in found) == list(range(1_000))
    assert len({one.message_id for one in found}) == 1_000
    assert rest(clock_url, queue) == []


def test_every_column_arrives_as_its_property(spark: SparkSession, clock_url: str, queue: str) -> None:
    frame = spark.sql(
        f"""
        select cast('body' as binary) as value, '{queue}' as queue, map('tenant', 'acme') as headers,
               'm-1' as message_id, 'c-1' as correlation_id, 'text/plain' as content_type,
               'gzip' as content_encoding, 'Remind' as type,
               'answers' as reply_to, 'shop' as app_id, 7 as priority, false as persistent,
               interval '1 12' day to hour as expiration
        """
    )
    writer(frame, clock_url).save()
    (message,) = drain(clock_url, queue, 1)
    assert (message.body, message.message_id, message.correlation_id) == (b"body", "m-1", "c-1")
    assert (message.content_type, message.type, message.app_id) == ("text/plain", "Remind", "shop")
    values = message.raw.values
    assert (values["priority"], values["delivery_mode"], values["expiration"]) == (7, 1, "129600000")
    assert (values["content_encoding"], values["reply_to"]) == ("gzip", "answers")
    assert message.headers["tenant"] == "acme"


def test_delays_and_due_times_can_have_any_type(spark: SparkSession, clock_url: str, queue: str) -> None:
    before = datetime.now(UTC)
    due = before + timedelta(seconds=2)
    frames = [
        spark.sql("select 'interval' as value, interval '1.5' second as delay"),
        spark.sql("select 'milliseconds' as value, 1200 as delay"),
        spark.sql("select 'text' as value, '1s' as delay"),
        spark.createDataFrame([("due", due)], "value string, deliver_at timestamp"),
        spark.sql("select 'now' as value, cast(null as string) as delay"),
    ]
    for frame in frames:
        writer(frame, clock_url, queue=queue).save()
    writer(spark.sql("select 'option' as value, '9s' as delay"), clock_url, queue=queue, delay="100ms").save()
    found = {one.body.decode(): one for one in drain(clock_url, queue, 6)}
    assert found["now"].due is None
    assert found["due"].due == due.replace(microsecond=due.microsecond // 1000 * 1000) + timedelta(
        milliseconds=1 if due.microsecond % 1000 else 0
    )
    for name, delay in (("interval", 1.5), ("milliseconds", 1.2), ("text", 1.0), ("option", 0.1)):
        one = found[name]
        assert one.due is not None
        assert one.sent_at is not None
        assert abs((one.due - one.sent_at).total_seconds() - delay) < 0.01
        assert one.lateness is not None
        assert one.lateness >= timedelta(0), name


def test_rows_can_name_exchange_and_routing_key(spark: SparkSession, clock_url: str, queue: str) -> None:
    with bide.connect_sync(clock_url) as client:
        client.declare(
            bide.Topology(
                exchanges=[bide.Exchange("shop", "topic")],
                queues=[bide.Queue.quorum(queue)],
                bindings=[bide.Binding("shop", queue, "order.*")],
            )
        )
    frame = spark.sql(
        "select '1' as value, 'order.created' as routing_key, 'shop' as exchange, cast(null as string) as queue"
        f" union all select '2', null, null, '{queue}'"
    )
    writer(frame, clock_url).save()
    found = {one.body: (one.exchange, one.routing_key) for one in drain(clock_url, queue, 2)}
    assert found[b"1"] == ("shop", "order.created")
    assert found[b"2"][0] == ""


@pytest.mark.parametrize(
    ("query", "options", "expected"),
    [
        ("select 'a' as body", {"queue": "q"}, "the column 'body' is not a field of a message"),
        ("select 'q' as queue", {}, "no column 'value'"),
        ("select 1 as value", {"queue": "q"}, "the column 'value' is int: it has to be string or binary"),
        ("select 'a' as value", {}, "the messages have no target"),
        ("select 'a' as value", {"queue": "q", "delay": "-5s"}, "the option delay: the delay '-5s' is negative"),
        ("select 'a' as value", {"queue": "q", "delay": "1h"}, "the option delay: the delay 1:00:00 is longer"),
        ("select 'a' as value", {"queue": "q", "dealy": "5s"}, "unknown option for writing: dealy"),
        ("select 'a' as value", {"queue": "q", "exchange": "x"}, "the options queue and exchange were both given"),
        ("select 'a' as value, current_timestamp() as deliver_at", {"queue": "q", "delay": "1s"},
         "the option delay and the column 'deliver_at' both set when"),
        ("select 'a' as value, timestamp_ntz'2030-01-01 00:00:00' as deliver_at", {"queue": "q"},
         "'deliver_at' is timestamp_ntz: it has to be timestamp, which has a time zone"),
        ("select 'a' as value", {"queue": "q", "layout": "clocks"}, "the option layout is 'clocks'"),
        ("select 'a' as value", {"queue": "q", "url": "http://x"}, "does not start with amqp"),
    ],
)  # fmt: skip
def test_bad_options_and_columns_are_refused_by_the_driver(
    spark: SparkSession, query: str, options: dict[str, str], expected: str
) -> None:
    """Nothing listens at the address, so a task would fail with another error."""
    with pytest.raises(AnalysisException) as caught:
        writer(spark.sql(query), **{"url": "amqp://localhost:1", **options}).save()
    assert expected in str(caught.value)


def test_tables_cannot_be_overwritten(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="cannot be overwritten"):
        writer(spark.sql("select 'a' as value"), "amqp://localhost:1", queue="q").mode("overwrite").save()


BAD_ROWS = (
    ("if(id = 700, null, 'a') as value, '{queue}' as queue", "row 700: the column value is null"),
    ("'a' as value, if(id = 700, null, '{queue}') as queue", "row 700: the column queue is null"),
    ("'a' as value, '{queue}' as queue, if(id = 700, -5, 5) as delay", "row 700: the column delay holds a value"),
    ("'a' as value, '{queue}' as queue, if(id = 700, '5 apples', '5s') as delay", "the delay '5 apples' cannot be"),
    ("'a' as value, '{queue}' as queue, '5s' as delay, if(id = 700, current_timestamp(), null) as deliver_at",
     "row 700: the columns delay and deliver_at both have a value"),
    ("'a' as value, '{queue}' as queue, map(if(id = 700, 'bide-x', 'x'), '') as headers",
     "row 700: the header 'bide-x' starts with"),
    ("'a' as value, '{queue}' as queue, if(id = 700, 300, 5) as priority", "row 700: the priority"),
    ("'a' as value, '{queue}' as queue, repeat('x', int(if(id = 700, 256, 5))) as message_id", "row 700: the mess"),
    ("'a' as value, '{queue}' as queue, cast(if(id = 700, x'e9', x'65') as string) as message_id",
     "row 700: the column message_id holds a value that cannot be sent: text that is not UTF-8"),
    ("'a' as value, '{queue}' as queue, map('seen', timestamp_seconds(700 - id)) as headers",
     "row 701: the header 'seen' is 1969-12-31T23:59:59+00:00, but AMQP timestamps begin in 1970"),
)  # fmt: skip


def test_a_bad_row_stops_its_partition_before_anything_is_published(
    spark: SparkSession, clock_url: str, queue: str
) -> None:
    for columns, expected in BAD_ROWS:
        frame = spark.range(0, 1_000, 1, 1).selectExpr(*_split(columns.format(queue=queue)))
        with pytest.raises(PySparkException) as caught:
            writer(frame, clock_url).save()
        assert expected in str(caught.value)
    assert rest(clock_url, queue) == []


def test_a_bad_row_does_not_stop_other_partitions(spark: SparkSession, clock_url: str, queue: str) -> None:
    def await_the_other(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The partition with the bad row goes on when all of the other one is in the queue."""
        for batch in batches:
            if batch.column("value")[0].as_py() == "500":
                with pika.BlockingConnection(pika.URLParameters(clock_url)) as connection:
                    channel = connection.channel()
                    deadline = time.monotonic() + TIMEOUT
                    while channel.queue_declare(queue, passive=True).method.message_count < 500:
                        assert time.monotonic() < deadline, "the other partition was not sent"
                        connection.process_data_events(0.02)
            yield batch

    rows = spark.range(0, 1_000, 1, 2).selectExpr("cast(id as string) as value", "if(id = 700, -5, 0) as delay")
    with pytest.raises(PySparkException) as caught:
        writer(rows.mapInArrow(await_the_other, rows.schema), clock_url, queue=queue).save()
    assert "row 200: the column delay holds a value" in str(caught.value)
    assert sorted(int(one.body) for one in drain(clock_url, queue, 500)) == list(range(500))
    assert rest(clock_url, queue) == []


def _split(columns: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for one in columns:
        depth += {"(": 1, ")": -1}.get(one, 0)
        if one == "," and not depth:
            parts.append("")
        else:
            parts[-1] += one
    return parts


def test_refused_messages_fail_the_task_and_are_named(spark: SparkSession, clock_url: str, queue: str) -> None:
    frame = spark.range(0, 20, 1, 1).selectExpr(
        "cast(id as string) as value",
        f"if(id % 2 = 1, 'nowhere', '{queue}') as queue",
        "concat('m-', id) as message_id",
    )
    with pytest.raises(PySparkException) as caught:
        writer(frame, clock_url).save()
    assert "10 of the last 20 messages were not confirmed (10 confirmed, 10 returned)" in str(caught.value)
    assert "row 1, message id m-1, returned" in str(caught.value)
    assert "and 5 more" in str(caught.value)
    assert len(drain(clock_url, queue, 10)) == 10


@pytest.mark.parametrize(("rows", "size"), [(2, 1 << 30), (1 << 30, 200)])
def test_a_task_publishes_in_chunks_of_rows_or_bytes(
    clock_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, rows: int, size: int
) -> None:
    """It settles then, and so fails before it has published the rest."""
    monkeypatch.setattr(sending, "MAX_UNCONFIRMED_ROWS", rows)
    monkeypatch.setattr(sending, "MAX_UNCONFIRMED_BYTES", size)
    settings = SinkSettings.read(Options({"url": clock_url, "idPrefix": "p"}), {})
    columns = ("value", "queue")
    batches = [
        pa.RecordBatch.from_pydict({"value": [str(number) * 150], "queue": ["nowhere" if number == 3 else queue]})
        for number in range(7)
    ]
    reader, place = RowConverter(columns, {}, settings.infrastructure), WriteTask(run="p", partition=0)
    with pytest.raises(BulkPublishError, match="1 of the last 2 messages were not confirmed"):
        send(iter(batches), reader, settings, place, file="f", begun=datetime.now(UTC))
    assert [one.body[:1] for one in drain(clock_url, queue, 3)] == [b"0", b"1", b"2"]
    assert rest(clock_url, queue) == []


def test_rejected_rows_are_written_to_a_folder_and_can_be_sent_again(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path
) -> None:
    rejects = tmp_path / "rejects"
    missing = f"{queue}-later"
    frame = spark.range(0, 40, 1, 2).selectExpr(
        "cast(id as string) as value",
        f"if(id % 4 = 1, '{missing}', '{queue}') as queue",
        "if(id % 10 = 2, interval '-1' second, interval '0.1' second) as delay",
        "if(id < 20, concat('m-', id), null) as message_id",
    )
    writer(frame, clock_url, rejects=rejects).save()
    assert len(list(rejects.iterdir())) == 2
    found = spark.read.parquet(str(rejects))
    rows = {int(row["value"]): row for row in found.collect()}
    assert set(rows) == {number for number in range(40) if number % 4 == 1 or number % 10 == 2}
    assert rows[2]["reject_status"] == "invalid"
    assert "negative" in rows[2]["reject_reason"]
    assert [rows[number]["message_id"] for number in (1, 2, 12, 22)] == ["m-1", "m-2", "m-12", None]
    assert (rows[1]["reject_status"], rows[1]["delay"]) == ("failed", 100)
    assert sorted(int(one.body) for one in drain(clock_url, queue, 26)) == sorted(set(range(40)) - set(rows))

    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(missing)]))
    writer(found.where("reject_status = 'failed'").drop("reject_status", "reject_reason"), clock_url).save()
    again = drain(clock_url, missing, 10)
    assert {one.message_id for one in again} == {row["message_id"] for n, row in rows.items() if n % 4 == 1}


def test_message_ids_of_a_stream_come_from_its_query(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    spark.range(0, 500, 1, 1).selectExpr("cast(id as string) as value").write.parquet(str(source))
    stream = spark.readStream.schema("value string").parquet(str(source)).writeStream.format("rabbitmq")
    options = {"url": clock_url, "queue": queue, "checkpointLocation": str(checkpoint), "delay": "200ms", **SMALL}
    query = stream.options(**options).trigger(availableNow=True).start()
    query.awaitTermination()
    found = drain(clock_url, queue, 500)
    assert sorted(int(one.body) for one in found) == list(range(500))
    assert all(one.message_id.startswith(f"{query.id}-0-0-") for one in found if one.message_id)
    assert len({one.message_id for one in found}) == 500


def test_a_micro_batch_that_is_repeated_replaces_its_rejects(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path
) -> None:
    source, checkpoint, rejects = (tmp_path / name for name in ("in", "checkpoint", "rejects"))
    missing = f"{queue}-later"
    spark.range(0, 20, 1, 1).selectExpr(
        "cast(id as string) as value",
        f"if(id = 5, '{missing}', '{queue}') as queue",
        "if(id = 7, '-1s', null) as delay",
    ).write.parquet(str(source))

    def run() -> dict[str, tuple[str, str | None]]:
        """What is rejected then, with its status and message id."""
        stream = spark.readStream.schema("value string, queue string, delay string").parquet(str(source)).writeStream
        options = {"url": clock_url, "rejects": str(rejects), "checkpointLocation": str(checkpoint), **SMALL}
        stream.format("rabbitmq").options(**options).trigger(availableNow=True).start().awaitTermination()
        (file,) = rejects.iterdir()
        rows = spark.read.parquet(str(file)).collect()
        return {row["value"]: (row["reject_status"], row["message_id"]) for row in rows}

    first = run()
    assert {value: status for value, (status, _) in first.items()} == {"5": "returned", "7": "invalid"}
    assert len(drain(clock_url, queue, 18)) == 18
    assert rest(clock_url, queue) == []

    # As if the driver had died before it wrote down that the micro-batch is done.
    (commit,) = (checkpoint / "commits").glob("[0-9]*")
    commit.unlink()
    commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(missing)]))
    assert run() == {"7": ("invalid", None)}
    assert [(one.body, one.message_id) for one in drain(clock_url, missing, 1)] == [(b"5", first["5"][1])]
    assert len(drain(clock_url, queue, 18)) == 18


def test_a_micro_batch_that_is_repeated_does_not_move_due_times_that_spark_computed(
    spark: SparkSession, clock_url: str, queue: str, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    spark.range(0, 3, 1, 1).selectExpr("cast(id as string) as value").write.parquet(str(source))

    def run() -> dict[bytes, tuple[str | None, datetime | None]]:
        rows = spark.readStream.schema("value string").parquet(str(source))
        due = "current_timestamp() + interval 1 second as deliver_at"
        options = {"url": clock_url, "queue": queue, "checkpointLocation": str(checkpoint), "past": "send", **SMALL}
        stream = rows.selectExpr("value", due).writeStream.format("rabbitmq").options(**options)
        stream.trigger(availableNow=True).start().awaitTermination()
        return {one.body: (one.message_id, one.due) for one in drain(clock_url, queue, 3)}

    first = run()
    assert len(first) == 3
    assert all(due is not None for _, due in first.values())
    # As if the driver had died before it wrote down that the micro-batch is done.
    (commit,) = (checkpoint / "commits").glob("[0-9]*")
    commit.unlink()
    commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)
    assert run() == first


def test_repeated_writes_with_a_prefix_have_the_same_ids(spark: SparkSession, clock_url: str, queue: str) -> None:
    frame = spark.range(0, 100, 1, 2).selectExpr("cast(id as string) as value")
    for _ in range(2):
        writer(frame, clock_url, queue=queue, idPrefix="campaign-7").save()
    ids: dict[str | None, set[bytes]] = {}
    for one in drain(clock_url, queue, 200):
        ids.setdefault(one.message_id, set()).add(one.body)
    assert len(ids) == 100
    assert all(len(bodies) == 1 for bodies in ids.values())


def test_an_endpoint_drops_duplicates_of_a_repeated_write(spark: SparkSession, clock_url: str, queue: str) -> None:
    rows = spark.range(0, 40, 1, 2).selectExpr("concat('v', id % 20) as value")
    for _ in range(2):
        writer(rows, clock_url, queue=queue, type="Remind", idPrefix="campaign").save()
    last = spark.sql("select 'x' as value, 'last' as message_id")
    writer(last, clock_url, queue=queue, type="Remind").save()
    handled: list[str | None] = []
    app = bide.Endpoint(queue, deduplicate="1h")

    @app.handler(type="Remind")
    async def remind(message: bide.Message) -> None:
        handled.append(message.message_id)
        if message.message_id == "last":
            app.stop()

    async def work() -> None:
        async with bide.connect(clock_url) as client:
            await asyncio.wait_for(app.run(client), TIMEOUT)

    asyncio.run(work())
    assert len(handled) == len(set(handled)) == 41
    assert rest(clock_url, queue) == []
