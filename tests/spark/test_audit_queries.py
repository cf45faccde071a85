"""Audit rounds with failing queries."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

import bide
from bide.errors import BideError
from bide.pipelines.audit import run
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.run import Sources, _finish
from bide.pipelines.session import spark_errors
from tests.support import Vhost, stream_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def test_one_failure_is_raised_and_no_other_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    def failing(name: str) -> StreamingQuery:
        def fail(batch: DataFrame, number: int) -> None:
            raise ValueError(f"the {name} is broken")

        source = spark.readStream.format("rate").load()
        return source.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path / name)).start()

    with pytest.raises(StreamingQueryException, match="the first is broken") as caught:
        _finish([partial(failing, "first"), partial(failing, "second")], is_last=False)
    (note,) = caught.value.__notes__
    assert note.startswith("another query failed too: ")
    assert "the second is broken" in note
    # In one line, as the command line prints it.
    with pytest.raises(BideError) as translated, spark_errors():
        raise caught.value
    assert re.fullmatch(r"Spark: .*the first is broken.*", str(translated.value))
    assert translated.value.__notes__ == [note]


def test_a_query_that_meets_a_race_of_spark_is_started_again() -> None:
    """Raised here, because it was seen only once."""

    def start() -> StreamingQuery:
        raise RuntimeError(
            "An error occurred while calling o1.start.\n: java.util.ConcurrentModificationException\n\tat"
        )

    assert _finish([start], is_last=False) == [start]
    with pytest.raises(RuntimeError, match="ConcurrentModification"):
        _finish([start], is_last=True)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 10])
def test_a_query_whose_python_starts_too_slowly_is_restarted(
    spark: SparkSession, vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """Spark gives it ten seconds, which a machine whose cores others have may need."""
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
*python_streaming_source_runner*)
    echo >>{starts}
    [ $(wc -l <{starts}) -gt {slow} ] || exec sleep 20
esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    with bide.connect_sync(vhost.url) as client:
        client.declare(bide.Topology(queues=[bide.Queue("events", arguments={"x-queue-type": "stream"})]))
        event = {"event": "processed", "message_id": "m", "endpoint": "shop", "ended": 1_795_262_400_000}
        client.publish(json=event, to="events")
    sources = Sources(url=vhost.url, events=["events"], port=stream_port(vhost.broker))
    folder = Folder(str(tmp_path / "audit"))
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    monkeypatch.setattr(run, "_ATTEMPTS", 2)
    if slow == 10:
        with pytest.raises(StreamingQueryException, match="failed to connect back"):
            run.run(spark, sources, folder)
        return
    assert run.run(spark, sources, folder).rows["processed"] == 1
