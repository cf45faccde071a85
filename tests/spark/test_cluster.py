"""A real standalone cluster, whose executors have bide by ``--py-files`` only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bide.cli.app import run
from tests.spark import on_cluster
from tests.spark.cluster import BIN, SETTINGS, WORKERS, standalone
from tests.spark.cluster_checks import check_source_and_sink, prepare_queues
from tests.support import Vhost

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_source_and_sink_work_on_a_cluster_with_py_files(vhost: Vhost, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    assert run(["pipeline", "bundle", str(tmp_path / "bide.zip")]) == 0
    with standalone(tmp_path) as cluster:
        answer = cluster.called(
            tmp_path / "work",
            *(BIN / "spark-submit", "--master", cluster.url, "--py-files", "../bide.zip"),
            *(word for one in SETTINGS.items() for word in ("--conf", "=".join(one))),
            *(str(on_cluster.__file__), json.dumps(prepare_queues(vhost, tmp_path))),
        )
    found = json.loads(answer.splitlines()[-1])
    assert len({worker for worker, _, _ in found["places"]}) == WORKERS
    for _, place, alone in found["places"]:
        assert "bide.zip/bide/__init__.py" in place
        assert alone == "ModuleNotFoundError: No module named 'bide'"
    check_source_and_sink(found, vhost)
