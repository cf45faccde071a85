"""Spark Connect: what a client may do with a server that has bide."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark import on_cluster
from tests.spark.campaign import check_pipelines, check_source_and_sink, told
from tests.spark.cluster import Elsewhere, connect_server
from tests.support import Vhost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with connect_server(tmp_path_factory.mktemp("connect")) as server:
        yield server


def test_source_and_sink_work_over_spark_connect(server: Elsewhere, vhost: Vhost, tmp_path: Path) -> None:
    said = server.called(tmp_path, sys.executable, str(on_cluster.__file__), json.dumps(told(vhost, tmp_path)))
    check_source_and_sink(json.loads(said.splitlines()[-1]), vhost)


@pytest.mark.long
def test_pipelines_work_over_spark_connect(server: Elsewhere, vhost: Vhost, tmp_path: Path) -> None:
    check_pipelines(server, {}, vhost, tmp_path)
