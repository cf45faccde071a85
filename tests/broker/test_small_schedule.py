"""``bide pipeline schedule`` of a small table, without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import bide
from bide.cli.app import run
from tests.broker.receiving import fresh
from tests.spark.receiving import drain, rest

ON_SMALL_CLOCK = ("--max-delay", "20s", "--resolution", "50ms")

Schedule = Callable[..., Any]


@pytest.fixture
def queue(clock_url: str) -> str:
    name = fresh("reminders")
    with bide.connect_sync(clock_url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


@pytest.fixture
def schedule(clock_url: str, queue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Schedule:
    """Schedule a table, and return what is printed."""

    def schedule(source: Path, *arguments: str, code: int = 0) -> Any:
        given = ("--ledger", str(tmp_path / "ledger"), "--engine", "local", *ON_SMALL_CLOCK)
        target = ("--url", clock_url, "--to", queue)
        assert run(["pipeline", "schedule", str(source), *target, *given, "--json", *arguments]) == code
        found = capsys.readouterr()
        return json.loads(found.out) if code == 0 else found.err

    return schedule


def test_each_row_is_sent_once(schedule: Schedule, clock_url: str, queue: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("order,wait\n" + "".join(f"o-{one},{one % 3}ms\n" for one in range(25)) + "o-0,0ms\n")
    arguments = ("--delay-column", "wait", "--header-columns", "wait", "--part-rows", "7", "--type", "Remind")
    done = schedule(source, *arguments)
    assert (done["rows"], done["sent"], done["sent_before"], done["engine"]) == (26, 26, 0, "local")
    assert done["engine_reason"] == "--engine local was given"
    received = drain(clock_url, queue, 26)
    orders = sorted(one.json()["order"] for one in received)
    assert orders == sorted([*(f"o-{one}" for one in range(25)), "o-0"])
    assert len({one.message_id for one in received}) == 26
    first = next(one for one in received if one.json()["order"] == "o-1")
    assert (first.headers["wait"], first.type, first.content_type) == ("1ms", "Remind", "application/json")
    again = schedule(source, *arguments)
    assert (again["sent"], again["sent_before"]) == (0, 26)
    source.write_text(source.read_text() + "o-99,1ms\n")
    assert "the input has changed" in schedule(source, *arguments, code=2)
    assert rest(clock_url, queue) == []


def test_overdue_and_invalid_rows_are_refused_or_set_aside(
    schedule: Schedule, clock_url: str, queue: str, tmp_path: Path
) -> None:
    source, rejects = tmp_path / "rows.parquet", tmp_path / "rejects"
    now = datetime.now(UTC)
    times = [now - timedelta(hours=1), now + timedelta(seconds=10), None, now + timedelta(days=3)]
    parquet.write_table(pa.table({"n": range(4), "due": pa.array(times, pa.timestamp("us", "UTC"))}), source)
    assert "2 of 4 rows cannot be sent" in schedule(source, "--at-column", "due", code=2)
    given = ("--at-column", "due", "--rejects", str(rejects))
    assert "1 of 4 rows were due more than 5 min before" in schedule(source, *given, code=2)
    done = schedule(source, *given, "--past", "reject")
    assert (done["sent"], done["rejected"], done["dropped"], done["overdue"]) == (1, 3, 0, 1)
    assert [one.json() for one in drain(clock_url, queue, 1)] == [{"n": 1}]
    found = parquet.read_table(rejects).to_pylist()
    assert sorted((json.loads(one["value"])["n"], one["reject_status"]) for one in found) == [
        (0, "past"),
        (2, "invalid"),
        (3, "invalid"),
    ]


def test_what_only_spark_can_read_is_refused_with_the_reason(schedule: Schedule, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text('order,wait\n"a ""b""",1ms\n')
    assert schedule(source, "--delay-column", "wait", code=2) == (
        f"bide: {source} has a quotation mark or a line break inside a cell, which only Spark supports: leave out "
        "--engine local\n"
    )
