"""Plans of tables without Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import bide
from bide.cli.app import run
from bide.errors import InvalidInputError, InvalidRowError
from bide.pipelines.engine import Engine, NeedsSparkError
from bide.pipelines.plan.arrays import ArrayTimeline
from bide.pipelines.plan.columns import Columns
from bide.pipelines.plan.levels import PlanLevels
from bide.pipelines.plan.small import of_small_table
from tests.plan_pulses import check_figures, pulses
from tests.plan_tables import REFUSED

NOW = 1_795_240_800_000  # 2026-11-21 06:00 UTC, a whole hour
SENT = datetime(2026, 11, 21, 6, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def at(*milliseconds: int) -> pa.Array:
    return pa.array([SENT + one * MILLISECOND for one in milliseconds], pa.timestamp("us", "UTC"))


def classes(table: pa.Table, columns: Columns, **options: Any) -> list[tuple[Any, ...]]:
    found = of_small_table(table, columns, UTC, **options).classes
    return list(zip(*(found[name].tolist() for name in ("at", "delay", "n", "bytes")), strict=True))


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 7_200_000), st.integers(1, 300_000_000), st.integers(1, 5), st.integers(0, 9_000)),
        min_size=1,
        max_size=12,
    )
)
def test_a_plan_of_a_table_equals_a_count_message_by_message(rows: list[Any]) -> None:
    sent, delay, n, size = zip(*rows, strict=True)
    table = pa.table({"at": at(*sent), "delay": delay, "size": size, "n": n})
    columns = Columns(at="at", delay="delay", size="size", count="n")
    workload = of_small_table(table, columns, UTC, grain=MILLISECOND)
    expected = pulses("clock", [(NOW + sent, delay, n, size, 0.0) for sent, delay, n, size in rows])
    every, tick = timedelta(hours=1), timedelta(minutes=1)
    timeline = ArrayTimeline(workload, PlanLevels.of(bide.Clock()), every=every, tick=tick)
    levels, queues = (
        [dict(zip(one, row, strict=True)) for row in zip(*one.values(), strict=True)] for one in timeline.figures()
    )
    check_figures(levels, queues, every=every, tick=tick, expected=expected)


def test_equal_rows_become_one_class() -> None:
    table = pa.table({"at": at(7, 3, 19, 3, 3), "delay": [50, 50, 50, 0, 60], "n": [1, 2, 4, 8, 0], "size": [3] * 5})
    columns = Columns(at="at", delay="delay", size="size", count="n")
    assert classes(table, columns) == [(NOW, 50, 3.0, 9.0), (NOW + 10, 50, 4.0, 12.0)]
    found = of_small_table(table, columns, UTC, grain=timedelta(seconds=1))
    assert (found.messages, found.undelayed, found.bytes) == (15.0, 8.0, 45.0)
    assert (found.first, found.longest) == (NOW, 60)


@pytest.mark.parametrize("name", ["whole", "double", "decimal"])
def test_delays_are_rounded_up_to_milliseconds(name: str) -> None:
    values: dict[str, pa.Array] = {
        "whole": pa.array([62_031, 0], pa.int32()),
        "double": pa.array([62_030.5, 0.0]),
        "decimal": pa.array([Decimal("62030.001"), Decimal(0)], pa.decimal128(8, 3)),
    }
    table = pa.table({"at": at(4, 7_000), "wait": values[name]})
    assert classes(table, Columns(at="at", delay="wait")) == [(NOW, 62_031, 1.0, 200.0)]


def test_due_times_before_the_time_of_sending_are_no_delay() -> None:
    due = ["2026-11-21 06:01:02.034Z", "2026-11-21T05:00:00Z"]
    found = of_small_table(pa.table({"at": at(4, 7_000), "due": due}), Columns(at="at", due="due"), UTC)
    assert (found.messages, found.undelayed, found.longest) == (2.0, 1.0, 62_030)


@pytest.mark.parametrize(("columns", "error", "expected"), REFUSED)
def test_invalid_tables_are_refused(columns: Columns, error: type[Exception], expected: str) -> None:
    times = ["2026-11-21 06:00:00", "soon", "2026-11-21 06:00:00"]
    table = pa.table({"at": times, "delay": pa.array([5, 5, 5], pa.int32()), "n": pa.array([1, 1, -1], pa.int32())})
    with pytest.raises(error, match=expected):
        of_small_table(table, columns, UTC)


@pytest.mark.parametrize("missing", ["at", "delay", "due", "n", "size"])
def test_a_row_without_a_value_is_refused(missing: str) -> None:
    row: dict[str, pa.Array] = {"at": at(0), "due": at(5), "delay": pa.array([5]), "n": pa.array([1.0])}
    table = pa.table({**row, "size": pa.array([9])})
    table = table.set_column(table.column_names.index(missing), missing, pa.nulls(1, table.schema.field(missing).type))
    wait = {"due": "due"} if missing == "due" else {"delay": "delay"}
    with pytest.raises(InvalidRowError, match="1 of 1 rows have no time of sending, delay, due time, size or count"):
        # The fields are given by name.
        of_small_table(table, Columns(at="at", count="n", size="size", **wait), UTC)  # type: ignore[arg-type]


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no rows"):
        of_small_table(pa.table({"at": at(), "n": pa.array([], pa.int64())}), Columns(at="at", delay="n"), UTC)


@pytest.mark.parametrize("column", [[float("nan")], [1e19], [Decimal(10**20)]])
def test_numbers_that_spark_converts_in_its_own_way_are_left_to_spark(column: list[Any]) -> None:
    with pytest.raises(NeedsSparkError, match="'wait' has"):
        of_small_table(pa.table({"at": at(0), "wait": column}), Columns(at="at", delay="wait"), UTC)


def test_a_span_may_begin_before_the_first_possible_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    table.write_text("at,due\n0001-01-01 00:00:00,0001-01-01 00:00:05\n")
    given = ("--due-column", "due", "--layout", "clock", "--every", "30d", "--engine", "local", "--json")
    assert run(["pipeline", "plan", str(table), *given]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert [one["at"] for one in layout["spans"]] == ["0001-01-01T00:00:00+00:00"]


def test_times_that_are_far_apart_are_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row with the default time of .NET makes millions of spans, most of them without messages."""

    def refuse(engine: Engine) -> None:
        raise InvalidInputError(engine.reason)

    monkeypatch.setattr("bide.cli.pipeline.plan.refuse_without_spark", refuse)
    table = tmp_path / "t.csv"
    table.write_text("at,due\n0001-01-01 00:00:00,0001-01-01 00:00:05\n2026-01-01 00:00:00,2026-01-01 12:00:00\n")
    given = ("pipeline", "plan", str(table), "--due-column", "due", "--layout", "clock")
    assert run(given) == 2
    assert "the times are up to 17,750,796 spans of 1:00:00 apart" in capsys.readouterr().err
    assert run([*given, "--every", "1d"]) == 0


def test_tables_are_planned_without_spark_and_java(tmp_path: Path) -> None:
    rows = [("2026-11-21 06:00:00", "2026-11-21 06:05:00"), ("2026-11-21 06:00:00", "2026-11-21 06:00:00")]
    (tmp_path / "t.csv").write_text("at,due\n" + "".join(f"{sent},{due}\n" for sent, due in rows))
    (tmp_path / "t.json").write_text("".join(json.dumps({"at": sent, "due": due}) + "\n" for sent, due in rows))
    parquet.write_table(pa.table({"at": at(0, 0), "due": at(300_000, 0)}), tmp_path / "t.parquet")
    (tmp_path / "t.orc").touch()
    program = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "from bide.cli.app import run\n"
        "for kind in ('csv', 'json', 'parquet'):\n"
        "    assert run(['pipeline', 'plan', f't.{kind}', '--due-column', 'due', '--out', 'out']) == 0\n"
        "sys.exit(run(['pipeline', 'plan', 't.orc', '--due-column', 'due', '--engine', 'local']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PATH": ""}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "bide: the input is ORC, which only Spark supports: leave out --engine local\n",
    )
    plans = done.stdout.split("2 messages, 400 B of bodies; planned in ")
    assert len(plans) == 4
    for kind, plan in zip(("csv", "json", "parquet"), plans[1:], strict=True):
        assert "1 of them are not delayed" in plan
        assert f"engine: this process, because t.{kind} has " in plan
    levels = parquet.read_table(tmp_path / "out" / "clock" / "levels").to_pylist()
    assert {one["level"]: one["hops"] for one in levels} == {"m": 1.0, "all": 1.0}
