"""Small tables of an audit in this process, with DuckDB."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa
from pyarrow import compute as pc

from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.formats import is_uri, spark_uri
from bide.pipelines.memory_database import memory_database
from bide.pipelines.report.tables import (
    ALL_COLUMNS,
    NAME_COLUMNS,
    RENAMED_COLUMNS,
    ReportTables,
    check_columns,
    check_folder,
    files_of,
)
from bide.pipelines.small_table import MAX_SMALL_BYTES, read_columns, spark_name
from bide.runtime.wording import in_bytes

if TYPE_CHECKING:
    from pyarrow import fs

_PARAMETER: Final = re.compile(r":(\w+)")
_TYPES: Final = {
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "double": pa.float64(),
    "bigint": pa.int64(),
}
_EMPTY: Final = {
    name: pa.schema([(column, _TYPES[kind]) for column, kind in columns.items()]).empty_table()
    for name, columns in ALL_COLUMNS.items()
}
_SMALL_INTEGERS: Final = ("tinyint", "smallint", "int")


class SmallTables(ReportTables):
    """Tables in this process.

    Attributes:
        size: the folder and the size of its files in words, as the reason for the choice of this engine.
    """

    size: str


@contextmanager
def small_tables(folder: str, *, largest: int | None = MAX_SMALL_BYTES) -> Iterator[SmallTables]:
    """The tables in a folder, read into memory as Spark would read them.

    Args:
        folder: a path.
        largest: the largest size of the files in bytes; None for any size.

    Raises:
        InvalidInputError: see :func:`bide.pipelines.report.tables.check_folder`.
        InvalidColumnError: a table lacks a column.
        NeedsSparkError: only Spark can read the tables, they are too large, or DuckDB cannot run a query.
    """
    if is_uri(folder):
        raise NeedsSparkError(f"{folder} is a URI")
    check_folder(folder)
    try:
        with memory_database() as connection:
            tables = _DuckdbTables(connection, folder)
            tables.open(largest)
            yield tables
    except duckdb.Error as error:
        first = str(error).partition("\n")[0]
        raise NeedsSparkError(f"DuckDB cannot run a query of the report ({first})") from error


class _DuckdbTables(SmallTables):
    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: str) -> None:
        self._connection = connection
        self._folder = folder
        self._names: dict[str, str] = {}
        self._defined = 0

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def names(self) -> dict[str, str]:
        return self._names

    def open(self, largest: int | None) -> None:
        found = {name: files for name in ALL_COLUMNS if (files := files_of(self._folder, name)) is not None}
        size = sum(one.size for files in found.values() for one in files)
        self.size = f"{self._folder} has {in_bytes(size)}"
        if largest is not None and size > largest:
            raise NeedsSparkError(f"{self.size}, more than {in_bytes(largest)}")
        room = largest
        for name, files in found.items():
            rows = _EMPTY[name]
            if files:
                _check_folders(f"{self._folder.rstrip('/')}/{name}", name, files)
                rows, room = read_columns([Path(one.path) for one in files], ALL_COLUMNS[name], largest=room)
            check_columns(spark_uri(self._folder, name), name, rows.column_names)
            self._connection.register("read", _prepared(name, rows))
            self._names[name] = self.define("select * from read")
            self._connection.unregister("read")

    def define(self, query: str, **values: Sequence[str]) -> str:
        self._defined += 1
        name = f"table_{self._defined}"
        self._run(f"create temporary table {name} as {query}", values)
        return name

    def rows(self, query: str, **values: Sequence[str]) -> list[dict[str, Any]]:
        found = self._run(query, values)
        columns = [one[0] for one in found.description]
        return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]

    def _run(self, query: str, values: dict[str, Sequence[str]]) -> duckdb.DuckDBPyConnection:
        return self._connection.execute(_PARAMETER.sub(r"$\1", query), values)


def _check_folders(place: str, name: str, files: Sequence[fs.FileInfo]) -> None:
    """Check that all folders of a table are partitions, by the same columns, which the report does not read.

    Raises:
        NeedsSparkError: Spark might leave out files, or read columns from the names of the folders.
    """
    partitionings = {
        tuple(part.partition("=")[:2] for part in PurePosixPath(one.path).relative_to(place).parts[:-1])
        for one in files
    }
    if len(partitionings) > 1 or any(
        sign != "=" or key in ALL_COLUMNS[name] for key, sign in next(iter(partitionings))
    ):
        raise NeedsSparkError(f"{place} has folders other than those of an audit")


def _prepared(name: str, rows: pa.Table) -> pa.Table:
    """The columns with the types and names of :class:`~bide.pipelines.report.tables.ReportTables`."""
    columns = {}
    for column, kind in ALL_COLUMNS[name].items():
        values = rows.column(column)
        found = spark_name(values.type)
        if found != kind and not (kind == "bigint" and found in _SMALL_INTEGERS):
            raise NeedsSparkError(f"the column {column!r} of the table {name!r} is {found}")
        if kind in ("timestamp", "bigint"):
            values = values.cast(pa.int64())
        elif column in NAME_COLUMNS:
            values = pc.fill_null(values, "")
        columns[RENAMED_COLUMNS.get(column, column)] = values
    return pa.table(columns)
