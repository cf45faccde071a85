"""Replays of an audit with Spark, in this process, and with both by turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from bide.pipelines.audit.columns import FACT_COLUMNS, arrow_schema
from bide.pipelines.audit.folder import Folder
from bide.pipelines.replay import from_audit, small_audit
from bide.pipelines.replay.choices import Choices, run_of
from bide.pipelines.replay.fact_tables import fact_tables
from bide.pipelines.replay.tap_reader import ReplayRun
from tests.audited_shop import AuditedShop, fill
from tests.spark.receiving import drain, rest
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEGIN = datetime(2026, 11, 21, 12, tzinfo=UTC)
PLAN, BROKER = "shop", "localhost"


@pytest.fixture(autouse=True)
def cleared(spark: SparkSession) -> Iterator[None]:
    yield
    spark.catalog.clearCache()


def write_facts(folder: Path, *, seed: int) -> None:
    """Write facts of few messages, with equal times and offsets, nulls, and copies of all systems."""
    chance = random.Random(seed)

    def moment() -> datetime:
        return BEGIN + chance.choice((1, 1_000)) * timedelta(microseconds=chance.randrange(0, 20_000_000, 250))

    def fact(table: str, number: int) -> dict[str, Any]:
        sent = chance.choice((None, BEGIN, BEGIN + timedelta(microseconds=999), moment()))
        found: dict[str, Any] = {
            "message_id": chance.choice((None, *(f"m{one}" for one in range(60)), "Ünïcode \U0001f40b", "ﬀ")),
            "stream": chance.choice(("tap", "other")),
            "offset": chance.randrange(40),
            "sent": sent,
            "due": chance.choice((None, moment())),
            "queue": chance.choice((None, "orders", "mails")),
            "target": chance.choice((None, "q:orders", "q:mails", "x:shop")),
            "layout": chance.choice(("clock", "nservicebus", "nservicebus-v1", "celery")),
            "kind": chance.choice(("failed", "retried", "parked", "discarded", "expired")),
            "ended": chance.choice((BEGIN, moment())),
            "endpoint": chance.choice((None, "shop", "mail")),
            "exception": chance.choice((None, "ValueError", "builtins.Error")),
            "text": chance.choice((None, "no", "")),
            "group": chance.choice((None, "g")),
            "type": chance.choice((None, "Order")),
            table: moment(),
        }
        if table in ("processed", "failed"):
            # An offset of the stream of events has one event.
            unseen = {"message_id": "unseen", "queue": "orders", "kind": "parked"} if number == 0 else {}
            found |= {**unseen, "stream": "events", "offset": 2 * number + (table == "failed")}
        return found

    for table, rows in (("scheduled", 120), ("delivered", 120), ("processed", 60), ("failed", 400)):
        schema = arrow_schema(FACT_COLUMNS[table])
        facts = [fact(table, number) for number in range(rows)]
        for day, some in (("2026-11-21", facts[::2]), ("2026-11-22", facts[1::2])):
            place = folder / table / f"day={day}" / "batch=0"
            place.mkdir(parents=True)
            parquet.write_table(pa.Table.from_pylist(some, schema).drop_columns(["day"]), place / "part-0.parquet")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_both_engines_find_the_same_failures_and_copies(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    write_facts(tmp_path / "audit", seed=seed)
    folder = Folder(str(tmp_path / "audit"))
    with fact_tables(folder) as tables:
        failures = tables.failures()
        here = tables.locate(failures)
    assert len(failures) > 40
    assert len({row["stream"] for row in here}) == 3, "from both streams, and missing ones"
    found = from_audit.failures(spark, folder).persist()
    located = from_audit.locate(found, folder)
    times = {name: f"unix_micros({name}) as {name}" for name in ("failed_at", "sent")}
    rows = located.orderBy("place").selectExpr(*(times.get(name, f"`{name}`") for name in here[0])).collect()
    assert [row.asDict() for row in rows] == here
    assert [row["place"] for row in located.select("place").orderBy("place").collect()] == [*range(len(here))]


@pytest.mark.parametrize("over", [timedelta(0), timedelta(seconds=5)], ids=["at once", "spread"])
def test_both_engines_record_the_same_choice(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, over: timedelta
) -> None:
    shop = AuditedShop(vhost, tmp_path)
    fill(shop, 7)
    places = {name: Choices(folder=str(tmp_path / f"ledger of {name}")) for name in ("spark", "local")}
    with_spark = from_audit.find(spark, shop.folder, places["spark"], url=shop.url, limit=5)
    local = small_audit.find(shop.folder, places["local"], url=shop.url, limit=5)
    for name in ("parked", "unseen", "dropped"):
        assert getattr(local, name) == getattr(with_spark, name)
    ledgers = [
        from_audit.record(places["spark"], with_spark.messages, over, part_rows=2, plan=PLAN, broker=BROKER),
        small_audit.record(places["local"], local.messages, over, part_rows=2, plan=PLAN, broker=BROKER),
    ]
    heads = [one.head() for one in ledgers]
    assert heads[0] == heads[1]

    def rows(place: int) -> list[dict[str, Any]]:
        found = small_audit.chosen_of(ledgers[place]).to_pylist()
        first = min(row["deliver_at"] for row in found)
        return [{**row, "deliver_at": row["deliver_at"] - first} for row in found]

    by_part = [sorted(rows(place), key=lambda row: (row["part"], row["message_id"])) for place in range(2)]
    assert by_part[0] == by_part[1]
    assert len(by_part[0]) == 5
    schemas = [from_audit.chosen_of(spark, ledger).schema for ledger in ledgers]
    assert schemas[0] == schemas[1]
    # Each leaves out the earlier choice of the other.
    left = [one.message_id for one in small_audit.find(shop.folder, places["spark"], url=shop.url).messages]
    assert left == ["m5", "m6"]
    left_by_spark = from_audit.without_earlier(from_audit.failures(spark, shop.folder), places["local"])
    assert [row["message_id"] for row in left_by_spark.orderBy("place").collect()] == left


@pytest.mark.parametrize("first", ["spark", "local"])
def test_each_engine_finishes_a_choice_of_the_other(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, first: str
) -> None:
    shop = AuditedShop(vhost, tmp_path)
    fill(shop, 5)
    choices = Choices(folder=str(shop.ledger))
    if first == "spark":
        found = from_audit.find(spark, shop.folder, choices, url=shop.url).messages
        ledger = from_audit.record(choices, found, part_rows=2, plan=PLAN, broker=BROKER)
    else:
        messages = small_audit.find(shop.folder, choices, url=shop.url).messages
        ledger = small_audit.record(choices, messages, part_rows=2, plan=PLAN, broker=BROKER)
    replay = ReplayRun(url=shop.url, run=run_of(ledger))

    def send_with_spark() -> list[tuple[int, int]]:
        return [(row["part"], row["sent"]) for row in from_audit.send(spark, ledger, replay).collect()]

    def send_here() -> list[tuple[int, int]]:
        return [(one.part, one.sent) for one in small_audit.send(ledger, replay)]

    one, other = (send_with_spark, send_here) if first == "spark" else (send_here, send_with_spark)
    assert sorted(one()) == [(0, 2), (1, 2), (2, 1)]
    # As if the run had been interrupted before the second part.
    Path(ledger.folder, "part-00001.json").unlink()
    assert other() == [(1, 2)]
    assert choices.unfinished(PLAN, BROKER) is None
    found_ids = [str(message.message_id) for message in drain(shop.url, "orders", 7)]
    assert sorted(found_ids) == ["m0", "m1", "m2", "m2", "m3", "m3", "m4"]
    assert rest(shop.url, "orders") == []
