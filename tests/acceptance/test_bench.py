"""``bide bench``: what is asked for is measured, in turns, shown, and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bide.broker.installation import HOME_VARIABLE
from tests.support import Rabbitmq


def bench(rabbitmq: Rabbitmq, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = () if rabbitmq.chroot is None else ("--root", str(rabbitmq.chroot))
    home = {} if rabbitmq.home is None else {HOME_VARIABLE: str(rabbitmq.home)}
    return subprocess.run(
        [sys.executable, "-m", "bide", "bench", *arguments, *root],
        capture_output=True,
        text=True,
        env={**os.environ, **home, **environment},
        timeout=100,
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


def test_what_fails_is_said_and_the_rest_goes_on(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    """A client that is there, but cannot be imported."""
    (tmp_path / "pika.py").write_text("raise ImportError('broken')\n")
    arguments = ("startup", "--scale", "0.1", "--rounds", "1", "--only", "import *", "--json")
    done = bench(rabbitmq, *arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    results = json.loads(done.stdout)
    rows = {row["case"]: row for row in results["rows"]}
    assert rows["import bide"]["values"]["cpu_ms"][0] > 0
    assert rows["import pika"]["values"] == {}
    assert rows["import pika"]["notes"][0].startswith("failed: ")
    assert results["failures"][0].startswith("startup, import pika: ")


def test_a_measurement_that_is_unknown_is_refused(rabbitmq: Rabbitmq) -> None:
    done = bench(rabbitmq, "publishing")
    assert done.returncode == 2
    assert "no measurement is called 'publishing'" in done.stderr


@pytest.mark.parametrize("value", ["0", "2", "-1"])
def test_the_scale_has_limits(rabbitmq: Rabbitmq, value: str) -> None:
    done = bench(rabbitmq, "consume", "--scale", value)
    assert done.returncode == 2
    assert "out of range" in done.stderr
