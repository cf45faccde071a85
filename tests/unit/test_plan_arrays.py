"""Plans without Spark, compared with messages that pass one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import bide
from bide.cli.app import run
from bide.cli.pipeline.engine_choice import EngineChoice
from bide.errors import InvalidInputError
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.plan.arrays import ArrayTimeline, ArrayWorkload, array_report, clear, of_flows
from bide.pipelines.plan.capacity import Capacity
from bide.pipelines.plan.flows import flows_of
from bide.pipelines.plan.levels import PlanLevels
from tests.plan_pulses import check_figures, pulses

NOW = 1_795_240_800_000  # 2026-11-21 06:00 UTC, a whole hour
LAYOUTS = (PlanLevels.of(bide.Clock()), PlanLevels.of(bide.NServiceBus()))


def rows(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for index in range(len(columns["at"])):
        yield {name: one[index] for name, one in columns.items()}


def check(workload: ArrayWorkload, messages: list[Any], every: timedelta, tick: timedelta) -> None:
    for layout in LAYOUTS:
        levels, queues = ArrayTimeline(workload, layout, every=every, tick=tick).figures()
        check_figures(rows(levels), rows(queues), every=every, tick=tick, expected=pulses(layout.name, messages))


delays = st.one_of(
    st.integers(1, 3_000),
    st.integers(1, 200_000),
    st.integers(1, 40).map(lambda minutes: minutes * 60_000),
    st.integers(1, 300_000_000),
)
messages = st.lists(
    st.tuples(st.integers(0, 7_200_000), delays, st.integers(1, 5), st.integers(0, 9_000)), min_size=1, max_size=12
)


@given(messages=messages, spans=st.sampled_from([(21_600, 1.0), (3_600, 60.0), (43_200, 0.25)]))
def test_a_plan_equals_a_count_message_by_message(messages: list[Any], spans: tuple[int, float]) -> None:
    sent, delay, n, size = (np.array(one) for one in zip(*messages, strict=True))
    nothing = np.zeros(len(n))
    classes = {"at": NOW + sent, "delay": delay, "n": n * 1.0, "n_rate": nothing, "bytes": n * size * 1.0}
    workload = ArrayWorkload(
        classes={**classes, "bytes_rate": nothing},
        messages=float(n.sum()),
        undelayed=0.0,
        bytes=float((n * size).sum()),
        first=int(NOW + sent.min()),
        longest=int(delay.max()),
    )
    one_by_one = [(NOW + sent, delay, n, size, 0.0) for sent, delay, n, size in messages]
    check(workload, one_by_one, timedelta(seconds=spans[0]), timedelta(seconds=spans[1]))


def test_a_plan_of_flows_equals_the_integral_over_their_delays() -> None:
    flows = flows_of(
        [
            {"rate": "36000/h", "delay": "1h30m0.37s", "start": "2026-11-21T06:10:00.25Z", "for": "45m", "size": 1000},
            {"rate": "0.5/s", "delay": {"1m..61s": 3, "0s": 1}, "start": "2026-11-21T05:30:00Z", "for": "2h",
             "profile": [0, 1, 0, 2, 3, 1, 5, 1, 0, 0, 1, 1]},
        ]
    )  # fmt: skip
    expected = []
    for flow in flows:
        rate = 0.0
        for (at, change), (end, _) in pairwise(flow.changes()):
            rate += change
            for point in range(flow.points):
                n = rate * (end - at) / 1000 / flow.points
                expected.append((at, flow.shortest + point * 10, n, flow.size, end - at))
    check(of_flows(flows), expected, timedelta(minutes=20), timedelta(seconds=1))


def test_a_plan_without_delays_is_empty() -> None:
    flows = flows_of([{"rate": "1/s", "delay": "0s"}])
    found = array_report(ArrayTimeline(of_flows(flows), LAYOUTS[0]), Capacity.measured("clock"))
    assert (found.levels, found.spans, found.judgements) == ((), (), ())
    with pytest.raises(InvalidInputError, match="no flows"):
        of_flows([])


def test_tables_are_finished_when_both_are_written(tmp_path: Path) -> None:
    timeline = ArrayTimeline(of_flows(flows_of([{"rate": "1/s", "delay": "5m", "for": "10m"}])), LAYOUTS[0])
    out = tmp_path / "[eu]"
    for _ in range(2):
        clear(str(out))
        assert not (out / "queues" / "_SUCCESS").exists()
        assert parquet.read_table(out / "queues").num_rows == 0
        array_report(timeline, Capacity.measured("clock"), out=str(out))
        assert (out / "queues" / "_SUCCESS").exists()
    levels, queues = (parquet.read_table(out / name) for name in ("levels", "queues"))
    assert sum(one["hops"] for one in levels.to_pylist() if one["level"] == "all") == pytest.approx(600)
    assert sum(one["released"] for one in queues.to_pylist()) == pytest.approx(600)
    assert str(queues.schema.field("peak_at").type) == "timestamp[ms, tz=UTC]"


def test_rates_are_planned_without_spark_and_java() -> None:
    program = (
        "import sys\n"
        "sys.modules.update(pyspark=None, pyarrow=None)\n"
        "from bide.cli.app import run\n"
        "sys.exit(run(['pipeline', 'plan', '--rate', '1e6/d', '--delay', '5m']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1,000,000 messages, 200.0 MB of bodies; planned in ")
    assert done.stdout.endswith("engine: this process, because rates need no table\n")


@pytest.mark.parametrize("out", ["s3://bucket/figures", "file:/figures"])
def test_a_uri_for_the_figures_is_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """A folder of this name on this machine would look like success."""
    monkeypatch.chdir(tmp_path)
    options = ["--rate", "1/s", "--delay", "5m", "--out", out, "--engine", "local"]
    assert run(["pipeline", "plan", *options]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_options_decide_on_the_engine_before_the_input() -> None:
    assert EngineChoice(configuration={}).forced() is None
    assert str(EngineChoice(configuration={}, option="spark").forced()) == "Spark, because --engine spark was given"
    assert str(EngineChoice(configuration={}, master="local[2]").forced()) == "Spark, because --master was given"
    assert str(EngineChoice(configuration={"a": "b"}).forced()) == "Spark, because --spark-conf was given"
    local = EngineChoice(configuration={}, option="local")
    assert str(local.forced()) == "this process, because --engine local was given"
    with pytest.raises(InvalidInputError, match="the input is ORC, which only Spark supports"):
        local.choose_spark(NeedsSparkError("the input is ORC"))
    with pytest.raises(InvalidInputError, match="--engine local does not start Spark"):
        EngineChoice(configuration={}, option="local", master="local[2]").forced()
