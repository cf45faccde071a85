"""``bide pipeline replay`` and its functions."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter as Multiset
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pika
import pytest

import bide
from bide.cli.app import run
from bide.error_queues import ErrorQueue, FailedMessage, Selection, read_operator_log
from bide.error_queues.operation import WINDOW
from bide.errors import InvalidInputError
from bide.pipelines.replay import small
from bide.pipelines.replay.condition import TextCondition
from bide.pipelines.replay.queue import FailedIn
from bide.pipelines.replay.run import COLUMNS, choose, failed, send, spread, totals
from bide.recoverability.history import History
from bide.topology import Binding, Exchange, Queue
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.broker.receiving import fresh
from tests.broker.test_error_queues import park
from tests.polling import wait_until
from tests.spark.receiving import drain, drain_all, rest, wait_until_released
from tests.spark.spark_processes import LOCAL, Counter, started
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["clock_url"]

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)


def put(url: str, error_queue: str, number: int, failed_on: str, **options: Any) -> None:
    """Park messages in an error queue, as an endpoint does."""

    async def work() -> None:
        async with bide.connect(url, infrastructure=SMALL_CLOCK) as client:
            await park(client, error_queue, number, failed_on, **options)

    asyncio.run(work())


def source(url: str, queue: str, **options: Any) -> FailedIn:
    return FailedIn(url=url, queue=queue, **options)


def replay(url: str, queue: str, *arguments: object) -> int:
    given = ("--url", url, "--queue", queue, *(str(one) for one in arguments))
    return run(["pipeline", "replay", *given])


def parked(url: str, queue: str) -> list[FailedMessage]:
    """The messages of an error queue."""

    async def work() -> list[FailedMessage]:
        async with bide.connect(url) as client:
            return [one async for one in ErrorQueue(client, queue, audit=False).messages()]

    return asyncio.run(work())


@pytest.fixture
def queues(clock_url: str) -> tuple[str, str, str]:
    """An error queue with five messages of one queue, and three of another."""
    error, orders, billing = fresh("error"), fresh("orders"), fresh("billing")
    put(clock_url, error, 5, orders)
    put(clock_url, error, 3, billing, error=TimeoutError("gateway 7"), prefix="b", endpoint="cash")
    return error, orders, billing


def test_a_filter_chooses_messages_by_every_column(
    spark: SparkSession, clock_url: str, queues: tuple[str, str, str]
) -> None:
    error, orders, billing = queues
    messages = failed(spark, source(clock_url, error)).persist()
    assert tuple(messages.columns[:-1]) == COLUMNS
    conditions = {
        "exception like 'Timeout%' and endpoint = 'cash'": 3,
        f"queue = '{orders}' and body like 'body%' and headers['place'] < 3": 3,
        "failed_at > current_timestamp() - interval 1 hour and attempts = 3 and type = 'Order'": 8,
        "exchange = 'shop' and routing_key = 'order.created' and size = 6 and reason = 'failed'": 8,
        "`group` = 'TimeoutError' and text = 'gateway 7'": 3,
        "message_id in ('m1', 'b1')": 2,
        "sent is null and due is null and correlation_id is null and length(id) = 16": 8,
    }
    (counts,) = messages.selectExpr(*(f"count_if({condition})" for condition in conditions)).collect()
    assert dict(zip(conditions, counts, strict=True)) == conditions
    chosen = choose(messages, where="`group` = 'TimeoutError'", limit=2).collect()
    assert [one["exception"] for one in chosen] == ["TimeoutError"] * 2
    by_place = messages.orderBy("place").select("message_id", "place").collect()
    assert [one["place"] for one in by_place] == list(range(8)), "their order in the queue"
    first = choose(messages, limit=2).collect()
    assert {one["message_id"] for one in first} == {one["message_id"] for one in by_place[:2]}

    given = spread(choose(messages, where="endpoint = 'cash'"), timedelta(seconds=3), begin=NOW)
    due = given.selectExpr("unix_seconds(deliver_at) as due").collect()
    assert sorted(one["due"] - NOW.timestamp() for one in due) == [0, 1, 2]
    (row,) = totals(given).collect()
    assert (row["queue"], row["messages"]) == (billing, 3)
    assert (row["last"] - row["first"]) == 2_000_000
    assert len(parked(clock_url, error)) == 8, "nothing was taken out"
    messages.unpersist()


def test_both_engines_choose_the_same_messages(
    spark: SparkSession, clock_url: str, queues: tuple[str, str, str]
) -> None:
    error, orders, _ = queues
    put(clock_url, error, 2, orders, error=LookupError("a\nb 😀's"), prefix="k", endpoint=None)
    given = source(clock_url, error)
    messages = failed(spark, given).persist()
    for where in (
        None,
        "`group` = 'TimeoutError'",
        "EXCEPTION like '%Error' And Endpoint in ('cash', 'x')",
        "text like 'a_b%_s' and message_id not like 'k1%'",
        "exception <> 'LookupError' and routing_key = 'order.created' and exchange not in ('', 'x')",
        "endpoint != 'cash'",
    ):
        spread_by_spark = spread(choose(messages, where=where), timedelta(seconds=7), begin=NOW)
        rows = spread_by_spark.orderBy("place").selectExpr("_bide_key", "queue", "unix_micros(deliver_at)").collect()
        chosen = small.choose(given, condition=None if where is None else TextCondition.parse(where))
        dues = small.spread(len(chosen), timedelta(seconds=7), begin=NOW)
        assert [(one.key, one.queue, due) for one, due in zip(chosen, dues, strict=True)] == [*map(tuple, rows)]
        assert len(chosen) == 10 if where is None else 0 < len(chosen) < 10, where
    messages.unpersist()


def test_bodies_that_are_not_utf_8_are_read_as_latin_1(spark: SparkSession, clock_url: str) -> None:
    error = fresh("error")
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[Queue.quorum(error)]))
        for body in ("café".encode(), b"caf\xe9", b"\x00\xff"):
            client.publish(body, to=error)
    found = choose(failed(spark, source(clock_url, error)), where="size < 6").orderBy("place").select("body").collect()
    assert [one["body"] for one in found] == ["café", "café", "\x00ÿ"]


@pytest.mark.parametrize(
    "where",
    ["exeption = 'x'", "endpoint =", "endpoint", "count(1) > 1", "no_such_function(text)", "'", "1; drop table x"],
)
def test_an_invalid_filter_is_refused_with_the_known_columns(spark: SparkSession, where: str) -> None:
    rows = spark.createDataFrame([], "endpoint string, text string, _bide_key string")
    with pytest.raises(InvalidInputError, match=r"^the filter .* cannot be used: .*; the columns are endpoint, text$"):
        choose(rows, where=where)


def test_a_replayed_message_equals_that_of_a_retry(
    spark: SparkSession, clock_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, orders = fresh("error"), fresh("error"), fresh("orders")
    at = datetime.now(UTC)
    for queue in (one, other):
        history = History(attempts=3, times=(at,) * 3, first_failed_at=at, retries=2)
        put(clock_url, queue, 2, orders, failed_at=at, history=history)

    async def retry() -> None:
        async with bide.connect(clock_url, infrastructure=SMALL_CLOCK) as client:
            await ErrorQueue(client, one, audit=False).retry(Selection(ids=frozenset({"m1"})))

    asyncio.run(retry())
    retried = on_the_wire(clock_url, orders)
    assert replay(clock_url, other, "--where", "message_id = 'm1'", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done.pop("engine"), done.pop("engine_reason")) == ("spark", "this program has a Spark session")
    assert done == {"messages": 1, "sent": 1, "queues": {orders: 1}, "kept": {}, "gone": 0, "seconds": done["seconds"]}
    replayed = on_the_wire(clock_url, orders)
    # The name of the operation alone is another.
    assert replayed["headers"].pop("bide-operator-run") != retried["headers"].pop("bide-operator-run")
    assert replayed == retried
    assert (replayed["message_id"], replayed["type"], replayed["body"]) == ("m1", "Order", b"body 1")
    assert (replayed["headers"]["place"], replayed["headers"]["bide-operator-retries"]) == (1, 1)
    assert [message.message_id for message in parked(clock_url, other)] == ["m0"]

    async def records() -> list[dict[str, Any]]:
        async with bide.connect(clock_url) as client:
            return [record.to_dict() async for record in read_operator_log(client) if record.queue == other]

    begun, ids, ended = asyncio.run(records())
    assert (begun["operation"], begun["where"]) == ("replay", "message_id = 'm1'")
    assert len(ids["ids"]) == 1
    assert ended["done"] == 1


def on_the_wire(url: str, queue: str) -> dict[str, Any]:
    """The one message of a queue, with all of its properties, as another client reads it."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    with connection, connection.channel() as channel:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        assert method is not None
        assert method.message_count == 0
        return {**vars(properties), "body": body, "exchange": method.exchange, "routing_key": method.routing_key}


@pytest.mark.usefixtures("spark")
def test_messages_are_spread_over_time(
    clock_url: str, queues: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    error, orders, billing = queues
    where = ("--where", "endpoint in ('billing', 'cash')", "--over", "4s")
    assert replay(clock_url, error, *where, "--dry-run", "--json") == 0
    dry = json.loads(capsys.readouterr().out)
    assert (dry["messages"], dry["queues"], dry["missing_queues"]) == (8, {billing: 3, orders: 5}, [])
    assert sum(one["count"] for one in dry["due"]) == 8
    span = datetime.fromisoformat(dry["last_due"]) - datetime.fromisoformat(dry["first_due"])
    assert span == timedelta(seconds=3.5)
    assert replay(clock_url, error, *where, "--dry-run") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"8 messages of {error}; nothing was sent\n        3 to {billing}\n        5 to {orders}\n")
    assert "█" in text
    assert len(parked(clock_url, error)) == 8

    begun = datetime.now(UTC)
    with ThreadPoolExecutor() as threads:
        receiving = [
            threads.submit(drain, clock_url, queue, count, quiet=f"{TIMEOUT:g}s")
            for queue, count in ((orders, 5), (billing, 3))
        ]
        assert replay(clock_url, error, *where, "--json") == 0
        found = [one for receiver in receiving for one in receiver.result()]
    done = json.loads(capsys.readouterr().out)
    assert done["sent"] == 8
    assert done["seconds"] >= 3.5, "the last one leaves when it is due"
    assert {one.message_id for one in found} == {*(f"m{n}" for n in range(5)), *(f"b{n}" for n in range(3))}
    # No message comes before its turn, on a slow machine either. The dry run checks the even spread.
    turns = [begun + number * timedelta(seconds=0.5) for number in range(8)]
    assert all(came >= turn for came, turn in zip(sorted(one.received_at for one in found), turns, strict=True))
    assert all(one.lateness is None or one.lateness >= timedelta(0) for one in found)
    assert parked(clock_url, error) == []


@pytest.mark.usefixtures("spark")
def test_messages_that_cannot_be_sent_stay_in_the_queue(clock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    error, orders, gone = fresh("error"), fresh("orders"), fresh("gone")
    put(clock_url, error, 2, orders)
    put(clock_url, error, 3, gone, prefix="g")
    with bide.connect_sync(clock_url) as client:
        client.publish(b"?", to=error, message_id="stranger")
        client.destroy(bide.Topology(queues=[Queue.quorum(gone)]))
    assert replay(clock_url, error, "--dry-run", "--over", "1s") == 1
    dry = capsys.readouterr().out
    assert f"3 to {gone}  (does not exist)" in dry
    assert "1 without the queue on which they failed" in dry
    for over in ((), ("--over", "1s")):
        assert replay(clock_url, error, "--json", *over) == 1
        captured = capsys.readouterr()
        done = json.loads(captured.out)
        assert done["sent"] == (0 if over else 2)
        assert sorted(done["kept"].values()) == [1, 3]
        assert f"3 messages stay in {error}: the queue '{gone}' does not exist" in captured.err
        assert f"1 message stays in {error}: its headers do not say which queue it failed on" in captured.err
        assert {one.message_id for one in parked(clock_url, error)} == {"g0", "g1", "g2", "stranger"}
    assert replay(clock_url, error, "--to", orders) == 0
    capsys.readouterr()
    assert len(drain(clock_url, orders, 6)) == 6
    assert parked(clock_url, error) == []


@pytest.mark.usefixtures("spark")
def test_dead_letters_return_to_their_queue(clock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    dead, work = fresh("dead"), fresh("work")
    topology = bide.Topology(
        [Exchange(f"{dead}-x", "fanout")],
        [Queue.quorum(dead), Queue.quorum(work, {"x-dead-letter-exchange": f"{dead}-x"})],
        [Binding(f"{dead}-x", dead)],
    )
    with bide.connect_sync(clock_url) as client:
        client.declare(topology)
        for number in range(3):
            client.publish(b"%d" % number, to=work, message_id=f"d{number}")
        with client.consume(work, timeout=f"{TIMEOUT:g}s") as messages:
            for _, message in zip(range(3), messages, strict=False):
                message.reject()
    wait_until(lambda: len(parked(clock_url, dead)) == 3, "all of them are dead letters")
    assert replay(clock_url, dead, "--where", f"reason = 'rejected' and queue = '{work}'", "--limit", 2) == 0
    capsys.readouterr()
    assert [one.message_id for one in drain(clock_url, work, 2)] == ["d0", "d1"]
    assert [one.message_id for one in parked(clock_url, dead)] == ["d2"]


def test_only_the_chosen_failure_of_a_message_is_replayed(spark: SparkSession, clock_url: str) -> None:
    """One message that failed twice is in the queue twice, under one id; and what comes later is not chosen."""
    error, orders = fresh("error"), fresh("orders")
    for days, kind in ((1, ValueError("no")), (0, TimeoutError("slow"))):
        put(clock_url, error, 2, orders, error=kind, failed_at=datetime.now(UTC) - timedelta(days=days))
    given = source(clock_url, error, record=False)
    chosen = spread(choose(failed(spark, given), where="exception = 'TimeoutError'"), timedelta(0), begin=NOW).persist()
    assert chosen.count() == 2
    put(clock_url, error, 1, orders, error=TimeoutError("slow"), prefix="later")
    taken = {one.message_id for one in parked(clock_url, error) if one.exception == "TimeoutError"} - {"later0"}
    assert taken == {"m0", "m1"}
    assert [tuple(row) for row in send(chosen, given).collect()] == [("sent", orders, None, 2)]
    left = parked(clock_url, error)
    assert sorted((one.message_id, one.exception) for one in left) == [
        ("later0", "TimeoutError"),
        ("m0", "ValueError"),
        ("m1", "ValueError"),
    ]
    assert [tuple(row) for row in send(chosen, given).collect()] == [("gone", None, None, 2)]
    chosen.unpersist()
    assert len(drain(clock_url, orders, 2)) == 2
    assert rest(clock_url, orders) == []


@pytest.mark.usefixtures("spark")
def test_invalid_command_lines_are_refused(
    clock_url: str,
    queues: tuple[str, str, str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, _, _ = queues
    for queue, arguments, code, expected in (
        (error, ("--where", "exeption = 'x'"), 2, "bide: the filter \"exeption = 'x'\" cannot be used: [UNRESOLVED"),
        (
            error,
            ("--where", "cast(text as int) > 3"),
            2,
            "bide: the filter 'cast(text as int) > 3' cannot be used: [CA",
        ),
        (error, ("--over", "soon"), 2, "bide: "),
        (f"{error}-x", (), 1, f"bide: there is no queue '{error}-x'"),
    ):
        assert replay(clock_url, queue, *arguments) == code, arguments
        stderr = capsys.readouterr().err
        assert stderr.startswith(expected)
        assert stderr.count("\n") == 1
        assert not [one for one in caplog.records if one.levelname == "ERROR"], "nor does Spark say it once more"
    assert len(parked(clock_url, error)) == 8


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_killed_replay_is_finished_by_the_next(clock_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``kill -9`` of Python and JVM while messages are under way, and the same command again."""
    error, orders, number = fresh("error"), fresh("orders"), 3_000
    put(clock_url, error, number, orders)
    arguments = ("--url", clock_url, "--queue", error, "--where", "endpoint = 'billing'")
    # Over a minute, so that the kill comes in the middle even if this process pauses.
    command = [sys.executable, "-m", "bide", "pipeline", "replay", *arguments, "--over", "1m", *LOCAL]
    with closing(Counter(clock_url, orders)) as counter, started(command) as program:
        program.wait_until(lambda: counter() >= 300, "three hundred were sent")
        program.kill()
    wait_until_released(clock_url, error)
    left = parked(clock_url, error)
    assert 0 < len(left) < number

    assert run(["pipeline", "replay", *arguments, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["sent"] == len(left)
    found = Multiset((one.message_id, one.body) for one in drain_all(clock_url, orders, number))
    assert {message_id for message_id, _ in found} == {f"m{n}" for n in range(number)}, "nothing is lost"
    assert len(found) == number, "what came twice has the same id and body"
    assert parked(clock_url, error) == []
    # Those that were on their way, and those whose acknowledgements were.
    assert sum(found.values()) - number <= 3 * WINDOW


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--over", "1h")], ids=str)
def test_delay_queues_are_refused(clock_url: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    queue = fresh("orders")
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        client.publish(b"waits", to=queue, delay="15s")
    assert run(["pipeline", "replay", "--url", clock_url, "--queue", "bide.v1.s15", *options]) == 2
    stderr = capsys.readouterr().err
    assert "the queue 'bide.v1.s15' belongs to a delay infrastructure: messages wait there until they are due" in stderr
    assert "Traceback" not in stderr


@pytest.mark.usefixtures("spark")
def test_a_replay_does_not_deliver_where_a_stranger_may_not_write(
    clock_url: str, queues: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    error, orders, billing = queues
    before = len(parked(clock_url, error))
    for dry in ((), ("--dry-run",)):
        assert replay(clock_url, error, "--allow", orders, *dry) == 2
        captured = capsys.readouterr()
        assert f"queues that are not allowed ({billing}), and nothing was sent" in captured.err
        assert not captured.out
    assert replay(clock_url, error, "--allow", orders, "--to", billing) == 2
    assert len(parked(clock_url, error)) == before
    assert replay(clock_url, error, "--allow", orders, "--where", f"queue = '{orders}'", "--json") == 0
    sent = json.loads(capsys.readouterr().out)["sent"]
    assert sent > 0
    assert len(parked(clock_url, error)) == before - sent
