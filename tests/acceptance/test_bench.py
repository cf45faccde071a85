"""``bide bench``, tiny: every measurement runs, and says what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bide.broker.installation import HOME_VARIABLE
from tests.support import Rabbitmq


def bench(rabbitmq: Rabbitmq, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = () if rabbitmq.chroot is None else ("--root", str(rabbitmq.chroot))
    home = {} if rabbitmq.home is None else {HOME_VARIABLE: str(rabbitmq.home)}
    return subprocess.run(
        [sys.executable, "-m", "bide", "bench", *arguments, *root],
        capture_output=True,
        text=True,
        env={**os.environ, **home},
        timeout=100,
        check=False,
    )


def measured(rabbitmq: Rabbitmq, *arguments: str) -> dict[tuple[str, str, str], dict[str, list[float]]]:
    done = bench(rabbitmq, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    assert not results["failures"]
    return {(row["measurement"], row["setting"], row["case"]): row["values"] for row in results["rows"]}


def test_clients_are_compared_in_turns(rabbitmq: Rabbitmq) -> None:
    rows = measured(rabbitmq, "publish", "consume", "--scale", "0.01", "--rounds", "1", "--only", "200 B")
    contestants = {case for _, _, case in rows}
    assert contestants == {
        *("raw limit", "bide bulk", "bide", "aio-pika", "pika, pipelined", "pika, blocking", "kombu"),
        *("Celery", "dramatiq"),
    }
    assert all(len(values["rate"]) == 1 and values["rate"][0] > 0 for values in rows.values())
    assert all(values["broker_cpu"][0] >= 0 and values["client_cpu"][0] > 0 for values in rows.values())


def test_what_is_unknown_is_refused(rabbitmq: Rabbitmq) -> None:
    done = bench(rabbitmq, "publishing")
    assert done.returncode == 2
    assert "no measurement is called 'publishing'" in done.stderr


def test_results_are_kept_and_shown(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    done = bench(rabbitmq, "consume", "--scale", "0.01", "--rounds", "2", "--only", "bide", "--keep", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Receive and acknowledge" in done.stdout
    (file,) = folder.iterdir()
    results = json.loads(file.read_text())
    (row,) = results["rows"]
    assert len(row["values"]["rate"]) == 2
    assert results["releases"]["RabbitMQ"]
    assert results["releases"]["Erlang"]
    assert results["machine"]["cores"]


@pytest.mark.parametrize("value", ["0", "2", "-1"])
def test_the_scale_has_limits(rabbitmq: Rabbitmq, value: str) -> None:
    done = bench(rabbitmq, "consume", "--scale", value)
    assert done.returncode == 2
    assert "out of range" in done.stderr
