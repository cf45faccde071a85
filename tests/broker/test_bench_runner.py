"""The benchmark's runner: the order of cases, and cases that cannot be measured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.suite import machine
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.results import Results
from benchmarks.suite.runner import run
from bide.errors import InvalidInputError
from bide.local_broker.installation import HOME_VARIABLE
from tests.polling import wait_until
from tests.support import Rabbitmq

WORK = "tests.broker.bench_work"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processes find the work."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host of this machine does meanwhile."""
    monkeypatch.setattr(machine, "stolen_seconds", lambda: 0.0)


def case(name: str, *, setting: str = "", work: str = "answer", **more: Any) -> Case:
    options = {"values": more.pop("values", {"rate": 1.0}), "file": more.pop("file", "")}
    return Case(name=name, setting=setting, work=f"{WORK}:{work}", options=options, **more)


def measure(
    cases: Sequence[Case],
    *,
    rounds: int = 1,
    scale: float = 1.0,
    most_rounds: int | None = None,
    broker: Literal["fresh", "own"] = "own",
    **more: Any,
) -> Results:
    """Measure; no broker is started unless a fresh one is asked for."""
    measurement = Measurement(
        name="example", title="Example", about="", cases=lambda _: cases, broker=broker, most_rounds=most_rounds
    )
    return run([measurement], Plan(rounds=rounds, scale=scale), **more)


def test_cases_alternate_between_rounds() -> None:
    turns: list[str] = []
    results = measure(
        [case("a"), case("b"), case("c")], rounds=2, listener=lambda row, line: turns.append(f"{row.case} {line}")
    )
    assert turns == [f"{name} messages/s 1" for name in "abcabc"]
    assert [row.values for row in results.rows] == [{"rate": [1.0, 1.0]}] * 3


def test_results_are_kept_after_each_round() -> None:
    rows: list[int] = []
    measure([case("a"), case("b")], keeper=lambda results: rows.append(len(results.rows)))
    assert rows == [0, 2]


def test_a_measurement_can_limit_its_rounds() -> None:
    (row,) = measure([case("a")], rounds=3, most_rounds=1).rows
    assert row.values == {"rate": [1.0]}


def test_only_the_chosen_cases_are_measured() -> None:
    cases = [case("bide", setting="small"), case("bide bulk", setting="large"), case("pika", setting="small")]
    by_name, by_setting = measure(cases, only=["bide*"]), measure(cases, only=["large"])
    assert [row.case for row in by_name.rows] == ["bide", "bide bulk"]
    assert [row.case for row in by_setting.rows] == ["bide bulk"]
    with pytest.raises(InvalidInputError, match="nothing is called 'none': choose of small, bide, large"):
        measure(cases, only=["none"])


def test_a_client_that_is_not_installed_is_left_out() -> None:
    results = measure([case("a", rival="no-package-has-this-name"), case("b", rival="pika")], rounds=2)
    missing, there = results.rows
    assert (missing.values, missing.notes) == ({}, ["not installed"])
    assert (there.values, there.notes) == ({"rate": [1.0, 1.0]}, [])
    assert not results.failures


def test_a_case_that_fails_a_rate_is_not_tried_at_the_next() -> None:
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


def test_a_fresh_broker_has_the_prefetch_of_the_case(rabbitmq: Rabbitmq, monkeypatch: pytest.MonkeyPatch) -> None:
    if rabbitmq.home is not None:
        monkeypatch.setenv(HOME_VARIABLE, str(rabbitmq.home))
    results = measure([case("a", work="prefetch", dead_letter_prefetch=48)], broker="fresh", root=rabbitmq.chroot)
    (row,) = results.rows
    assert row.values == {"prefetch": [48]}, results.failures
    assert results.releases["Erlang"]


@pytest.mark.parametrize(
    ("taken", "counts"),
    [
        ((0.0,), 1),
        ((1e6, 0.0), 2),
        ((2e6, 1e6, 0.0), 3),
        ((2e6, 1e6, 3e6), 2),
    ],
    ids=["calm", "calm the second time", "calm at last", "never calm"],
)
def test_a_round_with_steal_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: tuple[float, ...], counts: int
) -> None:
    """A test cannot cause CPU steal, so the counter of steal is replaced."""
    clock = iter(accumulate(chain.from_iterable((0.0, seconds) for seconds in taken)))
    monkeypatch.setattr(machine, "stolen_seconds", lambda: next(clock))
    lines: list[str] = []
    results = measure(
        [case("a", work="turn", file=str(tmp_path / "turns"))], listener=lambda row, line: lines.append(line)
    )
    (row,) = results.rows
    assert row.values == {"rate": [float(counts)]}
    assert [line.partition(":")[0] for line in lines] == ["again"] * (len(taken) - 1) + [f"messages/s {counts}"]
    assert next(clock, None) is None
    (run_of_it,) = row.runs
    assert run_of_it.stolen is not None
    assert (run_of_it.stolen > 0) == (min(taken) > 0)


def test_a_scaled_round_with_steal_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((0.0, 1e6))
    monkeypatch.setattr(machine, "stolen_seconds", lambda: next(clock))
    results = measure([case("a", work="turn", file=str(tmp_path / "turns"))], scale=0.5)
    assert results.rows[0].values == {"rate": [1.0]}


def test_a_failure_in_a_round_with_steal_is_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter((0.0, 1e6, 1e6, 1e6))
    monkeypatch.setattr(machine, "stolen_seconds", lambda: next(clock))
    results = measure([case("a", work="turn", file=str(tmp_path / "turns"), values={"fails": 1.0})])
    assert (results.failures, results.rows[0].values) == ([], {"rate": [2.0]})


def test_a_failed_case_is_named_and_the_others_are_measured() -> None:
    results = measure([case("a", work="nothing", setting="here"), case("b")])
    failed, other = results.rows
    assert failed.values == {}
    assert failed.notes[0].startswith("failed: AttributeError")
    assert results.failures[0].startswith("example, a here: AttributeError")
    assert other.values == {"rate": [1.0]}


def test_a_hanging_case_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    communicate = subprocess.Popen.communicate

    def has_child() -> bool:
        return file.exists() and bool(file.read_text())

    def time_out_when_it_has_a_child(process: subprocess.Popen[str], *arguments: Any, **options: Any) -> Any:
        try:
            return communicate(process, *arguments, **options)
        except subprocess.TimeoutExpired:
            wait_until(has_child, "the case has started a process")
            raise

    monkeypatch.setattr(subprocess.Popen, "communicate", time_out_when_it_has_a_child)
    results = measure([case("a", work="hang", file=str(file), timeout=1.0)])
    assert results.failures == ["example, a: it was not done after 1 s"]
    # A killed process that is not a child gives no event of its end, so it is polled.
    wait_until(lambda: not is_at_work(int(file.read_text())), "the child has ended")


def is_at_work(pid: int) -> bool:
    """Whether a process is there, and does not merely wait for its parent to take notice of its end."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        # It went this moment, unless there is no such folder at all.
        return not Path("/proc/self").exists()
