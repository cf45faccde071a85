"""The workload ``spark`` of ``bide check``: kept promises under faults, and found meddling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from bide.check.judgement import judge
from bide.local_broker import LocalBroker
from tests.check_cases import found
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ANY_LATENESS = timedelta(seconds=TIMEOUT)
"""These tests do not measure time."""


def run(*arguments: str | Path, state: Path) -> str:
    """Run a module of Python in a process of its own; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env={**kept, "XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_faults_of_a_cluster_break_no_promise(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    options = [*(["--home", str(rabbitmq.home)] if rabbitmq.home else [])]
    options += ["--root", str(rabbitmq.chroot)] if rabbitmq.chroot else []
    options += ["--fault", "kill", "--fault", "leaders", "--every", "8s", "--length", "5s", "--seed", "1"]
    options += ["--duration", "25s", "--rate", "20", "--longest", "5s", "--max-lateness", f"{TIMEOUT}s"]
    run("bide", "check", "run", tmp_path / "history", "--workload", "spark", *options, state=tmp_path)
    verdict = judge(tmp_path / "history", max_lateness=ANY_LATENESS)
    assert found(verdict) == {}
    assert verdict.faults
    [spark] = verdict.workloads
    assert spark.delivered >= spark.confirmed > 0


def test_what_a_meddler_does_is_found_except_for_the_rows_of_repeated_tasks(
    broker: LocalBroker, tmp_path: Path
) -> None:
    folder = tmp_path / "history"
    done = json.loads(run("tests.spark_meddler", folder, broker.folder, state=tmp_path))
    verdict = judge(folder, max_lateness=ANY_LATENESS)
    broken = found(verdict)
    # A row whose delay was over when it was written was not early.
    assert 0 < broken.pop("early") <= done["early"]
    assert broken == {name: done[name] for name in ("lost", "twice", "changed")}
    [spark] = verdict.workloads
    assert spark.twice == done["twice"] + done["repeated"]
    ends = {one.rule: {example.id[-1] for example in one.examples} for one in verdict.findings if one.violations}
    assert ends == {"lost": {"0"}, "early": {"1"}, "twice": {"2"}, "changed": {"3"}}
