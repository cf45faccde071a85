"""Spark Connect: what a client may do with a server that has bide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import bide
from bide.broker import LocalBroker
from bide.cli.app import run
from tests.spark import on_cluster
from tests.spark.cluster import connect_server
from tests.spark.receiving import drain
from tests.support import Vhost, stream_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
ON_CLOCK = ("--max-delay", "2h", "--resolution", "1s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as url:
        yield url


def called(place: Path, server: str, *command: str | Path) -> str:
    """What a client prints."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    done = subprocess.run(
        command,
        cwd=place,
        env={**usual, "SPARK_REMOTE": server},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout


def test_source_sink_and_audit(server: str, broker: LocalBroker, vhost: Vhost, tmp_path: Path) -> None:
    facts = bide.Queue("facts", arguments={"x-queue-type": "stream"})
    clock = bide.Clock(max_delay=timedelta(hours=2), resolution=timedelta(seconds=1))
    with bide.connect_sync(vhost.url, infrastructure=clock) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), facts]))
    assert run(["delay", "apply", *ON_CLOCK, "--url", vhost.url]) == 0
    assert run(["tap", "on", *ON_CLOCK, "--url", vhost.url]) == 0
    port = str(stream_port(broker))
    told = {"url": vhost.url, "port": port, "checkpoint": str(tmp_path / "checkpoint")}
    said = called(tmp_path, server, sys.executable, str(on_cluster.__file__), json.dumps(told))
    sent = {f"m-{number}": f"row {number}".encode() for number in range(on_cluster.ROWS)}
    assert set(json.loads(said.splitlines()[-1])["batch"]) == set(sent)
    assert {one.message_id: one.body for one in drain(vhost.url, "orders", on_cluster.ROWS)} == sent

    audit = (BIN / "bide", "pipeline", "audit", "--once", "--json", "--into", str(tmp_path / "audit"))
    where = ("--url", vhost.url, "--stream-port", port, "--master", server)
    done = json.loads(called(tmp_path, server, *audit, *where))
    assert (done["rows"]["scheduled"], done["rows"]["delivered"], done["pending"]) == (300, 300, 0)
