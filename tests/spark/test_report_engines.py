"""``bide pipeline report``: equal figures, pages and JSON in this process and with Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest

from bide.pipelines.charts.svg import document
from bide.pipelines.report.collecting import collect
from bide.pipelines.report.duckdb_tables import small_tables
from bide.pipelines.report.page import page
from bide.pipelines.report.picture import picture
from bide.pipelines.report.spark_tables import spark_tables
from bide.pipelines.report.writing import headline
from tests.spark.generated_audit import write_generated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.pipelines.report.figures import Figures


def compare(spark: SparkSession, folder: Path) -> Figures:
    """Compare all that the two engines make of an audit."""
    with small_tables(str(folder)) as tables:
        here = collect(tables)
    with spark_tables(spark, str(folder)) as tables:
        there = collect(tables)
    assert here == there
    assert page(here) == page(there)
    assert document(picture(here), name="report") == document(picture(there), name="report")
    assert headline(here) == headline(there)
    return here


@pytest.mark.parametrize(
    ("seed", "rows", "days", "zone"), [(3, 60, 3.0, "Asia/Kathmandu"), (2, 2000, 0.01, "America/St_Johns")]
)
def test_both_engines_make_the_same_report(
    spark: SparkSession, tmp_path: Path, seed: int, rows: int, days: float, zone: str
) -> None:
    write_generated(tmp_path, seed=seed, rows=rows, days=days)
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        found = compare(spark, tmp_path)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert found.headline is not None
    assert found.headline.max is not None
    assert found.filters is not None
    assert found.oldest
    assert found.pending is not None
    assert found.failures is not None
    assert any(one.text for one in found.failures.groups)
    assert found.schedules is not None
    assert found.undecodable
    assert not found.missing
    assert not spark.sql("show views like 'bide_report*'").collect()


def test_both_engines_read_the_tables_of_an_audit(spark: SparkSession, tmp_path: Path) -> None:
    """Spark has written them: with the old type of timestamps, and a folder for each day and batch."""
    with ZipFile(Path(__file__).with_name("audit-v2.zip")) as archive:
        archive.extractall(tmp_path)
    found = compare(spark, tmp_path)
    assert found.headline is not None
    assert found.headline.delivered
    assert found.failures is not None
    assert found.failures.total
