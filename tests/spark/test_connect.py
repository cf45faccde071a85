"""Spark Connect with a server that has bide."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark import on_cluster
from tests.spark.cluster import ExternalSpark, connect_server
from tests.spark.cluster_checks import check_pipelines, check_source_and_sink, prepare_queues
from tests.support import Vhost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalSpark]:
    with connect_server(tmp_path_factory.mktemp("connect")) as server:
        yield server


@pytest.mark.long
def test_source_and_sink_work_over_spark_connect(server: ExternalSpark, vhost: Vhost, tmp_path: Path) -> None:
    answer = server.called(
        tmp_path, sys.executable, str(on_cluster.__file__), json.dumps(prepare_queues(vhost, tmp_path))
    )
    check_source_and_sink(json.loads(answer.splitlines()[-1]), vhost)


@pytest.mark.long
def test_pipelines_work_over_spark_connect(server: ExternalSpark, vhost: Vhost, tmp_path: Path) -> None:
    check_pipelines(server, {}, vhost, tmp_path)
