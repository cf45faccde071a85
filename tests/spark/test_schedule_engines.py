"""Schedules in this process, compared with Spark: messages, ids, parts and counts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.errors import InvalidRowError
from bide.pipelines.ledger import Ledger
from bide.pipelines.schedule import run as with_spark
from bide.pipelines.schedule import small as here
from bide.pipelines.schedule.hashes import parts_of
from bide.pipelines.schedule.plan import SchedulePlan
from bide.pipelines.schedule.progress import head_for
from bide.pipelines.schedule.rows import DIGEST, digested_rows
from bide.pipelines.schedule.rows import messages as messages_of_spark
from bide.pipelines.session import read
from bide.pipelines.small_table import read_small
from bide.pipelines.small_times import zone_of
from bide.spark.sink_settings import SinkSettings
from tests.broker.conftest import SMALL_CLOCK, clock_url
from tests.spark.receiving import drain, new_queue
from tests.spark.test_keyed_schedule import cancel_all, plan_for
from tests.spark.test_keyed_sink import DUE, versions, with_gate
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["clock_url"]

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
BERLIN = "Europe/Berlin"
NIGHT = datetime.fromisoformat("2026-03-29T00:30:00")
"""The night in which clocks in Berlin go forward; they go back 210 days later."""


def plan_of(url: str = "amqp://localhost", to: str = "orders", **columns: Any) -> SchedulePlan:
    settings = SinkSettings.make(url, infrastructure=SMALL_CLOCK, declare=False, constants={"to": to})
    return SchedulePlan(settings=settings, **columns)


def write_csv(folder: Path) -> Path:
    path = folder / "zoo.csv"
    path.write_bytes(
        ",due,text,\"with, comma\",\"\"\r\n"
        "1,2026-11-28 13:00:00,plain,\"a, b\",\r\n"
        "2,2026-11-28T13:00:00.5Z,\"\",  blanks  ,\"\"\r\n"
        "   \r\n"
        "3,2026-11-28,Größe 😀\tтаб,1.50,\r\n"
        "4,2026-11-28 13:00:00+02:00,/</&'%s,true,x\n"
        "4,2026-11-28 13:00:00+02:00,/</&'%s,true,x\n"
        "5,soon,no time,,\n"
        "6,,no time,,\n"
        "7,2026-02-30,no such day,,\n"
        "8,2019-06-15 02:30:00.123456,long past,,\n"
        "9,2026-11-28 13:05,without seconds,,\n"
        "10,2026-11-28T13:05,without seconds,,".encode()
    )  # fmt: skip
    return path


def write_json(folder: Path) -> Path:
    path = folder / "zoo.jsonl"
    rows = [
        {"z": 1, "due": "2026-11-28T13:00:00Z", "A": True, "price": 4, "none": None},
        {"z": -(1 << 63), "due": "2026-11-28T13:00:00Z", "price": 4.99, "t": 'quote " back \\ slash / \x7f'},
        {"due": "2026-11-28T13:00:00Z", "t": "\x00\x01\x1f\b\t\n\f\r\u2028 ü 😀"},
        {"due": None, "A": False, "price": -0.001},
    ]
    path.write_text("\n".join(json.dumps(one, ensure_ascii=False) for one in rows) + "\n\n", encoding="utf-8")
    return path


def write_parquet(folder: Path) -> Path:
    chance = random.Random(5)
    moment = datetime(2026, 11, 28, 13, tzinfo=UTC)
    count = 300
    columns: dict[str, Any] = {
        "due": pa.array([moment + timedelta(microseconds=one * 1_234_567) for one in range(count)],
                        pa.timestamp("us", "Europe/Paris")),
        "tiny": pa.array([one % 128 for one in range(count)], pa.int8()),
        "small": pa.array([-one for one in range(count)], pa.int16()),
        "whole": pa.array([one * 1_000_003 for one in range(count)], pa.int32()),
        "long": pa.array([None if one % 3 else one << 50 for one in range(count)], pa.int64()),
        "price": pa.array([round(chance.uniform(-1e6, 1e6), 2) for _ in range(count)]),
        "share": pa.array([0.0 if not one % 7 else chance.randint(1, 9_999_999) / 1e4 for one in range(count)]),
        "exact": pa.array([Decimal(one).scaleb(-9) for one in range(count)], pa.decimal128(20, 9)),
        "flag": pa.array([[True, False, None][one % 3] for one in range(count)]),
        "bytes": pa.array([bytes(range(one % 250)) for one in range(count)]),
        "day": pa.array([date(1970, 1, 1) + timedelta(days=one * 97) for one in range(count)]),
        "at": pa.array([NIGHT + timedelta(hours=one) for one in range(count)],
                       pa.timestamp("us")),
        "milli": pa.array([NIGHT + timedelta(days=210, milliseconds=5) + timedelta(minutes=30 * one)
                           for one in range(count)], pa.timestamp("ms")),
        "kind": pa.array([f"k{one % 3}" for one in range(count)]).dictionary_encode(),
        "wait": pa.array([["5m", "PT90S", "1h30m0.5s", "never", None][one % 5] for one in range(count)],
                         pa.large_string()),
    }  # fmt: skip
    path = folder / "zoo.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


def compare(spark: SparkSession, path: Path, plan: SchedulePlan, zone: str = "UTC") -> int:
    """Compare everything that the two engines make of a file; returns the number of rows."""
    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        rows = read(spark, str(path), format=None, options={})
        digested = digested_rows(rows, plan)
        named = [one for one in digested.columns if one not in ("headers", "deliver_at")]
        due = [F.unix_micros("deliver_at").alias("deliver_at")] if plan.at_column else []
        headers = [F.map_entries("headers").cast("string").alias("headers")] if plan.header_columns else []
        part = F.expr(f"pmod(hash({DIGEST}), 7)").alias("part")
        expected = [row.asDict() for row in digested.select(*named, *due, *headers, part).collect()]
        surveyed = with_spark.survey(rows, plan, now=NOW)
        counted = [
            (row["due"], row["count"])
            for row in with_spark.due_times(messages_of_spark(rows, plan), timedelta(hours=1), now=NOW)
            .selectExpr("unix_seconds(due) as due", "count").collect()
        ]  # fmt: skip
        ids = sorted(str(row["message_id"]) for row in messages_of_spark(rows, plan).collect())
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    table, _ = read_small(str(path), format=None, options={})
    assert table.column_names == rows.columns
    found = here.messages(table, plan, zone_of(zone))
    columns = {name: one.to_pylist() for name, one in found.columns.items() if name not in ("headers", "deliver_at")}
    if plan.at_column:
        columns["deliver_at"] = found.due
    if plan.header_columns:
        entries = found.columns["headers"].to_pylist()
        columns["headers"] = [f"[{', '.join(f'{{{name}, {text}}}' for name, text in one)}]" for one in entries]
    columns[DIGEST] = found.digests
    columns["part"] = parts_of(found.digests, 7)
    actual = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def order(row: dict[str, Any]) -> Any:
        return row[DIGEST], str(row)

    for one, other in zip(sorted(actual, key=order), sorted(expected, key=order), strict=True):
        value = other["value"]
        assert one == {**other, "value": bytes(value) if isinstance(value, bytearray) else value}
    assert here.survey(found, now=NOW) == surveyed
    assert [
        (int(due.timestamp()), count) for due, count in here.due_times(found, timedelta(hours=1), now=NOW)
    ] == counted
    assert sorted(map(str, here.message_ids(found))) == ids
    return len(actual)


def test_both_engines_make_the_same_messages_of_csv(spark: SparkSession, tmp_path: Path) -> None:
    path = write_csv(tmp_path)
    assert compare(spark, path, plan_of(at_column="due", header_columns=("text",))) == 11
    assert compare(spark, path, plan_of(at_column="due", name="again", body_column="text"), BERLIN) == 11


def test_neither_engine_gives_a_due_time_if_no_row_has_one(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("due\nsoon\nlater\n")
    assert compare(spark, path, plan_of(at_column="due")) == 2


def test_both_engines_make_the_same_messages_of_json(spark: SparkSession, tmp_path: Path) -> None:
    path = write_json(tmp_path)
    assert compare(spark, path, plan_of(at_column="due", header_columns=("A", "z", "price"))) == 4
    assert compare(spark, path, plan_of(delay_column="z", body_columns=("t", "none"))) == 4


def test_both_engines_make_the_same_messages_of_parquet(spark: SparkSession, tmp_path: Path) -> None:
    path = write_parquet(tmp_path)
    texts = ("tiny", "small", "long", "price", "flag", "day", "at", "milli", "kind")
    assert compare(spark, path, plan_of(at_column="due", header_columns=texts)) == 300
    assert compare(spark, path, plan_of(at_column="at"), BERLIN) == 300
    assert compare(spark, path, plan_of(at_column="day", body_column="bytes", id_column="whole")) == 300
    assert compare(spark, path, plan_of(delay_column="wait", key_column="whole")) == 300
    assert compare(spark, path, plan_of(delay_column="tiny", header_columns=("due",))) == 300


def test_both_engines_refuse_the_same_ids_and_keys(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ids = ["a", "a", "", None, "k\x07", "é" * 200, "good"]
    path.write_text("\n".join(json.dumps({"id": one, "wait": "5m"}) for one in ids))
    rows = read(spark, str(path), format=None, options={})
    table, _ = read_small(str(path), format=None, options={})
    for plan in (plan_of(delay_column="wait", id_column="id"), plan_of(delay_column="wait", key_column="id")):
        errors = []
        for survey in (
            partial(with_spark.survey, rows, plan, now=NOW),
            partial(here.survey, here.messages(table, plan, UTC), now=NOW),
        ):
            with pytest.raises(InvalidRowError) as caught:
                survey()
            before, _, after = str(caught.value).partition(": ")
            errors.append((before, len(after.split(", "))))
        assert errors[0] == errors[1]


def test_a_key_stays_cancelled_when_the_other_engine_repeats_its_part(
    spark: SparkSession, vhost: Vhost, tmp_path: Path
) -> None:
    plan = plan_for(vhost.url, new_queue(vhost.url), header_columns=("tenant", "price"))
    runs: list[tuple[Ledger, list[Callable[[], object]]]] = []
    for number in range(2):
        keys = [f"{one}-{number}" for one in (*range(57), "é", "\ufb01", "\U0001f600")]
        random.Random(number).shuffle(keys)
        common = {"due": DUE.isoformat(), "tenant": "t", "price": 1.5}
        path = tmp_path / f"rows-{number}.jsonl"
        path.write_text("\n".join(json.dumps({"customer": key, **common}) for key in keys))
        table, _ = read_small(str(path), format=None, options={})
        found = here.messages(table, plan, UTC)
        ledger = Ledger(str(tmp_path / f"ledger-{number}"))
        head = head_for(ledger, plan, here.survey(found, now=NOW), part_rows=10)
        rows = read(spark, str(path), format=None, options={})
        engines: list[Callable[[], object]] = [
            partial(here.send, found, ledger, head),
            partial(with_spark.send, rows, plan, ledger, head),
        ]
        runs.append((ledger, engines if number else engines[::-1]))
    for _, (begin, _) in runs:
        begin()
    assert with_gate(vhost.url, tmp_path / "gate", cancel_all) == 120
    for ledger, (_, repeat) in runs:
        # As if the run had been killed before it recorded these parts.
        for lost in ledger.parts()[::2]:
            (Path(ledger.folder) / f"part-{lost.part:05}.json").unlink()
        repeat()
        assert sum(one.sent for one in ledger.parts()) == 60
    assert with_gate(vhost.url, tmp_path / "gate", versions) == {}


def test_each_engine_continues_the_run_of_the_other(spark: SparkSession, clock_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"o-{one}", "wait": "1ms"}) for one in range(60)))
    rows = read(spark, str(path), format=None, options={})
    table, _ = read_small(str(path), format=None, options={})
    queue = new_queue(clock_url)
    plan = plan_of(clock_url, to=queue, delay_column="wait")
    found = here.messages(table, plan, UTC)
    surveys = [with_spark.survey(rows, plan, now=NOW), here.survey(found, now=NOW)]
    for number, survey in enumerate(surveys):
        ledger = Ledger(str(tmp_path / f"ledger-{number}"))
        head = head_for(ledger, plan, survey, part_rows=10)
        first: list[Any] = []
        if number:
            first = [one.part for one in here.send(found, ledger, head)]
        else:
            first = [row["part"] for row in with_spark.send(rows, plan, ledger, head).collect()]
        ids = sorted(str(one.message_id) for one in drain(clock_url, queue, 60))
        for part in first[:2]:
            (tmp_path / f"ledger-{number}" / f"part-{part:05}.json").unlink()
        if number:
            again = [row.asDict() for row in with_spark.send(rows, plan, ledger, head).collect()]
        else:
            again = [{"part": one.part, "sent": one.sent} for one in here.send(found, ledger, head)]
        assert sorted(one["part"] for one in again) == sorted(first[:2])
        repeated = drain(clock_url, queue, sum(one["sent"] for one in again))
        assert {str(one.message_id) for one in repeated} <= set(ids)
        assert sum(one.sent for one in ledger.parts()) == len(set(ids)) == 60
