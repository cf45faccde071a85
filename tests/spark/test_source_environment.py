"""The broker of reads and writes when only environment variables name it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import bide.spark
from bide.spark.datasource import RabbitMQDataSource
from bide.streams.range_reader import OffsetRange
from tests.spark.streams import Streams
from tests.support import stream_port
from tests.timeouts import TIMEOUT


@pytest.fixture
def named(streams: Streams) -> Iterator[Streams]:
    """The environment names the broker, and did not when the session was started."""
    environment = {"BIDE_URL": streams.vhost.url, "BIDE_STREAM_PORT": str(stream_port(streams.vhost.broker))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
            # So that it is gone afterwards.
            patch.setitem(streams.spark.sparkContext.environment, name, "")
        yield streams
    bide.spark.register(streams.spark)


def test_the_data_source_uses_both_variables(named: Streams) -> None:
    named.declare("s")
    named.fill("s", range(3))
    source = RabbitMQDataSource({"stream": "s"})
    assert [one.value for one in source.reader(source.schema()).partitions()] == [
        OffsetRange(stream="s", start=0, end=3)
    ]


def test_register_uses_the_current_environment(named: Streams, tmp_path: Path) -> None:
    """The processes that plan a read or a write are Spark's, with the environment of the session's start."""
    named.declare("s")
    named.fill("s", range(2))
    bide.spark.register(named.spark)
    named.spark.sql("select '2' as value").write.format("rabbitmq").mode("append").option("queue", "s").save()
    rows = named.spark.read.format("rabbitmq").option("stream", "s").load().collect()
    assert sorted(row.value for row in rows) == [b"0", b"1", b"2"]
    query = (
        named.spark.readStream.format("rabbitmq")
        .options(stream="s", startingOffsets="earliest")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "files"))
    )
    assert query.awaitTermination(int(TIMEOUT))
    assert named.stored(tmp_path / "files") == ["0", "1", "2"]


def test_register_resets_the_stream_port_for_another_broker(named: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables belong together: without a port of its own, the broker has the usual one."""
    monkeypatch.delenv("BIDE_STREAM_PORT")
    environment = named.spark.sparkContext.environment
    environment["BIDE_STREAM_PORT"] = "1"
    bide.spark.register(named.spark)
    assert (environment["BIDE_URL"], environment["BIDE_STREAM_PORT"]) == (named.vhost.url, "")


def test_register_removes_a_previous_address(named: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    named.declare("s")
    bide.spark.register(named.spark)
    rows = named.spark.read.format("rabbitmq").option("stream", "s")
    assert rows.load().collect() == []
    monkeypatch.delenv("BIDE_URL")
    monkeypatch.delenv("BIDE_STREAM_PORT")
    bide.spark.register(named.spark)
    # The usual broker of this machine, which may be there or not.
    with pytest.raises(Exception, match=r"5552|virtual host '/'"):
        rows.load().collect()


def test_register_clears_variables_from_the_start_of_the_session(
    named: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Spark's processes know by themselves is not known here."""
    environment = named.spark.sparkContext.environment
    for name in ("BIDE_URL", "BIDE_STREAM_PORT"):
        monkeypatch.delenv(name)
        del environment[name]
    bide.spark.register(named.spark)
    assert "BIDE_URL" not in environment
    monkeypatch.setenv("BIDE_URL", "")
    bide.spark.register(named.spark)
    assert (environment["BIDE_URL"], environment["BIDE_STREAM_PORT"]) == ("", "")
