"""Audits of the same streams with Spark and in this process, and with both by turns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import run
from tests.audited_streams import EVENTS, TABLES, AuditedStreams, tables_in, types_in
from tests.support import Vhost
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def streams(vhost: Vhost) -> AuditedStreams:
    found = AuditedStreams(vhost)
    found.declare()
    found.fill(0)
    return found


@pytest.mark.slow
def test_both_engines_write_the_same_tables(spark: SparkSession, streams: AuditedStreams, tmp_path: Path) -> None:
    streams.fill(1)
    places = {name: tmp_path / name for name in ("spark", "local")}
    with_spark = run(spark, streams.sources(), Folder(str(places["spark"])))
    local = run(None, streams.sources(), Folder(str(places["local"])))
    for one in ("rows", "ended", "undecodable", "pending", "overdue", "days"):
        assert getattr(local, one) == getattr(with_spark, one)
    expected = tables_in(places["spark"])
    assert all(expected.values())
    assert set(expected) == set(TABLES)
    assert tables_in(places["local"]) == expected
    assert types_in(places["local"]) == types_in(places["spark"])
    for name in expected:
        kinds = [spark.read.parquet(str(place / name)).drop("batch").schema for place in places.values()]
        assert kinds[0] == kinds[1], name


WITH_ROOM_FOR_NOTHING = """
import sys
from bide.cli.app import run
from bide.pipelines.audit import size
size.MAX_EARLIER_BYTES = 1
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_round_with_large_files_of_earlier_facts_is_left_to_spark(streams: AuditedStreams, tmp_path: Path) -> None:
    place = tmp_path / "audit"
    where = ("--url", streams.vhost.url, "--stream-port", str(streams.port), "--events", EVENTS)
    program = [sys.executable, "-c", WITH_ROOM_FOR_NOTHING, "pipeline", "audit", "--into", str(place), *where]
    found = []
    for _ in range(2):
        done = subprocess.run([*program, "--once", "--json"], capture_output=True, check=True, timeout=TIMEOUT)
        found.append(json.loads(done.stdout))
        streams.fill(1)
    assert found[0]["engine"] == "local"
    assert found[1]["engine"] == "spark"
    assert re.fullmatch(r"the files with earlier facts have .* kB, more than 1 B", found[1]["engine_reason"])
    run(None, streams.sources(), Folder(str(place)))
    run(None, streams.sources(), Folder(str(tmp_path / "whole")))
    assert tables_in(place) == tables_in(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.slow
def test_each_engine_continues_what_the_other_has_begun(
    spark: SparkSession, streams: AuditedStreams, tmp_path: Path
) -> None:
    """In rounds of small batches."""
    turns = Folder(str(tmp_path / "turns"))
    run(spark, streams.sources(batch_rows=40), turns)
    streams.fill(1)
    run(None, streams.sources(batch_rows=40), turns)
    streams.fill(2)
    run(spark, streams.sources(batch_rows=40), turns)
    run(None, streams.sources(), Folder(str(tmp_path / "local")))
    assert tables_in(tmp_path / "turns") == tables_in(tmp_path / "local")
    kinds = [
        spark.read.option("mergeSchema", "true").parquet(str(tmp_path / place / "messages")).drop("batch").schema
        for place in ("turns", "local")
    ]
    assert kinds[0] == kinds[1]
