"""Delta and Iceberg tables of an audit, read with Spark, which has no reader for them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from bide.pipelines.audit import facts
from bide.pipelines.audit.columns import FACT_COLUMNS, MESSAGES_SCHEMA, arrow_schema, with_batch
from bide.pipelines.audit.folder import Folder
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.audit.table_format import TableFormat
from bide.pipelines.report.duckdb_tables import small_tables
from bide.pipelines.report.spark_tables import spark_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAYS = (date(2026, 11, 20), date(2026, 11, 21))
NINE = datetime(2026, 11, 21, 9, tzinfo=UTC)


def rows(schema: pa.Schema, *ids: str, day: date) -> pa.Table:
    known = {"day": day, "due": NINE, "outcome": "overdue", "batch": 0}
    return pa.Table.from_pylist(
        [{name: known.get(name) for name in schema.names} | {"message_id": one} for one in ids], schema=schema
    )


@pytest.mark.parametrize(("table_format", "name"), [("delta", "a folder, #1?"), ("iceberg", "a folder, #1")])
def test_spark_reads_the_newest_version_of_tables(
    spark: SparkSession, tmp_path: Path, table_format: TableFormat, name: str
) -> None:
    """The folder also has the files of earlier versions, which Spark would read as more rows of a Parquet table."""
    folder = Folder(str(tmp_path / name), table_format=table_format)
    folder.begin()
    storage, scheduled = open_storage(folder), arrow_schema(FACT_COLUMNS["scheduled"])
    for batch, day in enumerate((*DAYS, *DAYS)):
        storage.append(rows(scheduled, f"m-{batch}", day=day), "scheduled", batch)
        storage.replace_batches(rows(with_batch(MESSAGES_SCHEMA), f"m-{batch}", day=day), "messages", {(day, 0)})
    storage.drop_batch("scheduled", 2)

    def read(*days: date) -> list[str]:
        found = folder.read(spark, "scheduled", facts.SCHEMAS["scheduled"], days or None).collect()
        assert {row["due"].astimezone(UTC) for row in found} == {NINE}
        return sorted(f"{row['message_id']} {row['day']}" for row in found)

    assert read() == [f"m-0 {DAYS[0]}", f"m-1 {DAYS[1]}", f"m-3 {DAYS[1]}"]
    assert read(DAYS[0]) == [f"m-0 {DAYS[0]}"]
    with spark_tables(spark, folder.place) as with_spark, small_tables(folder.place) as local:
        for tables in (with_spark, local):
            query = f"select message_id, due from {tables.names['messages']} order by message_id"
            microseconds = round(NINE.timestamp() * 1_000_000)
            assert tables.rows(query) == [{"message_id": one, "due": microseconds} for one in ("m-2", "m-3")]
