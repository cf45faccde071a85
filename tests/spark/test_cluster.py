"""A real standalone cluster, whose executors have bide by ``--py-files`` only."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bide
from bide.cli.app import run
from tests.polling import wait_until
from tests.readme import blocks, commands_of, shape
from tests.spark import on_cluster
from tests.spark.cluster import BIN, SETTINGS, WORKERS, standalone
from tests.spark.cluster_checks import check_source_and_sink, prepare_queues
from tests.support import Vhost

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = "docs/spark-cluster.md"


def test_source_and_sink_work_on_a_cluster_with_py_files(
    vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    assert run(["pipeline", "bundle", str(tmp_path / "bide.zip")]) == 0
    (_, program), (_, submit) = blocks(PAGE, "spark-submit")
    (tmp_path / "work" / "orders.py").write_text(program)
    monkeypatch.setenv("BIDE_URL", vhost.url)
    with standalone(tmp_path) as cluster:
        command: tuple[str | Path, ...] = (
            *(BIN / "spark-submit", "--master", cluster.url, "--py-files", "../bide.zip"),
            *(word for one in SETTINGS.items() for word in ("--conf", "=".join(one))),
        )
        settings = json.dumps(prepare_queues(vhost, tmp_path))
        answer = cluster.called(tmp_path / "work", *command, str(on_cluster.__file__), settings)
        printed = cluster.called(tmp_path / "work", *command, "orders.py")
    ((_, shown),) = commands_of(submit)
    assert shape(printed) == shape(shown)
    with bide.connect_sync(vhost.url) as client:
        assert client.message_count("bide.v1.h1") == 1_000
    found = json.loads(answer.splitlines()[-1])
    assert len({worker for worker, _, _ in found["places"]}) == WORKERS
    for _, place, alone in found["places"]:
        assert "bide.zip/bide/__init__.py" in place
        assert alone == "ModuleNotFoundError: No module named 'bide'"
    check_source_and_sink(found, vhost)


def test_a_program_and_a_command_send_on_a_cluster(
    vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, shipping),) = blocks(PAGE, "A session in a program")
    ((_, block),) = blocks(PAGE, "bide pipeline")
    ((command, _),) = commands_of(block)
    (_, orders), _ = blocks(PAGE, "spark-submit")
    imports = "from pyspark.sql import SparkSession\n\nimport bide.spark\n\n"
    send = "rows = " + orders.partition("rows = ")[2]
    monkeypatch.setenv("BIDE_URL", vhost.url)
    due = datetime.now(UTC) + timedelta(minutes=90)
    pq.write_table(pa.table({"id": list(range(100)), "due": [due] * 100}), tmp_path / "reminders.parquet")
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        with standalone(tmp_path) as cluster:
            master = "spark://master:7077"
            assert master in shipping
            assert master in command
            session = shipping.replace(master, cluster.url).replace(".get", f".config(map={SETTINGS!r}).get")
            (tmp_path / "session.py").write_text(imports + session + send, encoding="utf-8")
            cluster.called(tmp_path, sys.executable, "session.py")
            wait_until(lambda: client.message_count("bide.v1.h1") == 1_000, "the program has sent its rows")

            here = command.replace(master, cluster.url).replace("/shared/", f"{tmp_path}/")
            program, *arguments = shlex.split(here)
            assert program == "bide"
            settings = (word for one in SETTINGS.items() for word in ("--spark-conf", "=".join(one)))
            cluster.called(tmp_path, sys.executable, "-m", "bide", *arguments, *settings)
            wait_until(lambda: client.message_count("bide.v1.h1") == 1_100, "the command has sent its rows")
