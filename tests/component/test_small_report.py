"""Reports of small audits without Spark, and audits that are left to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import parquet

from bide.cli.pipeline.engine_choice import EngineChoice
from bide.cli.pipeline.report import _count_in_process
from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.audit.table_format import TableFormat
from bide.pipelines.engine import Engine, NeedsSparkError
from bide.pipelines.memory_database import memory_database
from bide.pipelines.report.collecting import collect
from bide.pipelines.report.duckdb_tables import small_tables
from bide.pipelines.report.tables import files_of
from bide.pipelines.small_table import read_columns
from tests.component.test_audit_recipes_docs import DUE, write_audit

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


def messages(count: int = 3) -> pa.Table:
    """Messages that were delivered 1, 2, ... ms late."""
    moments = pa.array([NOON] * count, pa.timestamp("us", "UTC"))
    return pa.table(
        {
            "message_id": [f"m{number}" for number in range(count)],
            "target": ["q:orders"] * count,
            "type": ["Call"] * count,
            "scheduled": moments,
            "due": moments,
            "delivered": moments,
            "lateness_ms": [float(number + 1) for number in range(count)],
            "outcome": ["delivered"] * count,
            # A column that is not read, of a type that only Spark reads.
            "waiting": pa.array([[{"target": "q:orders"}]] * count),
        }
    )


def write(folder: Path, table: pa.Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, folder / "part-0.parquet")


def report(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where neither PySpark nor Java are installed."""
    program = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "from bide.cli.app import run\n"
        "sys.exit(run(['pipeline', 'report', 'audit', *sys.argv[1:]]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PATH": ""}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
def test_the_query_of_an_audit_with_versions_is_a_program_that_lists_all_overdue_messages(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], table_format: TableFormat
) -> None:
    folder = tmp_path / "the shop's {audit}"
    write_audit(folder, table_format)
    with small_tables(str(folder)) as tables:
        figures = collect(tables, lost_after=timedelta(seconds=1))
    assert figures.headline is not None
    known: dict[str, Any] = {}
    exec(compile(figures.query, "query", "exec"), known)
    expected = [("order-1", "q:orders", "Order", DUE, True), ("order-4", "q:orders", "Order", DUE, True)]
    assert known["found"].fetchall() == expected
    assert figures.overdue == figures.headline.lost == len(expected)
    printed = capfd.readouterr().out
    assert printed.index("order-1") < printed.index("order-4")


def test_a_small_audit_is_reported_without_spark_and_java(tmp_path: Path) -> None:
    write(tmp_path / "audit" / "messages" / "day=2026-11-28" / "batch=1", messages())
    size = (tmp_path / "audit" / "messages" / "day=2026-11-28" / "batch=1" / "part-0.parquet").stat().st_size
    done = report(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.sub(r"in \d+\.\d s", "in N s", done.stdout).splitlines() == [
        "3 of 3 messages were delivered, half of them at most 2 ms late, 99 in 100 at most 3 ms. Nothing is pending.",
        "tables without rows: pending, failures, failed",
        "report: report.html; written in N s",
        f"engine: this process, because audit has {size / 1000:.1f} kB",
    ]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    found: dict[str, Any] = json.loads(report(tmp_path, "--engine", "local", "--json").stdout)
    assert (found["p50_ms"], found["p99_ms"], found["delivered"]) == (2.0, 3.0, 3)
    assert (found["engine"], found["engine_reason"]) == ("local", "--engine local was given")
    for arguments, why in (
        (("--engine", "spark"), "--engine spark was given"),
        (("--master", "local[1]"), "--master was given"),
        (("--spark-conf", "spark.a=b"), "--spark-conf was given"),
    ):
        done = report(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"bide: Spark is missing: install bide[spark], and Java 17 or later; Spark is needed because {why}\n"
        )


def test_an_audit_for_spark_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "audit" / "messages" / "new", messages())
    done = report(tmp_path, "--engine", "local")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bide: audit/messages has folders other than those of an audit, which only Spark supports: leave out --engine "
        "local\n"
    )
    assert "; Spark is needed because audit/messages has folders" in report(tmp_path).stderr
    assert not (tmp_path / "report.html").exists()


def test_percentiles_are_the_least_lateness_that_so_many_do_not_exceed(tmp_path: Path) -> None:
    for count, expected in ((1, (1, 1, 1)), (2, (1, 2, 2)), (100, (50, 95, 99)), (101, (51, 96, 100))):
        write(tmp_path / "messages", messages(count))
        with small_tables(str(tmp_path)) as tables:
            found = collect(tables).headline
        assert found is not None
        assert (found.p50, found.p95, found.p99, found.max) == (*expected, count)


def without_zone(table: pa.Table) -> pa.Table:
    return table.set_column(4, "due", table.column("due").cast(pa.timestamp("us")))


def as_numbers(table: pa.Table) -> pa.Table:
    return table.set_column(6, "lateness_ms", pc.cast(table.column("lateness_ms"), pa.int64()))


@pytest.mark.parametrize(
    ("folder", "table", "reason"),
    [
        ("messages/new", messages(), "has folders other than those of an audit"),
        ("messages/target=q", messages(), "has folders other than those of an audit"),
        ("messages", without_zone(messages()), "the column 'due' of the table 'messages' is timestamp_ntz"),
        ("messages", as_numbers(messages()), "the column 'lateness_ms' of the table 'messages' is bigint"),
        ("messages", messages(150_000), "is too large in memory, with 150,000 rows"),
    ],
    ids=["folder", "partition", "zone", "type", "size"],
)
def test_tables_that_spark_may_read_differently_are_left_to_it(
    tmp_path: Path, folder: str, table: pa.Table, reason: str
) -> None:
    write(tmp_path / folder, table)
    with pytest.raises(NeedsSparkError, match=reason), small_tables(str(tmp_path), largest=10_000_000):
        pass


def test_files_are_counted_together(tmp_path: Path) -> None:
    write(tmp_path / "messages", messages())
    write(tmp_path / "failed", messages())
    size = (tmp_path / "messages" / "part-0.parquet").stat().st_size
    with pytest.raises(NeedsSparkError, match="more than "), small_tables(str(tmp_path), largest=size + 1):
        pass
    with pytest.raises(InvalidColumnError, match="failed has no column group"), small_tables(str(tmp_path)):
        pass


def test_files_with_other_columns_are_left_to_spark(tmp_path: Path) -> None:
    write(tmp_path / "messages", messages())
    parquet.write_table(messages().drop_columns(["type"]), tmp_path / "messages" / "part-1.parquet")
    with pytest.raises(NeedsSparkError), small_tables(str(tmp_path)):
        pass


def test_an_incomplete_file_is_invalid(tmp_path: Path) -> None:
    write(tmp_path / "messages", messages())
    path = tmp_path / "messages" / "part-0.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInputError, match="is not a complete Parquet file"), small_tables(str(tmp_path)):
        pass
    path.unlink()
    with pytest.raises(InvalidInputError, match="run the audit again, or remove the file"):
        read_columns([path], ["type"])


def test_a_repeated_text_counts_with_its_size_in_memory(tmp_path: Path) -> None:
    table = messages(20_000).drop_columns(["waiting"])
    text = pa.array(["x" * 1000]).take(pa.array([0] * 20_000))
    write(tmp_path / "messages", table.set_column(1, "target", text))
    with (
        pytest.raises(NeedsSparkError, match="too large in memory, with 20,000 rows"),
        small_tables(str(tmp_path), largest=5_000_000),
    ):
        pass


def test_a_uri_is_left_to_spark(tmp_path: Path) -> None:
    with pytest.raises(NeedsSparkError, match="is a URI"), small_tables(tmp_path.as_uri()):
        pass


def test_an_interrupt_ends_a_query_of_duckdb_as_it_ends_python() -> None:
    # DuckDB raises this for a SIGINT. A real one at a time when Python code runs would be a KeyboardInterrupt already.
    with pytest.raises(KeyboardInterrupt), memory_database():
        raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="other"), memory_database():
        raise RuntimeError("other")


def test_duckdb_uses_a_temporary_folder_that_is_removed() -> None:
    with memory_database() as connection:
        [(found,)] = connection.execute("select current_setting('temp_directory')").fetchall()
        assert Path(found).is_dir()
    assert not Path(found).exists()


@pytest.mark.parametrize("late", [nan, inf])
def test_lateness_that_is_no_number_is_left_to_spark(tmp_path: Path, late: float) -> None:
    table = messages(1)
    write(tmp_path / "messages", table.set_column(6, "lateness_ms", pa.array([late])))
    with (
        pytest.raises(NeedsSparkError, match=r"DuckDB cannot run a query of the report \(Conversion Error"),
        small_tables(str(tmp_path)) as tables,
    ):
        collect(tables)


def test_pending_messages_without_a_due_hour_are_not_drawn(tmp_path: Path) -> None:
    hours = pa.array([NOON, None], pa.timestamp("us", "UTC"))
    write(
        tmp_path / "pending",
        pa.table({"target": ["q:orders"] * 2, "due_hour": hours, "count": [2, 3], "overdue": [0, 0]}),
    )
    with small_tables(str(tmp_path)) as tables:
        found = collect(tables).pending
    assert found is not None
    assert [sum(one.counts) for one in found.targets] == [2]


def test_without_duckdb_spark_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "messages", messages())
    monkeypatch.setitem(sys.modules, "duckdb", None)
    choice = EngineChoice(configuration={})
    engine, figures = _count_in_process(str(tmp_path), choice, timedelta(minutes=10))
    assert (engine, figures) == (Engine(True, "DuckDB is missing"), None)


@pytest.mark.parametrize(("name", "is_read"), [("_k=1", True), ("_SUCCESS", False), ("a._COPYING_", False)])
def test_the_files_of_a_table_are_those_that_spark_reads(tmp_path: Path, name: str, is_read: bool) -> None:
    write(tmp_path / "messages", messages())
    (tmp_path / "messages" / name).touch()
    assert len(files_of(str(tmp_path), "messages") or ()) == 1 + is_read
