"""Tables of an audit in a Spark session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.pipelines.formats import escape_pattern_characters, spark_uri
from bide.pipelines.report.tables import (
    ALL_COLUMNS,
    NAME_COLUMNS,
    RENAMED_COLUMNS,
    ReportTables,
    check_columns,
    check_folder,
    spark_paths,
)
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logger(__name__)


@contextmanager
def spark_tables(spark: SparkSession, folder: str) -> Iterator[ReportTables]:
    """The tables in a folder, of any size, as temporary views, which are dropped at the end.

    Args:
        folder: a path, or a URI that Spark and Arrow support.

    Raises:
        InvalidInputError: see :func:`bide.pipelines.report.tables.check_folder`.
        InvalidColumnError: a table lacks a column.
    """
    check_folder(folder)
    tables = _SparkTables(spark, folder)
    try:
        tables.open()
        yield tables
    finally:
        tables.drop()


class _SparkTables:
    def __init__(self, spark: SparkSession, folder: str) -> None:
        self.folder = folder
        self.names: dict[str, str] = {}
        self._spark = spark
        self._views: list[str] = []
        # Other reports may use the same session.
        self._prefix = f"bide_report_{uuid4().hex}"

    def open(self) -> None:
        for name in ALL_COLUMNS:
            if (rows := self._read(name)) is not None:
                self.names[name] = self._view(rows)

    def drop(self) -> None:
        for name in self._views:
            try:
                self._spark.catalog.dropTempView(name)
            except Exception as error:  # noqa: BLE001 (it would hide the error that ended the report)
                log.debug("the view %s was not dropped: %s", name, error)

    def define(self, query: str, **values: Sequence[str]) -> str:
        return self._view(self._spark.sql(query, args=values))

    def rows(self, query: str, **values: Sequence[str]) -> list[dict[str, Any]]:
        return [row.asDict() for row in self._spark.sql(query, args=values).collect()]

    def _view(self, rows: DataFrame) -> str:
        name = f"{self._prefix}_{len(self._views)}"
        rows.createOrReplaceTempView(name)
        self._views.append(name)
        return name

    def _read(self, name: str) -> DataFrame | None:
        if (paths := spark_paths(self.folder, name)) is None:
            return None
        if not paths:
            empty = ", ".join(f"`{column}` {kind}" for column, kind in ALL_COLUMNS[name].items())
            return self._selected(name, self._spark.createDataFrame([], empty))
        rows = self._spark.read.parquet(*map(escape_pattern_characters, paths))
        check_columns(spark_uri(self.folder, name), name, rows.columns)
        return self._selected(name, rows)

    def _selected(self, name: str, rows: DataFrame) -> DataFrame:
        return rows.select(*(_column(rows, column, kind) for column, kind in ALL_COLUMNS[name].items()))


def _column(rows: DataFrame, column: str, kind: str) -> Column:
    value = rows[column].cast(kind)
    if kind == "timestamp":
        value = F.unix_micros(value)
    elif column in NAME_COLUMNS:
        value = F.coalesce(value, F.lit(""))
    return value.alias(RENAMED_COLUMNS.get(column, column))
