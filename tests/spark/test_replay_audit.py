"""``bide pipeline replay --audit``: failed messages of an audit, from streams of real taps."""

from __future__ import annotations

import json
import sys
from collections import Counter as Multiset
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import bide
from bide.cli.app import run
from bide.delay.taps import Retention, taps_of
from bide.error_queues import ErrorQueue, Selection
from bide.errors import FolderInUseError, InvalidInputError
from bide.pipelines.audit.columns import FACT_COLUMNS, arrow_schema
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.replay import tap_reader
from bide.pipelines.replay.choices import Choices
from bide.pipelines.replay.from_audit import chosen_of, failures, find
from bide.topology import Queue, Topology
from tests.audited_shop import AuditedShop, check_that_a_limit_counts_only_available_messages, events, fill
from tests.broker.conftest import SMALL_CLOCK
from tests.spark.receiving import drain, drain_all, rest
from tests.spark.spark_processes import LOCAL, started
from tests.spark.test_folder_lock import holder_of
from tests.spark.test_replay import on_the_wire
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What is said with it is said before Spark is there, which has no such time zone.
NOWHERE = ("--time-zone", "Mars/Olympus")


@pytest.fixture
def shop(spark: SparkSession, vhost: Vhost, tmp_path: Path) -> Iterator[AuditedShop]:
    yield AuditedShop(vhost, tmp_path / "[eu]")
    # A session is the tests' own: tables that were kept are no longer needed.
    spark.catalog.clearCache()


@pytest.mark.long
@pytest.mark.slow
def test_discarded_messages_are_replayed_once(
    spark: SparkSession, shop: AuditedShop, release: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def publish(client: bide.Client) -> None:
        for number in range(4):
            headers = {"discount": 0.5, "n": number, "tags": ["a", 1], "x-tags": ["a", 1]}
            await client.publish(
                b"d%d" % number, to="orders", delay="100ms", message_id=f"d{number}", type="Order", headers=headers
            )
        await client.publish(b"p", to="orders", delay="100ms", message_id="p", headers={"bad": True})
        await client.publish(b"n", to="orders", message_id="never-delayed", headers={"discount": 1})
        await client.publish(b"g", to="orders", delay="100ms", message_id="good")

    async def fail(client: bide.Client) -> None:
        await shop.fail(client, 7)

    shop.work(publish, fail)
    shop.audit()
    known = {row["message_id"]: row for row in failures(spark, shop.folder).collect()}
    assert {name: row["reason"] for name, row in known.items()} == {
        **dict.fromkeys(("d0", "d1", "d2", "d3", "never-delayed"), "discarded"),
        "p": "parked",
    }
    assert (known["p"]["attempts"], known["d0"]["attempts"]) == (2, 1)
    assert (known["d0"]["exception"], known["d0"]["endpoint"], known["d0"]["queue"]) == (
        "LookupError",
        "shop",
        "orders",
    )

    assert shop.replay("--dry-run", "--json") == 1
    captured = capsys.readouterr()
    dry = json.loads(captured.out)
    assert (dry["messages"], dry["queues"]) == (4, {"orders": 4})
    assert (dry["parked"], dry["unseen"], dry["dropped"]) == (1, 1, 0)
    assert not shop.ledger.exists()
    assert "bide: the bodies of some messages are missing, and nothing was sent: 1 that no tap has seen" in captured.err
    assert shop.replay("--where", "exception = 'LookupError' and message_id like 'd%'", "--over", "12s", "--json") == 0
    captured = capsys.readouterr()
    done = json.loads(captured.out)
    assert (done["sent"], done["sent_before"], done["gone"]) == (4, 0, 0)
    assert "bide: streams drop headers whose values are lists or tables" in captured.err
    found = sorted(drain(shop.url, "orders", 4), key=lambda one: str(one.message_id))
    assert [(one.message_id, one.body, one.type) for one in found] == [
        (f"d{number}", b"d%d" % number, "Order") for number in range(4)
    ]
    assert [one.headers["n"] for one in found] == [0, 1, 2, 3]
    kept = ["a", 1] if release >= (4, 0) else None
    assert [(one.headers.get("tags"), one.headers.get("x-tags")) for one in found] == [(None, kept)] * 4
    assert all(one.history.returned == 1 and one.history.retries == 0 for one in found)
    rows = chosen_of(spark, Choices(folder=str(shop.ledger)).ledger(1))
    rows = rows.selectExpr("message_id", "unix_micros(deliver_at) as due")
    micros = {row["message_id"]: row["due"] for row in rows.collect()}
    assert sorted(one - min(micros.values()) for one in micros.values()) == [0, 3_000_000, 6_000_000, 9_000_000]
    assert done["seconds"] >= 9, "the last one is sent when it is due"

    # What was chosen is not chosen again, unless it fails again.
    assert shop.replay("--skip-missing") == 0
    assert "replayed 0 messages" in capsys.readouterr().out
    assert rest(shop.url, "orders") == []

    async def again(client: bide.Client) -> None:
        await client.publish(b"d1", to="orders", delay="50ms", message_id="d1", headers={"discount": 1})
        await shop.fail(client, 1)

    shop.work(again)
    shop.audit()
    assert shop.replay("--skip-missing", "--parked") == 0
    assert "replayed 2 messages" in capsys.readouterr().out
    assert {one.message_id for one in drain(shop.url, "orders", 2)} == {"d1", "p"}
    assert rest(shop.url, "orders") == []


def test_messages_of_delta_tables_are_replayed_once_by_both_engines(
    spark: SparkSession,
    vhost: Vhost,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = AuditedShop(vhost, tmp_path, table_format="delta")
    fill(shop, 4)

    async def expire(client: bide.Client) -> None:
        await client.publish_many(events("expired", range(1, 3)))
        await client.publish_many(events("processed", range(3, 4)))

    shop.work(expire)
    shop.audit()
    # The files of a batch that was dropped stay in the folder, and are not in the table.
    storage = open_storage(shop.folder)
    rows = storage.read("failed", arrow_schema(FACT_COLUMNS["failed"]))
    storage.append(rows.set_column(0, "message_id", pa.array(["dropped"] * rows.num_rows)), "failed", 99)
    storage.drop_batch("failed", 99)
    files = list(Path(shop.folder.path("failed")).rglob("*.parquet"))
    assert any("dropped" in parquet.ParquetFile(one).read()["message_id"].to_pylist() for one in files)

    def replay(*arguments: str) -> dict[str, Any]:
        assert shop.replay(*arguments, "--json") == 0
        done: dict[str, Any] = json.loads(capsys.readouterr().out)
        return done

    for engine in ("local", "spark"):
        seen = replay("--engine", engine, "--dry-run")
        assert (seen["messages"], seen["queues"], seen["engine"]) == (3, {"orders": 3}, engine)
    expired = replay("--engine", "local", "--where", "reason = 'expired'", "--limit", "1")
    assert (expired["sent"], expired["engine"]) == (1, "local")
    others = replay("--where", "attempts >= 1")
    assert (others["sent"], others["engine"]) == (2, "spark")
    assert {one.message_id for one in drain(shop.url, "orders", 3)} == {"m0", "m1", "m2"}
    assert rest(shop.url, "orders") == []
    assert [replay("--engine", one)["sent"] for one in ("local", "spark")] == [0, 0]
    monkeypatch.setitem(sys.modules, "deltalake", None)
    for engine in ("local", "spark"):
        assert shop.replay("--engine", engine) == 2
        assert "Delta tables need the package deltalake: pip install 'bide[delta]'" in capsys.readouterr().err


def test_a_replayed_message_equals_that_of_a_retry(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    """Out of a tap, after a retry, as out of the error queue."""

    async def publish(client: bide.Client) -> None:
        await client.publish(
            b"p", to="orders", delay="100ms", message_id="p", headers={"bad": True}, type="T", expiration="1h"
        )

    async def fail(client: bide.Client) -> None:
        await shop.fail(client, 1)

    async def retry(client: bide.Client) -> None:
        await ErrorQueue(client, "errors", audit=False).retry(Selection())

    shop.work(publish, fail)
    shop.audit()
    assert shop.replay("--parked") == 0
    replayed = on_the_wire(shop.url, "orders")
    shop.work(retry)
    retried = on_the_wire(shop.url, "orders")
    # The copy for the retry passed the tap before its attempt failed: that one it does not count.
    names = replayed["headers"].keys() | retried["headers"].keys()
    other = {name for name in names if replayed["headers"].get(name) != retried["headers"].get(name)}
    assert other == {"bide-operator-run", "bide-attempts", "bide-attempt-times"}
    assert {**replayed, "headers": None} == {**retried, "headers": None}
    capsys.readouterr()


async def drop(client: bide.Client, stream: str) -> None:
    """Delete a stream and its messages."""
    await client.destroy(Topology(queues=[Queue(stream)]), force=True)


@pytest.mark.long
def test_messages_missing_in_the_streams_are_reported(
    spark: SparkSession, shop: AuditedShop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the driver alone, which asks how far a stream goes.
    monkeypatch.setattr(tap_reader, "_QUIET", 1.0)
    fill(shop, 3)
    given = (spark, shop.folder, Choices(folder=str(shop.ledger)))
    assert shop.replay("--where", "sent >") == 2
    assert "the columns are message_id, type, queue," in capsys.readouterr().err
    found = find(*given, url=shop.url, limit=2)
    assert (found.messages.count(), found.unseen, found.dropped) == (2, 0, 0)
    taps = taps_of(SMALL_CLOCK)
    with bide.connect_sync(shop.url) as client:
        client.destroy(Topology(queues=[Queue("orders")]))
    assert shop.replay() == 1
    assert "messages failed on queues that do not exist any more (orders), and nothing was sent" in (
        capsys.readouterr().err
    )
    with bide.connect_sync(shop.url) as client:
        client.declare(Topology(queues=[Queue.quorum("orders")]))
        client.wait_for(drop(client.client, taps.delivered))
    assert shop.replay() == 1
    assert "3 that the retention of a tap's stream has removed, or whose stream was deleted" in capsys.readouterr().err
    assert shop.replay("--skip-missing") == 0
    assert "replayed 0 messages" in capsys.readouterr().out

    async def start_anew(client: bide.Client) -> None:
        await client.declare(taps.topology(Retention()), external=[*taps.sources, *taps.names])
        await client.publish("another", to="orders", delay="50ms")

    shop.work(start_anew)
    assert [one.body for one in drain(shop.url, "orders", 1)] == [b"another"]
    found = find(*given, url=shop.url)
    assert (found.messages.count(), found.unseen, found.dropped) == (1, 0, 2), "it has one message by now"
    assert shop.replay("--skip-missing", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["sent"], done["dropped"], done["gone"]) == (0, 2, 1), "what is there is another message"
    assert run(["pipeline", "replay", "--url", shop.url, "--audit", str(shop.ledger)]) == 2
    assert "has no audit" in capsys.readouterr().err
    for arguments in (
        (),
        ("--queue", "x", "--audit", "y"),
        ("--queue", "x", "--parked"),
        ("--audit", "x", "--no-audit"),
    ):
        assert run(["pipeline", "replay", *arguments]) == 2


@pytest.mark.long
def test_a_limit_counts_only_available_messages(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    check_that_a_limit_counts_only_available_messages(shop, capsys)


def test_a_second_replay_is_refused_while_the_first_runs(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    fill(shop, 2)
    with holder_of(shop.ledger) as process:
        assert shop.replay(*NOWHERE) == 1
        expected = f"bide: the ledger {shop.ledger} is in use by the process {process.pid} on "
        assert expected in capsys.readouterr().err
        assert shop.replay("--dry-run") == 0, "it chooses nothing"
        assert Choices(folder=str(shop.ledger)).count() == 0
    no_folder = shop.ledger.parent / "file"
    no_folder.touch()
    assert shop.replay("--ledger", no_folder / "ledger", *NOWHERE) == 2
    assert f"the ledger {no_folder}/ledger cannot be used: " in capsys.readouterr().err
    assert shop.replay() == 0
    assert {one.message_id for one in drain(shop.url, "orders", 2)} == {"m0", "m1"}
    assert rest(shop.url, "orders") == []


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_replay_is_continued(shop: AuditedShop, capsys: pytest.CaptureFixture[str]) -> None:
    """``kill -9`` of Python and JVM while parts are under way, and the same command again."""
    number = 2_400
    fill(shop, number)
    # Many parts, so that the kill comes in the middle even if this process pauses.
    options = ("--part-rows", "50")
    command = [sys.executable, "-m", "bide", *shop.command(), *options, *LOCAL]
    ledger = Choices(folder=str(shop.ledger)).ledger(1)
    with started(command) as program:
        program.wait_until(lambda: bool(ledger.numbers()), "a part was sent")
        with pytest.raises(FolderInUseError), Choices(folder=str(shop.ledger)).lock():
            pytest.fail("another could choose the same while it sends")
        program.kill()
    assert 0 < sum(one.sent for one in ledger.parts()) < number
    with pytest.raises(InvalidInputError, match="has an unfinished replay"):
        Choices(folder=str(shop.ledger)).unfinished("another", "broker")
    assert shop.replay("--limit", "1", *NOWHERE) == 2
    assert "has an unfinished replay" in capsys.readouterr().err
    assert shop.replay(*options, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["sent"] + done["sent_before"] == number
    found = Multiset((one.message_id, one.body) for one in drain_all(shop.url, "orders", number))
    assert {message_id for message_id, _ in found} == {f"m{n}" for n in range(number)}, "nothing is lost"
    assert len(found) == number, "what came twice has the same id and body"
    assert sum(found.values()) - number <= 4 * 50, "no more than the parts that were under way"
