"""README.md: what is in its blocks, run as it stands there, prints what they say. For Spark see tests/spark."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bide
from bide.local_broker import LocalBroker
from tests.acceptance.test_cli import Program
from tests.patience import PATIENCE
from tests.readme import INSTALL, README, ROOT, Shell, blocks, shape
from tests.spark.killing import Counter, wait_until

if TYPE_CHECKING:
    from tests.support import Rabbitmq, Vhost


@pytest.fixture
def shell(tmp_path: Path, rabbitmq: Rabbitmq) -> Iterator[Shell]:
    found = Shell(tmp_path, rabbitmq)
    yield found
    LocalBroker(found.state / "bide" / "broker").stop()


def test_what_it_says_of_the_installation() -> None:
    assert f"```sh\n{INSTALL}" in README
    targets = INSTALL.partition(" &&")[0].split()[1:]
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    extras = re.findall(r"`pip install 'bide\[(.*?)\]'`", README)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert len(extras) == 1
    assert set(extras[0].split(",")) <= set(known)


@pytest.mark.slow
def test_the_programs(vhost: Vhost) -> None:
    (_, reminder), (_, said), (_, to_an_exchange), (_, endpoint) = blocks(None)
    environment = {**Program(vhost).environment, "PYTHONUNBUFFERED": "1"}

    def printed(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert shape(printed(reminder)) == shape(said)

    assert printed(to_an_exchange) == ""
    waiting = Counter(vhost.url, "bide.v1.m1")
    # A minute in this queue comes first. A broker counts what it has confirmed a moment later.
    wait_until(lambda: waiting() == 1, "the order waits")
    waiting.close()

    with (
        bide.connect_sync(vhost.url) as client,
        subprocess.Popen([sys.executable, "-c", endpoint], env=environment, stdout=subprocess.PIPE) as serving,
    ):
        try:
            client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            client.publish(json={"order": 7}, to="orders")
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"charging {'order': 7}\n"
            serving.terminate()
            assert serving.wait(30) == 0
        finally:
            serving.kill()


@pytest.mark.slow
def test_the_command_line(shell: Shell) -> None:
    (_, broker), (_, way) = blocks("The command line")
    for block in (broker, way):
        lines = block.splitlines(keepends=True)
        printed = shell.paste("".join(line.removeprefix("$ ") for line in lines if line.startswith("$ ")))
        said = "".join(line for line in lines if not line.startswith("$ "))
        assert shape(printed) == shape(said)
        if block is way:
            assert printed == said
