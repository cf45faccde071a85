"""A real standalone cluster, whose executors have bide by ``--py-files`` only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bide
from bide.cli.app import run
from tests.readme import blocks, commands_of, shape
from tests.spark import on_cluster
from tests.spark.cluster import BIN, SETTINGS, WORKERS, standalone
from tests.spark.cluster_checks import check_source_and_sink, prepare_queues
from tests.support import Vhost

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_source_and_sink_work_on_a_cluster_with_py_files(
    vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    assert run(["pipeline", "bundle", str(tmp_path / "bide.zip")]) == 0
    (_, program), (_, submit) = blocks("docs/spark-cluster.md", "spark-submit")
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
