"""Audits of a real broker: incremental tables from taps and events, across kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest

import bide
from bide.admin.apply import apply
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.cli import app as cli
from bide.delay.taps import Retention, taps_of
from bide.error_queues import ErrorQueue, Selection
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.run import RoundResult, run
from bide.pipelines.audit.sources import candidates, find_sources
from bide.pipelines.formats import escape_pattern_characters
from bide.streams.log import Address
from bide.topology import Binding, Queue, Topology
from tests import stream_publisher
from tests.broker import celery_app
from tests.broker.endpoints import Recorder, running
from tests.broker.receiving import receive
from tests.broker.schedule_log import NAMES, gating
from tests.spark.spark_processes import LOCAL, started
from tests.support import RawText, Vhost, stream_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = {"x-queue-type": "stream"}
EVENTS = "events"
CLOCK = bide.Clock(max_delay=timedelta(minutes=10), resolution=timedelta(milliseconds=50))
TODAY = date(2026, 11, 21)
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


async def put(url: str, *topologies: Topology) -> None:
    connection = await Connection.open(BrokerUrl.parse(url))
    for topology in topologies:
        external = [name for one in topology.bindings for name in (one.source, one.destination)]
        await apply(connection, topology, external=external)
    await connection.close()


class Audited:
    """A virtual host with a tapped clock, and the folder of its audit."""

    def __init__(self, spark: SparkSession, url: str, port: int, place: Path) -> None:
        self.spark, self.url, self.place = spark, url, place
        self.folder = Folder(str(place))
        self.sources = find_sources(url, [CLOCK], events=[EVENTS], port=port, batch_rows=100)

    def run(self) -> RoundResult:
        return run(self.spark, self.sources, self.folder)

    def table(self, name: str) -> DataFrame:
        return self.spark.read.parquet(escape_pattern_characters(str(self.place / name)))

    def messages(self) -> list[Any]:
        return self.table("messages").orderBy("message_id").collect()


async def deal(client: bide.Client, number: int) -> None:
    """Handle messages with an endpoint, one of them at the second attempt and one never."""
    recorder = Recorder()
    app = bide.Endpoint(
        "orders",
        name="shop",
        error_queue="errors",
        retry=bide.Retry(immediate=0, delays=["50ms"]),
        observers=[bide.EventStream(EVENTS), recorder],
    )

    @app.handler
    async def handle(message: bide.Message) -> None:
        if message.message_id == "m-7":
            raise ValueError("never")
        if message.message_id == "m-8" and not message.history.retries:
            raise KeyError("not yet")

    async with running(app, client, recorder):
        await recorder.until("processed", "parked", count=number)


@pytest.fixture
def audited(spark: SparkSession, vhost: Vhost, tmp_path: Path) -> Audited:
    queues = Topology(queues=[Queue.quorum("orders"), Queue.quorum("errors"), Queue(EVENTS, arguments=STREAM)])
    asyncio.run(put(vhost.url, CLOCK.topology(), taps_of(CLOCK).topology(Retention()), queues))
    return Audited(spark, vhost.url, stream_port(vhost.broker), tmp_path / "[eu]" / "audit")


def with_client(url: str, infrastructure: Any, work: Callable[[bide.Client], Awaitable[Any]]) -> None:
    async def all_of_it() -> None:
        async with bide.connect(url, infrastructure=infrastructure) as client:
            await work(client)

    asyncio.run(all_of_it())


@pytest.mark.slow
def test_each_round_adds_new_facts(audited: Audited) -> None:
    """Scheduled, delivered, and dealt with by an endpoint, with a round after each."""

    async def schedule(client: bide.Client) -> None:
        def publish(number: int) -> Awaitable[Any]:
            return client.publish(b"1", to="orders", delay="4s", message_id=f"m-{number}", type="Remind")

        await asyncio.gather(*map(publish, range(150)))

    with_client(audited.url, CLOCK, schedule)
    second = audited.run()
    assert second.rows["scheduled"] == 150
    assert second.pending == 150 - second.rows["delivered"]
    assert audited.table("scheduled").select("batch").distinct().count() == 2, "no more than batch_rows at a time"

    async def finish(client: bide.Client) -> None:
        await deal(client, 150)
        await client.publish(b"1", to="orders", delay="9m", message_id="later")

    with_client(audited.url, CLOCK, finish)
    third = audited.run()
    assert third.undecodable == 0
    assert not (audited.place / "undecodable").exists()
    # Two retries passed the clock as well.
    assert (third.rows["scheduled"], second.rows["delivered"] + third.rows["delivered"]) == (3, 152)
    assert (third.rows["processed"], third.rows["failed"], third.pending, third.overdue) == (149, 3, 1, 0)

    rows = {row["message_id"]: row for row in audited.messages()}
    assert Counter(row["outcome"] for row in rows.values()) == {"processed": 149, "parked": 1, "scheduled": 1}
    assert len(rows) == 151
    later = rows.pop("later")
    assert (later["delivered"], later["attempts"], later["critical_ms"]) == (None, 0, None)
    assert {name for name, row in rows.items() if row["attempts"] == 2} == {"m-7", "m-8"}
    assert {row["type"] for row in rows.values()} == {"Remind"}
    assert {row["type"] for row in audited.table("delivered").collect() if row["message_id"] in rows} == {"Remind"}
    assert rows["m-7"]["outcome"] == "parked"
    for row in rows.values():
        # It is due 4 s after it was sent, and may take longer than that to the stream. Both times are rounded.
        assert row["due"] - timedelta(seconds=4, milliseconds=50) <= row["scheduled"] <= row["delivered"] >= row["due"]
        assert 0 <= row["lateness_ms"] < 30_000
        if row["outcome"] == "processed":
            assert row["critical_ms"] == pytest.approx(row["delivery_ms"] + row["processing_ms"])
            assert row["processing_ms"] >= 0
    counted = audited.table("lateness").selectExpr("sum(count)", "max(max_ms)").collect()[0]
    assert (counted[0], counted[1]) == (150, max(row["lateness_ms"] for row in rows.values()))
    failures = {row["exception"]: (row["count"], row["messages"]) for row in audited.table("failures").collect()}
    assert failures == {"ValueError": (2, 1), "KeyError": (1, 1)}


def send_as_dotnet(url: str, delays: Mapping[str, int], *, ago: timedelta = timedelta(0)) -> None:
    """Delay messages to Shop.Orders as an NServiceBus endpoint does, which did so a while ago.

    Args:
        delays: seconds from now, by message id.
    """
    sent = datetime.now(UTC) - ago
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for message_id, delay in delays.items():
            headers = {
                "NServiceBus.MessageId": message_id,
                "NServiceBus.TimeSent": sent.strftime("%Y-%m-%d %H:%M:%S:%f Z"),
                "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop.Messages, Version=1.0.0.0",
                "NServiceBus.Transport.RabbitMQ.DelayInSeconds": delay + ago // timedelta(seconds=1),
            }
            channel.basic_publish(
                bide.NServiceBus().cascade.level_names[delay.bit_length() - 1],
                ".".join(f"{delay:028b}") + ".Shop.Orders",
                b"{}",
                pika.BasicProperties(message_id=message_id, headers=headers, delivery_mode=2),
            )


BAD = RawText(b"o\xff\xfek")


def put_what_is_odd(audited: Audited) -> dict[str, list[bytes]]:
    """Messages with text that is not UTF-8, and others that are not AMQP 1.0, in all streams of an audit."""
    taps = taps_of(CLOCK)
    now = int(datetime.now(UTC).timestamp() * 1_000)
    headers: dict[Any, Any] = {"bide-to": "q:orders", "bide-due": now + 60_000, "bide-sent": now, BAD: BAD, "a": BAD}
    event = {"event": "processed", "endpoint": "shop", "queue": "orders", "message_id": str(BAD), "due": now + 60_000}
    with closing(pika.BlockingConnection(pika.URLParameters(audited.url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        properties = pika.BasicProperties(
            message_id=BAD, correlation_id=BAD, content_type=BAD, type=BAD, headers=headers, app_id=BAD
        )
        for stream in (taps.scheduled, taps.delivered):
            channel.basic_publish("", stream, b"body", properties)
        body = json.dumps({**event, "started": now, "ended": now + 1}).encode()
        channel.basic_publish("", EVENTS, body, pika.BasicProperties(headers={"a": BAD}))
    bomb = b"\0\x53\x77" + b"\0" * 3_000
    lie = stream_publisher.batch([b"one", b"two"], records=3)
    address = Address.of(audited.url, audited.sources.port)
    for stream in (taps.scheduled, taps.delivered, EVENTS):
        entries = [stream_publisher.message(b"not AMQP"), stream_publisher.message(bomb), lie]
        assert stream_publisher.publish(address, stream, entries) == entries
    return {stream: [b"not AMQP", bomb, lie] for stream in (taps.scheduled, taps.delivered, EVENTS)}


@pytest.mark.slow
@pytest.mark.long
def test_undecodable_messages_do_not_stop_an_audit(
    audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the tables, in what the commands print, and in the report; and the rounds go on."""
    odd = put_what_is_odd(audited)
    done = audited.run()
    assert dict(done.rows) == {"scheduled": 1, "delivered": 1, "processed": 1, "failed": 0}
    assert done.undecodable == 9
    (message,) = audited.messages()
    assert (message["message_id"], message["outcome"], message["type"]) == ("o\\xff\\xfek", "processed", "o\\xff\\xfek")
    rows = audited.table("undecodable").orderBy("stream", "offset").collect()
    assert {stream: [bytes(row["value"]) for row in rows if row["stream"] == stream] for stream in odd} == odd
    # The message with the odd text is before them, and the batch has as many offsets as it says.
    assert [row["offset"] for row in rows] == [1, 2, 3] * 3
    assert {row["source"] for row in rows} == {"scheduled", "delivered", "events"}
    assert all(row["seen"] and row["reason"] and row["size"] == len(row["value"]) for row in rows)

    assert put_what_is_odd(audited)
    once = ("pipeline", "audit", "--into", str(audited.place), "--once", "--layout", "clock", "--events", EVENTS)
    url = ("--url", audited.url, "--stream-port", str(audited.sources.port))
    assert cli.run([*once, *url]) == 0
    output = capsys.readouterr().out
    assert output.startswith("1 scheduled, 1 delivered, 1 processed, 0 failed, 9 undecodable; "), output
    assert audited.table("undecodable").select("stream", "offset").distinct().count() == 18

    page = tmp_path / "report.html"
    assert cli.run(["pipeline", "report", str(audited.place), "--out", str(page)]) == 0
    assert "18 messages could not be decoded" in capsys.readouterr().out.splitlines()
    assert '<section id="undecodable"' in page.read_text(encoding="utf-8")
    assert cli.run(["pipeline", "report", str(audited.place), "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undecodable"] == 18


@pytest.mark.long
@pytest.mark.slow
def test_nservicebus_and_celery_are_audited_without_bide(spark: SparkSession, vhost: Vhost, tmp_path: Path) -> None:
    """A broker where nothing of bide publishes."""
    net, celery = bide.NServiceBus(), bide.Celery()
    taps = [taps_of(one).topology(Retention()) for one in (net, celery)]
    queues = Topology(queues=[Queue.quorum("Shop.Orders"), Queue.quorum(celery_app.WORK)])
    bound = Topology(
        bindings=[
            Binding(net.delivery_exchange, "Shop.Orders", "#.Shop.Orders"),
            Binding(celery.delivery_exchange, celery_app.WORK, f"#.{celery_app.ROUTING_KEY}"),
        ]
    )
    asyncio.run(put(vhost.url, net.topology() | celery.topology(), queues, *taps, bound))
    send_as_dotnet(vhost.url, {f"net-{number}": delay for number, delay in enumerate((1, 2, 3, 600))})
    app = celery_app.create(vhost.url)
    send = app.tasks[celery_app.TASK].apply_async
    tasks = [send(("reminder",), queue=celery_app.WORK, countdown=countdown).id for countdown in (2, 3, 600)]
    app.close()

    async def take(client: bide.Client) -> None:
        await receive(client, "Shop.Orders", 3)
        await receive(client, celery_app.WORK, 2)

    with_client(vhost.url, None, take)
    sources = find_sources(vhost.url, candidates(), port=stream_port(vhost.broker))
    assert set(sources.scheduled.values()) == set(sources.delivered.values()) == {"nservicebus", "celery"}
    done = run(spark, sources, Folder(str(tmp_path)))
    assert dict(done.rows) == {"scheduled": 7, "delivered": 5, "processed": 0, "failed": 0}
    assert (done.pending, done.overdue) == (2, 0)
    rows = {row["message_id"]: row for row in spark.read.parquet(str(tmp_path / "messages")).collect()}
    assert {name: (row["layout"], row["target"], row["type"], row["outcome"]) for name, row in rows.items()} == {
        **{
            f"net-{number}": (
                "nservicebus",
                "q:Shop.Orders",
                "Shop.Remind",
                "scheduled" if number == 3 else "delivered",
            )
            for number in range(4)
        },
        **{
            task: ("celery", f"q:{celery_app.ROUTING_KEY}", celery_app.TASK, "scheduled" if last else "delivered")
            for task, last in zip(tasks, (False, False, True), strict=True)
        },
    }
    for name, row in rows.items():
        # Celery cuts the fraction of a second off, and is early by it.
        assert row["lateness_ms"] is None or (-1_000 if name in tasks else 0) <= row["lateness_ms"] < 30_000
    pending = spark.read.parquet(str(tmp_path / "pending")).collect()
    assert {(row["target"], row["count"], row["overdue"]) for row in pending} == {
        ("q:Shop.Orders", 1, 0),
        (f"q:{celery_app.ROUTING_KEY}", 1, 0),
    }


@pytest.mark.long
@pytest.mark.slow
def test_a_message_from_dotnet_parked_and_retried_has_one_row(
    spark: SparkSession, vhost: Vhost, tmp_path: Path
) -> None:
    """A .NET endpoint sent it days before it is due, one of ours parks it, and an operator sends it back."""
    net = bide.NServiceBus(routing="direct")
    queues = Topology(queues=[Queue.quorum("Shop.Orders"), Queue.quorum("errors"), Queue(EVENTS, arguments=STREAM)])
    bound = Topology(bindings=[Binding(net.delivery_exchange, "Shop.Orders", "#.Shop.Orders")])
    asyncio.run(put(vhost.url, net.topology(), queues, taps_of(net).topology(Retention()), bound))
    send_as_dotnet(vhost.url, {"net": 1}, ago=timedelta(days=2))
    recorder, repaired = Recorder(), asyncio.Event()
    app = bide.Endpoint(
        "Shop.Orders",
        error_queue="errors",
        retry=bide.Retry(immediate=0, delays=()),
        observers=[bide.EventStream(EVENTS), recorder],
    )

    @app.handler
    async def handle(message: bide.Message) -> None:
        if not repaired.is_set():
            raise ConnectionError("down")

    async def deal_with_it(client: bide.Client) -> None:
        async with running(app, client, recorder):
            await recorder.until("parked")
            repaired.set()
            await ErrorQueue(client, "errors").retry(Selection())
            await recorder.until("processed")

    with_client(vhost.url, net, deal_with_it)
    late = {one.kind: one.lateness is not None for one in recorder.events}
    assert late == {"parked": True, "processed": False}, "metrics count the first delivery"
    folder = Folder(str(tmp_path))
    done = run(spark, find_sources(vhost.url, [net], events=[EVENTS], port=stream_port(vhost.broker)), folder)
    assert dict(done.rows) == {"scheduled": 1, "delivered": 1, "processed": 1, "failed": 1}
    (row,) = spark.read.parquet(folder.location("messages")).collect()
    assert (row["message_id"], row["attempts"], row["outcome"]) == ("net", 2, "processed")
    assert row["day"] == row["due"].astimezone(UTC).date()
    assert row["critical_ms"] < 3_600_000, "from the due time, not from when it was sent two days before"


# -- Kills


@pytest.mark.long
@pytest.mark.slow
def test_a_batch_interrupted_before_its_note_is_replaced(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch comes again, and takes the place of the first attempt."""

    async def schedule(client: bide.Client) -> None:
        await asyncio.gather(*(client.publish(b"1", to="orders", delay="100ms") for _ in range(250)))

    with_client(audited.url, CLOCK, schedule)
    note, left = Folder.add_note, [2]

    def fail(self: Folder, what: Note) -> None:
        left[0] -= what.name.startswith("scheduled")
        if left[0] == 0:
            raise OSError("no space left")
        note(self, what)

    monkeypatch.setattr(Folder, "add_note", fail)
    with pytest.raises(Exception, match="no space left"):
        audited.run()
    assert audited.table("scheduled").count() == 200, "of two batches, one of which is not done"
    monkeypatch.setattr(Folder, "add_note", note)
    done = audited.run()
    assert done.rows["scheduled"] == 250, "those of the first run, which did not come to use them, as well"
    stored = audited.table("scheduled")
    assert stored.count() == stored.select("stream", "offset").distinct().count() == 250
    assert len(audited.messages()) == 250


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_audit_is_continued(audited: Audited, capsys: pytest.CaptureFixture[str]) -> None:
    """``kill -9`` of Python and JVM while facts are written, and the same command again."""
    number = 300

    async def schedule(client: bide.Client) -> None:
        publish = client.publish
        await asyncio.gather(*(publish(b"1", to="orders", delay="1s", message_id=f"m-{one}") for one in range(number)))
        await receive(client, "orders", number)

    with_client(audited.url, CLOCK, schedule)
    command = [
        *("pipeline", "audit", "--once", "--into", str(audited.place), "--batch-rows", "50", "--json"),
        *("--events", EVENTS, "--url", audited.url, "--stream-port", str(audited.sources.port)),
    ]
    with started([sys.executable, "-m", "bide", *command, *LOCAL]) as program:
        program.wait_until(lambda: len(audited.folder.notes()) >= 2, "two batches were noted")
        program.kill()
    before = audited.folder.noted_rows()
    assert 0 < before < 2 * number

    assert cli.run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == {"scheduled": number, "delivered": number, "processed": 0, "failed": 0}
    assert (report["pending"], report["overdue"], report["days"]) == (
        0,
        0,
        len({row["day"] for row in audited.messages()}),
    )
    for name in ("scheduled", "delivered"):
        table = audited.table(name)
        assert table.count() == table.select("stream", "offset").distinct().count() == number
    assert {row["outcome"] for row in audited.messages()} == {"delivered"}
    assert len(audited.messages()) == number

    assert cli.run(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert (sum(again["rows"].values()), again["days"]) == (0, 0), "what is there is not read again"


@pytest.mark.long
@pytest.mark.slow
def test_sigterm_ends_an_audit_after_its_round(audited: Audited, tmp_path: Path) -> None:
    """SIGTERM lets the round that is under way come to its end."""
    command = [
        *("pipeline", "audit", "--every", "1s", "--into", str(audited.place), "--json"),
        *("--events", EVENTS, "--url", audited.url, "--stream-port", str(audited.sources.port)),
    ]
    output = tmp_path / "output"

    published: list[str] = []

    def publish() -> None:
        published.append(f"m-{len(published)}")
        event = {"event": "processed", "message_id": published[-1], "endpoint": "shop", "ended": 1_795_262_400_000}
        with_client(audited.url, CLOCK, lambda client: client.publish(json=event, to=EVENTS))

    def found() -> list[int]:
        lines = output.read_text().splitlines(keepends=True)
        return [json.loads(line)["rows"]["processed"] for line in lines if line.endswith("\n")]

    def is_in_a_round() -> bool:
        """Whether the program works on a message; it is paused then, so that the round does not end before SIGTERM."""
        if sum(found()) == len(published):
            # The last round was over before this process looked.
            publish()
        if not audited.folder.noted_rows():
            return False
        program.pause()
        if audited.folder.noted_rows():
            return True
        program.resume()
        return False

    publish()
    with output.open("wb") as file, started([sys.executable, "-m", "bide", *command, *LOCAL], stdout=file) as program:
        program.wait_until(lambda: found()[:1] == [1], "a round found the first message")
        publish()
        program.wait_until(lambda: sum(found()) == 2, "a later round found the second")
        program.wait_until(is_in_a_round, "a round is working on another")
        assert program.end() == 128 + signal.SIGTERM
    assert found()[-1] == 1
    assert sum(found()) == len(published)
    assert (audited.folder.notes(), bool(audited.folder.unfinished_work())) == ([], False)
    assert [(row["message_id"], row["outcome"]) for row in audited.messages()] == [
        (name, "processed") for name in sorted(published)
    ]
    assert audited.run().rows["processed"] == 0, "the lock is free, and nothing is left to read"


def test_the_command_reports_missing_streams_bad_options_and_locks(
    vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--into", str(tmp_path / "new"), "--url", vhost.url, "--stream-port", str(stream_port(vhost.broker)))
    assert cli.run(["pipeline", "audit", "--once", *where]) == 1
    assert "there is nothing to audit: neither the streams of taps (bide.v1.tap.scheduled, " in capsys.readouterr().err
    assert cli.run(["pipeline", "audit", *where, "--layout", "waiting-hall"]) == 2
    assert cli.run(["pipeline", "audit", *where, "--every", "soon"]) == 2
    url, port = where[3], where[5]
    asyncio.run(put(url, Topology(queues=[Queue("events", arguments=STREAM)])))
    with Folder(str(tmp_path / "new")).lock():
        assert cli.run(["pipeline", "audit", "--once", *where[:2], "--events", "events", "--url", url,
                        "--stream-port", port]) == 1  # fmt: skip
    assert f"new is in use by the process {os.getpid()} on " in capsys.readouterr().err
    assert cli.run(["pipeline", "audit", "--once", *where[:2], "--events", "events", "--events", "nope", "--url", url,
                    "--stream-port", port]) == 1  # fmt: skip
    assert "there is no events stream 'nope' on this virtual host" in capsys.readouterr().err
    assert cli.run(["pipeline", "audit", "--once", *where, "--events", "events", "--layout", "celery"]) == 1
    assert "no streams of taps exist on this virtual host for celery: run 'bide tap on'" in (capsys.readouterr().err)
    (tmp_path / "mine.txt").write_text("x")
    assert cli.run(["pipeline", "audit", "--once", *where[2:], "--into", str(tmp_path)]) == 2
    assert "contains other files than an audit" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_schedules_are_in_the_tables_and_in_the_report(
    audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As cancelled and superseded, and not as lost. An endpoint has handled one of the delivered ones."""

    async def schedule(client: bide.Client) -> None:
        recorder = Recorder()
        app = bide.Endpoint("orders", name="shop", error_queue="errors", observers=[bide.EventStream(EVENTS), recorder])

        @app.handler
        async def handle(message: bide.Message) -> None: ...

        async with gating(audited.url, tmp_path / "gate"):
            for key, delay in (("a", "1h"), ("a", "1ms"), ("b", "1h"), ("c", "1h"), ("d", "1ms")):
                await client.schedule(json={}, key=key, to="orders" if key == "a" else "gone", delay=delay)
            await client.cancel("b")
            await receive(client, NAMES.undeliverable, 1)
            async with running(app, client, recorder):
                await recorder.until("processed", count=1)

    with_client(audited.url, CLOCK, schedule)
    # The gate has ended, so it has reported what it has delivered.
    once = ("pipeline", "audit", "--into", str(audited.place), "--once", "--layout", "clock", "--events", EVENTS)
    url = ("--url", audited.url, "--stream-port", str(audited.sources.port))
    assert cli.run([*once, *url]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("0 scheduled, 0 delivered, 1 processed, 0 failed; "), first
    assert second == "schedules: 1 cancelled, 1 delivered, 1 superseded, 1 undeliverable, 1 pending"
    rows = audited.messages()
    outcomes = Counter((row["outcome"], row["layout"]) for row in rows)
    kinds = ("processed", "cancelled", "superseded", "undeliverable")
    assert outcomes == {(outcome, "schedules"): 1 for outcome in kinds}
    assert all(row["scheduled"] is None and row["delivered"] is None for row in rows)

    page = tmp_path / "report.html"
    assert cli.run(["pipeline", "report", str(audited.place), "--out", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = {"delivered": 1, "cancelled": 1, "superseded": 1, "skipped": 0, "undeliverable": 1, "unknown": 0}
    assert found["schedules"] == {**counts, "pending": 1, "overdue": 0}
    assert {name: found[name] for name in ("scheduled", "delivered", "pending", "lost")} == {
        "scheduled": 5, "delivered": 1, "pending": 1, "lost": 0
    }  # fmt: skip
    assert found["scheduled"] == found["delivered"] + found["pending"] + sum(counts.values()) - counts["delivered"]
    assert '<section id="schedules"' in page.read_text(encoding="utf-8")

    assert cli.run([*once, *url]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "schedules: 1 pending", "each is counted once"
    assert len(audited.table("occurrences").collect()) == 4
