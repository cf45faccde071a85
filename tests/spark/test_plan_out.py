"""``bide pipeline plan --out``, interrupted: tables of two plans are never mixed."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyarrow import parquet
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

import bide
from bide.cli.app import run
from bide.pipelines.plan.capacity import Capacity
from bide.pipelines.plan.flows import flows_of
from bide.pipelines.plan.levels import PlanLevels
from bide.pipelines.plan.occupancy import Timeline
from bide.pipelines.plan.report import clear, report
from bide.pipelines.plan.workload import of_flows
from tests.spark.spark_processes import LOCAL, started

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Written:
    """The content of a folder with the two tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_whole(self) -> bool:
        return (self.folder / "queues" / "_SUCCESS").exists()

    @property
    def hops(self) -> float:
        rows = parquet.read_table(self.folder / "levels").to_pylist()
        return float(sum(one["hops"] for one in rows if one["level"] == "all"))

    @property
    def released(self) -> float:
        files = (self.folder / "queues").glob("*.parquet")
        return float(sum(one["released"] for file in files for one in parquet.read_table(file).to_pylist()))


class OfNoQueues(Timeline):
    """Spark fails as soon as it wants a row of the queues."""

    def queues(self) -> DataFrame:
        return super().queues().withColumn("released", F.raise_error(F.lit("cut off")).cast("double"))


@pytest.mark.long
@pytest.mark.slow
def test_old_tables_are_removed_before_new_ones_are_written(spark: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "[eu]"
    written, capacity = Written(out), Capacity.measured("clock")

    def write(rate: str, kind: type[Timeline] = Timeline) -> None:
        flows = flows_of([{"rate": rate, "delay": "5m", "start": "2026-11-21T06:00:00Z", "for": "10m"}])
        timeline = kind(of_flows(spark, flows, tick=timedelta(seconds=1)), PlanLevels.of(bide.Clock()))
        clear(timeline, str(out))
        assert not written.is_whole()
        assert written.released == 0
        report(timeline, capacity, out=str(out))
        timeline.close()

    write("1/s")
    assert written.is_whole()
    assert (written.hops, written.released) == pytest.approx((600, 600))
    with pytest.raises(PySparkException, match="cut off"):
        write("2/s", OfNoQueues)
    assert written.hops == pytest.approx(1_200)
    # Running the same plan again repairs the table, see below.
    assert not written.is_whole()
    assert written.released == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_plan_is_marked_as_unfinished(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kill -9`` of Python and JVM after the first thing that is changed, and the same command again."""
    layouts = [Written(tmp_path / layout) for layout in ("clock", "nservicebus")]

    def command(rate: str) -> list[str]:
        return ["pipeline", "plan", "--rate", rate, "--delay", "5m", "--for", "10m", "--out", str(tmp_path)]

    assert run(command("1/s")) == 0
    assert [one.is_whole() for one in layouts] == [True, True]
    with started([sys.executable, "-m", "bide", *command("2/s"), *LOCAL]) as program:
        program.wait_until(lambda: not any(one.is_whole() for one in layouts), "the queues are emptied")
        program.kill()
    assert [one.is_whole() for one in layouts] == [False, False]
    assert run(command("2/s")) == 0
    assert "1,200 messages" in capsys.readouterr().out
    assert [one.is_whole() for one in layouts] == [True, True]
    for one in layouts:
        assert one.hops == pytest.approx(one.released)
        assert one.hops >= 1_200
