"""A real standalone cluster, whose executors get bide from ``bide pipeline``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.cluster import SETTINGS, standalone
from tests.spark.cluster_checks import check_pipelines
from tests.support import Vhost

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_pipelines_ship_bide_to_a_cluster(vhost: Vhost, tmp_path: Path) -> None:
    with standalone(tmp_path) as cluster:
        check_pipelines(cluster, SETTINGS, vhost, tmp_path)
