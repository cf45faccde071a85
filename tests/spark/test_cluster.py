"""A real standalone cluster, whose executors have bide by the documented ways alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bide
from bide.broker import LocalBroker
from bide.cli.app import run
from tests.spark import on_cluster
from tests.spark.cluster import WORKERS, Cluster, standalone
from tests.spark.killing import QUICK_JAVA
from tests.spark.receiving import drain
from tests.support import Vhost, stream_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
CLOCK = bide.Clock(max_delay=timedelta(hours=2), resolution=timedelta(seconds=1))
ROWS = 200
ON_CLOCK = ("--max-delay", "2h", "--resolution", "1s")
# One task at a time on each of two executors; nothing begins before both are there.
SMALL = {"spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "512m"}
SETTINGS = [
    f"{name}={value}"
    for name, value in {
        **SMALL,
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.ui.enabled": "false",
    }.items()
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def url(vhost: Vhost) -> str:
    """The URL of a virtual host with a queue ``orders``, a stream ``facts``, and a tapped clock."""
    facts = bide.Queue("facts", arguments={"x-queue-type": "stream"})
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders"), facts]))
    assert run(["delay", "apply", *ON_CLOCK, "--url", vhost.url]) == 0
    assert run(["tap", "on", *ON_CLOCK, "--url", vhost.url]) == 0
    return vhost.url


def called(cluster: Cluster, place: Path, *command: str | Path) -> str:
    """What a program prints that uses the cluster, from a folder that does not have bide in it."""
    done = subprocess.run(
        command, cwd=place, env=cluster.environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout


def pipeline(cluster: Cluster, place: Path, *command: str) -> dict[str, Any]:
    where = ("--master", cluster.url, *(word for one in SETTINGS for word in ("--spark-conf", one)))
    answer: dict[str, Any] = json.loads(called(cluster, place, BIN / "bide", "pipeline", *command, *where, "--json"))
    return answer


def test_source_and_sink_by_py_files(cluster: Cluster, broker: LocalBroker, url: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    assert run(["pipeline", "bundle", str(tmp_path / "bide.zip")]) == 0
    told = {"url": url, "port": str(stream_port(broker)), "checkpoint": str(tmp_path / "checkpoint")}
    said = called(
        cluster,
        tmp_path / "work",
        *(BIN / "spark-submit", "--master", cluster.url, "--py-files", "../bide.zip"),
        *(word for one in SETTINGS for word in ("--conf", one)),
        *(str(on_cluster.__file__), json.dumps(told)),
    )
    found = json.loads(said.splitlines()[-1])
    assert len({worker for worker, _, _ in found["places"]}) == WORKERS
    for _, place, alone in found["places"]:
        assert "bide.zip/bide/__init__.py" in place
        assert alone == "ModuleNotFoundError: No module named 'bide'"
    sent = {f"m-{number}": f"row {number}".encode() for number in range(on_cluster.ROWS)}
    assert set(found["batch"]) == set(sent)
    assert {one.message_id: one.body for one in drain(url, "orders", on_cluster.ROWS)} == sent


def test_pipelines_bring_bide_along(cluster: Cluster, broker: LocalBroker, url: str, tmp_path: Path) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    rows = {"order": list(range(ROWS)), "due": pa.array([due] * ROWS, pa.timestamp("us", "UTC"))}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    target = ("--to", "orders", "--at-column", "due", *ON_CLOCK, "--url", url)
    schedule = ("schedule", "rows.parquet", *target, "--part-rows", "100", "--ledger", str(tmp_path / "ledger"))
    assert pipeline(cluster, tmp_path, *schedule)["sent"] == ROWS
    where = ("--into", "audit", "--url", url, "--stream-port", str(stream_port(broker)))
    done = pipeline(cluster, tmp_path, "audit", "--once", *where)
    assert (done["rows"]["scheduled"], done["pending"], done["overdue"]) == (ROWS, ROWS, 0)
    told = pipeline(cluster, tmp_path, "report", "audit", "--out", "report.html")
    assert (told["scheduled"], told["pending"]) == (ROWS, ROWS)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
