"""``python -m benchmarks``: options, order of the cases, output and results file."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from bide.local_broker.installation import HOME_VARIABLE
from tests.polling import killed_at_the_end, wait_until, wait_while_running
from tests.readme import ROOT, blocks, read
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT


def root_option(rabbitmq: Rabbitmq) -> list[str]:
    return [] if rabbitmq.chroot is None else ["--root", str(rabbitmq.chroot)]


def environment_for(rabbitmq: Rabbitmq) -> dict[str, str]:
    return {**os.environ, **({} if rabbitmq.home is None else {HOME_VARIABLE: str(rabbitmq.home)})}


def bench(rabbitmq: Rabbitmq, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments, *root_option(rabbitmq)],
        capture_output=True,
        text=True,
        env={**environment_for(rabbitmq), **environment},
        timeout=TIMEOUT,
        check=False,
    )


def test_results_are_shown_kept_and_made_into_a_page(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    only = ("--only", "bide", "--only", "raw*")
    done = bench(rabbitmq, "consume", "--scale", "0.01", "--rounds", "2", *only, "--keep", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Receive and acknowledge" in done.stdout
    measured = [line.partition(":")[0] for line in done.stderr.splitlines() if "messages/s" in line]
    assert measured == ["consume raw limit", "consume bide"] * 2

    (file,) = folder.iterdir()
    results = json.loads(file.read_text())
    assert [row["case"] for row in results["rows"]] == ["raw limit", "bide"]
    assert all(len(row["values"]["rate"]) == 2 and min(row["values"]["rate"]) > 0 for row in results["rows"])
    assert results["releases"]["Erlang"]
    assert not results["failures"]

    shown = bench(rabbitmq, "--from", str(file), "--page", str(tmp_path / "docs"), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == results
    assert (
        "![Receive and acknowledge, messages/s](benchmarks/consume.svg)"
        in (tmp_path / "docs/benchmarks.md").read_text()
    )
    assert (tmp_path / "docs/benchmarks/consume.svg").exists()


@pytest.mark.long
def test_a_failed_case_is_reported_and_the_others_are_measured(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """A client that is there, but cannot be imported."""
    (tmp_path / "pika.py").write_text("raise ImportError('broken')\n")
    arguments = ("startup", "--scale", "0.1", "--rounds", "1", "--only", "*import *", "--json")
    done = bench(rabbitmq, *arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    results = json.loads(done.stdout)
    rows = {row["case"]: row for row in results["rows"]}
    assert rows["from bide import connect"]["values"]["cpu_ms"][0] > 0
    assert rows["import pika"]["values"] == {}
    assert rows["import pika"]["notes"][0].startswith("failed: ")
    assert results["failures"][0].startswith("startup, import pika: ")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="who its processes are is read from /proc")
def test_a_signal_ends_broker_and_job(rabbitmq: Rabbitmq) -> None:
    """Neither the broker nor the job that is under way."""
    mark = f"BIDE_TEST_MARK={uuid4().hex}"
    command = [sys.executable, "-m", "benchmarks", "sustained", "--rounds", "1", "--only", "Clock"]
    command += root_option(rabbitmq)
    environment = {**environment_for(rabbitmq), **dict([mark.split("=")])}
    with killed_at_the_end(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)) as process:
        wait_while_running(
            process, lambda: any("-m benchmarks.suite" in one for one in commands_of(mark)), "the job has started"
        )
        process.terminate()
        _, complaints = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGTERM, complaints
    assert "Traceback" not in complaints
    # What a killed process has started may need a moment to notice.
    wait_until(lambda: not commands_of(mark), "all processes have ended")


def commands_of(mark: str) -> list[str]:
    """The processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [one for one in found if one]


def test_an_unknown_measurement_is_refused(rabbitmq: Rabbitmq) -> None:
    done = bench(rabbitmq, "publishing")
    assert done.returncode == 2
    assert "no measurement is called 'publishing'" in done.stderr


@pytest.mark.parametrize("value", ["0", "11", "-1"])
def test_a_scale_out_of_range_is_refused(rabbitmq: Rabbitmq, value: str) -> None:
    done = bench(rabbitmq, "consume", "--scale", value)
    assert done.returncode == 2
    assert "out of range" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_profile_of_a_broker_has_the_rows_of_the_page(rabbitmq: Rabbitmq) -> None:
    """A short run at a low rate."""
    ((_, block),) = blocks("docs/limits.md")
    given = block.removeprefix("$ ").replace(' --root "$(scripts/broker-root.sh forky)"', "").replace("30", "2")
    program, *arguments = shlex.split(given)
    assert (program, arguments) == ("python", ["-m", "benchmarks.broker_profile", "--seconds", "2", "--longest", "2"])
    done = subprocess.run(
        [sys.executable, *arguments, "--rate", "100", *root_option(rabbitmq)],
        cwd=ROOT,
        env=environment_for(rabbitmq),
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^\|.*\|$", read("docs/limits.md").partition("```\n\n|")[2].partition("\n\n")[0], re.M)
    printed = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("|")]
    assert printed[2:] == [line.split(" | ")[0] for line in shown[1:]]
