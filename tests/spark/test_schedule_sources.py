"""``bide pipeline schedule`` with all table formats, and without permission to declare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bide.cli.app import run
from tests.broker.conftest import clock_url
from tests.spark.receiving import drain, new_queue, rest
from tests.spark.test_schedule import ON_SMALL_CLOCK, reminders, schedule
from tests.support import Vhost

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["clock_url"]

TO_NO_BROKER = ("--url", "amqp://127.0.0.1:1", "--to", "orders", "--at-column", "due", "--past", "send", "--dry-run",
          "--json")  # fmt: skip
DUE = datetime(2026, 11, 21, 6, tzinfo=UTC)
_tables = count(1)


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    """Ten reminders of one time."""
    return reminders(spark, 10, due=f"timestamp'{DUE.isoformat()}'")


@pytest.fixture
def table(spark: SparkSession, rows: DataFrame) -> Iterator[str]:
    """The same in the catalogue."""
    name = f"reminders_{next(_tables)}"
    rows.write.saveAsTable(name)
    yield name
    spark.sql(f"drop table {name}")


def read(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_format_gives_the_same_rows(
    rows: DataFrame, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write.json(str(tmp_path / "reminders.json"))
    rows.write.orc(str(tmp_path / "reminders.orc"))
    rows.write.option("sep", ";").csv(str(tmp_path / "folder"), header=True)
    for source in (
        (tmp_path / "reminders.json",),
        (tmp_path / "reminders.orc",),
        (tmp_path / "folder", "--format", "csv", "--read-option", "sep=;"),
        (table, "--format", "table"),
        (f"default.{table}", "--format", "table"),
    ):
        assert schedule(*source, *TO_NO_BROKER) == 0, source
        found = read(capsys)
        assert (found["rows"], found["without_time"], found["too_late"]) == (10, 0, 0), source
        assert found["first_due"] == found["last_due"] == DUE.isoformat(), source
        assert found["due"] == [{"from": DUE.isoformat(), "count": 10}], source


@pytest.mark.usefixtures("spark")
def test_json_lines_keep_numbers_and_nesting_in_the_body(
    clock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers and nested values keep their types; a line that is not JSON is a row without a due time."""
    queue = new_queue(clock_url)
    source = tmp_path / "reminders.jsonl"
    order = {"order_id": "o-1", "total": 9.5, "lines": [{"sku": "a", "count": 2}]}
    lines = [json.dumps({**order, "due": "2026-01-01T00:00:00Z"}), json.dumps({"order_id": "o-2", "due": "2026-01-01"})]
    source.write_text("\n".join([*lines, "{"]) + "\n")
    where = ("--url", clock_url, "--to", queue, "--at-column", "due", "--body-columns", "order_id,total,lines",
             "--ledger", tmp_path / "ledger", "--past", "send", "--json")  # fmt: skip
    assert schedule(source, *where) == 2
    assert "1 of 3 rows cannot be sent (1 with a missing or invalid due time)" in capsys.readouterr().err
    assert schedule(source, *where, "--rejects", tmp_path / "rejects") == 0
    found = read(capsys)
    assert (found["sent"], found["rejected"]) == (2, 1)
    bodies = sorted((json.loads(one.body) for one in drain(clock_url, queue, 2)), key=lambda one: str(one["order_id"]))
    assert bodies == [order, {"order_id": "o-2", "total": None, "lines": None}]


def test_a_table_has_the_same_ledger_in_every_folder(
    table: str, clock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the catalogue, and in no folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    queue = new_queue(clock_url)
    where = ("--format", "table", "--url", clock_url, "--to", queue, "--at-column", "due", "--past", "send", "--json")
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert schedule(table, *where) == 0
        found.append(read(capsys))
    assert [(one["sent"], one["sent_before"]) for one in found] == [(10, 0), (0, 10)]
    assert len(drain(clock_url, queue, 10)) == 10
    assert rest(clock_url, queue) == []


@pytest.mark.usefixtures("spark")
def test_a_missing_table_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule("nowhere", "--format", "table", *TO_NO_BROKER) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("bide: Spark: ")
    assert "TABLE_OR_VIEW_NOT_FOUND" in stderr
    assert stderr.count("\n") == 1


def test_without_declare_the_infrastructure_has_to_exist(
    rows: DataFrame, vhost: Vhost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger that was begun goes on as soon as it is."""
    queue = new_queue(vhost.url)
    source = tmp_path / "reminders.parquet"
    rows.selectExpr("order_id", "'100ms' as wait").write.parquet(str(source))
    given = (source, "--url", vhost.url, "--to", queue, "--delay-column", "wait", "--ledger", tmp_path / "ledger",
             "--no-declare", "--json")  # fmt: skip
    assert schedule(*given) == 1
    stderr = capsys.readouterr().err
    assert f"'clock' is not complete on the virtual host '{vhost.name}'" in stderr
    assert "run 'bide delay apply'" in stderr
    assert stderr.count("\n") == 3, "count and due times, and one line that says what is wrong"
    assert {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)} == {queue}
    assert run(["delay", "apply", "--url", vhost.url, *ON_SMALL_CLOCK]) == 0
    capsys.readouterr()
    assert schedule(*given) == 0
    found = read(capsys)
    assert (found["sent"], found["sent_before"]) == (10, 0)
    assert len(drain(vhost.url, queue, 10)) == 10
    assert rest(vhost.url, queue) == []
