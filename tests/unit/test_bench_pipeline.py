"""The pipeline's benchmark without Spark and broker: rounds, processor time, tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.pipeline.__main__ import main
from benchmarks.pipeline.figures import BEFORE, LIMIT, NOW, Entry, Figures, Measured
from benchmarks.pipeline.metered import tree_seconds
from benchmarks.pipeline.running import SITE, WARM_UP, Bench, NotThereError, Part, Rounds, Step
from benchmarks.pipeline.table import table

ROOT = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < 0.3: pass"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def took(seconds: float, processor: float) -> Measured:
    return Measured(seconds=seconds, processor_seconds=processor)


def entry(name: str, side: str, *runs: Measured, part: str = "sink", **more: Any) -> Entry:
    return Entry(part=part, name=name, side=side, rows=1000, runs=list(runs), **more)


EXAMPLE = Figures(
    [
        entry("queue", NOW, took(1.0, 0.5), took(2.0, 0.5), took(1.0, 0.5), limits=("bulk",)),
        entry("queue", BEFORE, took(2.0, 1.0), took(8.0, 1.0), took(3.0, 1.0)),
        entry("keyed", NOW, took(1.0, 0.5), took(1.0, 0.5), took(1.0, 0.5)),
        entry("keyed", BEFORE, missing="ValueError: no column key"),
        entry("bulk", LIMIT, took(0.5, 0.25), took(1.8, 0.25), took(0.9, 0.25)),
        entry("rates", NOW, took(0.8, 0.6), took(0.8, 0.6), took(0.8, 0.6), part="plan"),
    ]
)


@linux_only
def test_the_processor_time_of_a_tree_has_that_of_children_that_ended() -> None:
    before = tree_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert tree_seconds(os.getpid()) - before >= 0.29


@linux_only
def test_the_processor_time_of_a_tree_has_that_of_living_grandchildren() -> None:
    program = f"{BURN}\nprint(1, flush=True)\ninput()"
    # The last command of a shell takes its place, so there is another one after it.
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert tree_seconds(process.pid) >= 0.29
        process.communicate("\n")


@linux_only
def test_a_metered_command_counts_a_process_that_outlives_it(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    outlived = ["sh", "-c", '"$0" -c "$1" & exit 3', sys.executable, BURN]
    done = subprocess.run([sys.executable, "-m", "benchmarks.pipeline.metered", result, *outlived], cwd=ROOT)
    assert done.returncode == 3
    assert json.loads(result.read_text())["processor_seconds"] >= 0.29


@linux_only
def test_a_metered_command_counts_workers_of_a_daemon_that_ignores_their_end(tmp_path: Path) -> None:
    package = tmp_path / "pyspark"
    package.mkdir()
    (package / "__init__.py").touch()
    daemon = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
worker = os.fork()
if worker == 0:
    while time.process_time() < 1: pass
    os._exit(0)
try:
    while ") Z " not in open(f"/proc/{worker}/stat").read():
        os.sched_yield()
except OSError:
    pass  # Linux has forgotten it
"""
    (package / "daemon.py").write_text(daemon)
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.pipeline.metered", str(result), sys.executable, "-m", "pyspark.daemon"]
    path = os.pathsep.join(map(str, (tmp_path, SITE, ROOT)))
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert json.loads(result.read_text())["processor_seconds"] >= 0.99


def bench(folder: Path, *, rounds: int = 3) -> Bench:
    broker = SimpleNamespace(pid=os.getpid())
    return Bench(cast("Any", broker), folder, sides={NOW: ROOT}, scale=1, rounds=rounds, tasks=2)


def part(*groups: Sequence[Step], warms_up: bool = False) -> Part:
    @contextmanager
    def prepare(_: Bench) -> Iterator[Rounds]:
        yield lambda _: groups

    return Part(name="sink", prepare=prepare, warms_up=warms_up)


@linux_only
def test_sides_take_turns_in_being_first_and_groups_keep_their_order(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(name: str, rows: int) -> Measured:
        ran.append((name, rows))
        return took(1.0, 1.0)

    groups = [[Step(name=name, side=side, rows=500, run=partial(run, name + side)) for side in "xy"] for name in "ab"]
    bench(tmp_path, rounds=2).measure(part(*groups, warms_up=True))
    assert [name for name, _ in ran] == ["ay", "ax", "by", "bx", "ax", "ay", "bx", "by", "ay", "ax", "by", "bx"]
    assert [rows for _, rows in ran] == [100] * 4 + [500] * 8


@linux_only
def test_what_the_other_checkout_cannot_do_is_tried_once_and_not_there(tmp_path: Path) -> None:
    tried: list[int] = []

    def run(rows: int) -> Measured:
        tried.append(rows)
        raise NotThereError("ValueError: no column key")

    running = bench(tmp_path)
    running.measure(part([Step(name="keyed", side=BEFORE, run=run)]))
    found = running.figures.find("sink", "keyed", BEFORE)
    assert found is not None
    assert (found.missing, tried) == ("ValueError: no column key", [0])
    with pytest.raises(NotThereError):
        running.measure(part([Step(name="keyed", side=NOW, run=run)]))


@linux_only
def test_a_warm_up_is_not_recorded(tmp_path: Path) -> None:
    running = bench(tmp_path, rounds=1)
    rounds = iter([took(9.0, 9.0), took(1.0, 1.0)])
    running.measure(part([Step(name="queue", side=NOW, rows=500, run=lambda _: next(rounds))], warms_up=True))
    found = running.figures.find("sink", "queue", NOW)
    assert found is not None
    assert [one.seconds for one in found.runs] == [1.0]
    assert WARM_UP == 0


def test_a_speed_is_the_median_of_the_ratios_within_rounds() -> None:
    queue = EXAMPLE.find("sink", "queue", NOW)
    assert queue is not None
    assert EXAMPLE.speeds(queue) == {
        BEFORE: {"seconds": 3.0, "processor_seconds": 2.0},
        "bulk": {"seconds": 0.9, "processor_seconds": 0.5},
    }


def test_a_table_has_each_side_its_ratios_and_the_limits() -> None:
    assert table(EXAMPLE, "sink").splitlines()[2:] == [
        "| sink | now | before | speed, before = 1 | speed, limit = 1 |",
        "|---|---|---|---|---|",
        "| queue | 1,000/s (500 µs) | 333/s (1,000 µs) | 3.00 (2.00) | 0.90 (0.50) of *bulk* |",
        "| keyed | 1,000/s (500 µs) | not there |  |  |",
        "| *bulk* | 1,110/s (250 µs) |  |  |  |",
    ]
    assert table(EXAMPLE, "plan").splitlines()[-1] == "| rates | 0.80 s (0.60 s) |  |"


def test_a_file_of_results_makes_the_same_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "pipeline.json"
    machine = {"processor": "a processor", "cores": "2"}
    facts = {
        "date": "2026-11-30T08:00:00+00:00",
        "machine": machine,
        "releases": {"RabbitMQ": "3.10.8"},
        "source": "0123456789",
        "before": "8b003d2c75",
        "rounds": 3,
        "load_average": [0.1, 2.0],
    }
    kept.write_text(json.dumps({**facts, "figures": EXAMPLE.to_json()}))
    main(["--from", str(kept)])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Measured on 2026-11-30 on 2 cores (a processor) with RabbitMQ 3.10.8. Load average 0.1 at"
    )
    assert table(EXAMPLE, "sink") in printed
    assert table(EXAMPLE, "plan") in printed
    main(["--from", str(kept), "--only", "plan"])
    printed = capsys.readouterr().out
    assert table(EXAMPLE, "plan") in printed
    assert table(EXAMPLE, "sink") not in printed
