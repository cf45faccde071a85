"""The benchmark's runner: who is measured when, and what becomes of those who cannot be. No broker is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bide.bench.measurement import Case, Measurement, Plan
from bide.bench.results import Results
from bide.bench.runner import run
from bide.errors import InvalidInputError

WORK = "tests.broker.bench_work"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processes find the work."""
    monkeypatch.chdir(ROOT)


def case(name: str, *, setting: str = "", work: str = "answer", **more: Any) -> Case:
    options = {"values": more.pop("values", {"rate": 1.0}), "file": more.pop("file", "")}
    return Case(name=name, setting=setting, work=f"{WORK}:{work}", options=options, **more)


def measure(cases: Sequence[Case], *, rounds: int = 1, most_rounds: int | None = None, **more: Any) -> Results:
    measurement = Measurement(
        name="example", title="Example", about="", cases=lambda _: cases, broker="own", most_rounds=most_rounds
    )
    return run([measurement], Plan(rounds=rounds), **more)


def test_cases_take_turns() -> None:
    turns: list[str] = []
    results = measure(
        [case("a"), case("b"), case("c")], rounds=2, listener=lambda row, said: turns.append(f"{row.case} {said}")
    )
    assert turns == [f"{name} messages/s 1" for name in "abcabc"]
    assert [row.values for row in results.rows] == [{"rate": [1.0, 1.0]}] * 3


def test_results_are_handed_out_before_the_end() -> None:
    rows: list[int] = []
    measure([case("a"), case("b")], keeper=lambda results: rows.append(len(results.rows)))
    assert rows == [0, 2]


def test_some_need_fewer_rounds() -> None:
    (row,) = measure([case("a")], rounds=3, most_rounds=1).rows
    assert row.values == {"rate": [1.0]}


def test_those_who_are_asked_for_are_measured() -> None:
    cases = [case("bide", setting="small"), case("bide bulk", setting="large"), case("pika", setting="small")]
    by_name, by_setting = measure(cases, only=["bide*"]), measure(cases, only=["large"])
    assert [row.case for row in by_name.rows] == ["bide", "bide bulk"]
    assert [row.case for row in by_setting.rows] == ["bide bulk"]
    with pytest.raises(InvalidInputError, match="nothing is called 'none': choose of small, bide, large"):
        measure(cases, only=["none"])


def test_who_is_not_installed_is_left_out() -> None:
    results = measure([case("a", rival="no-package-has-this-name"), case("b", rival="pika")], rounds=2)
    missing, there = results.rows
    assert (missing.values, missing.notes) == ({}, ["not installed"])
    assert (there.values, there.notes) == ({"rate": [1.0, 1.0]}, [])
    assert not results.failures


def test_who_did_not_sustain_a_rate_is_not_tried_at_the_next() -> None:
    cases = [
        case("a", setting="1/s", values={"sustained": 1.0}),
        case("b", setting="1/s", values={"sustained": 0.0}),
        case("a", setting="2/s", unless_failed="1/s"),
        case("b", setting="2/s", unless_failed="1/s"),
    ]
    results = measure(cases)
    assert results.median("example", "a", "2/s", "rate") == 1.0
    assert results.row("example", "b", "2/s").notes == ["not tried: not sustained at 1/s"]
    only_the_second = measure(cases, only=["2/s"])
    assert only_the_second.median("example", "b", "2/s", "rate") == 1.0


def test_who_fails_is_named_and_the_others_go_on() -> None:
    results = measure([case("a", work="nothing", setting="here"), case("b")])
    failed, other = results.rows
    assert failed.values == {}
    assert failed.notes[0].startswith("failed: AttributeError")
    assert results.failures[0].startswith("example, a here: AttributeError")
    assert other.values == {"rate": [1.0]}


def test_who_hangs_is_ended_with_whatever_he_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    results = measure([case("a", work="hang", file=str(file), timeout=5.0)])
    assert results.failures == ["example, a: it was not done after 5 s"]
    assert not is_running(int(file.read_text()))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # One that was killed may wait for its parent to take notice of it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        # It went this moment, unless there is no such folder at all.
        return not Path("/proc/self").exists()
    return state != "Z"
