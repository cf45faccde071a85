"""Tables of an audit that a report reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from pyarrow import ArrowInvalid, fs

from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.delta import is_delta_table
from bide.pipelines.formats import escape_pattern_characters, is_below_hidden, spark_uri
from bide.pipelines.iceberg import catalog_uri, is_iceberg_audit
from bide.pipelines.listed_files import listed_files

COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "messages": {
        "message_id": "string",
        "target": "string",
        "type": "string",
        "scheduled": "timestamp",
        "due": "timestamp",
        "delivered": "timestamp",
        "lateness_ms": "double",
        "outcome": "string",
    },
    "pending": {"target": "string", "due_hour": "timestamp", "count": "bigint", "overdue": "bigint"},
    "failures": {
        "group": "string",
        "exception": "string",
        "endpoint": "string",
        "count": "bigint",
        "messages": "bigint",
        "first_seen": "timestamp",
        "last_seen": "timestamp",
        "recent": "bigint",
        "before": "bigint",
    },
    "failed": {
        "message_id": "string",
        "group": "string",
        "endpoint": "string",
        "kind": "string",
        "started": "timestamp",
        "ended": "timestamp",
        "text": "string",
    },
}
"""The tables and columns that are read, with their types."""

OPTIONAL_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "undecodable": {"stream": "string", "offset": "bigint", "reason": "string", "seen": "timestamp"},
    "occurrences": {"target": "string", "due": "timestamp", "outcome": "string", "lateness_ms": "double"},
    "schedules_pending": {"target": "string", "due_hour": "timestamp", "count": "bigint", "overdue": "bigint"},
}
"""The tables that exist only if there are undecodable messages, or a schedule log."""

ALL_COLUMNS: Final = {**COLUMNS, **OPTIONAL_COLUMNS}

NAME_COLUMNS: Final = ("target", "type", "group", "endpoint", "exception")
"""Columns of names. Null is read as an empty string, so that unknown names form one group."""

RENAMED_COLUMNS: Final = {"group": "group_name", "offset": "stream_offset"}
"""New names of columns whose names are SQL keywords."""


# Spark 4.3 cannot read Delta tables: delta-spark does not support it. For Iceberg tables, it needs a jar and a catalog.
_PROGRAM: Final = '''\
import duckdb
{opened}

audit = duckdb.connect()
audit.execute("set TimeZone = 'UTC'")
audit.register("{name}", rows)
found = audit.sql("""
{query}
""")
found.show(max_rows=100_000)'''

_OPENED_DELTA: Final = """\
from deltalake import DeltaTable

rows = DeltaTable({place!r}).to_pyarrow_dataset()"""

_OPENED_ICEBERG: Final = """\
from pyiceberg.catalog.sql import SqlCatalog

with SqlCatalog("bide", uri={uri!r}) as catalog:
    rows = catalog.load_table("audit.{name}").scan().to_arrow()"""


class ReportTables(Protocol):
    """The tables of an audit in a SQL engine, which runs the queries of :mod:`bide.pipelines.report.queries`.

    The tables have the columns of :data:`COLUMNS` or :data:`OPTIONAL_COLUMNS`, renamed by :data:`RENAMED_COLUMNS`.
    Times are whole numbers of microseconds since the Unix epoch.
    """

    @property
    def folder(self) -> str:
        """The folder of the tables."""
        ...

    @property
    def names(self) -> Mapping[str, str]:
        """The tables that exist, each with its name in queries."""
        ...

    def define(self, query: str, **values: Sequence[str]) -> str:
        """Define a table by a query with parameters such as ``:targets``, and return its name in queries."""
        ...

    def rows(self, query: str, **values: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of a query with parameters."""
        ...


def check_folder(folder: str) -> None:
    """Check, without Spark, that a folder has tables.

    Raises:
        InvalidInputError: the folder does not exist, cannot be read, or has none of the tables.
    """
    if all(files_of(folder, name) is None for name in COLUMNS):
        wanted = ", ".join(COLUMNS)
        raise InvalidInputError(
            f"the folder {folder} has no table of an audit ({wanted}): name the folder that "
            "bide.pipelines.audit.run.run(...) writes to"
        )


def check_columns(place: str, name: str, found: Collection[str]) -> None:
    """Check that a table has all columns that are read.

    Args:
        place: the folder of the table.
        name: the name of the table.
        found: its columns.

    Raises:
        InvalidColumnError: the table lacks a column.
    """
    missing = [column for column in ALL_COLUMNS[name] if column not in found]
    if missing:
        raise InvalidColumnError(
            f"the table {place} has no column {', '.join(missing)}, so an audit did not write it: name another folder"
        )


def files_of(folder: str, name: str) -> list[fs.FileInfo] | None:
    """The files of a table; None if there is no table. Only Delta and Iceberg tables can have no files and no rows.

    Raises:
        InvalidInputError: the folder does not exist, or cannot be read, or the package for the format of its tables is
            not installed.
    """
    with _opened(folder) as (files, root):
        table = f"{root}/{name}"
        if (listed := listed_files(files, root, name)) is not None:
            return list(files.get_file_info([f"{table}/{one}" for one in listed]))
        selector = fs.FileSelector(table, allow_not_found=True, recursive=True)
        found = [one for one in files.get_file_info(selector) if one.is_file and not is_below_hidden(one.path, root)]
        return found or None


def spark_paths(folder: str, name: str) -> list[str] | None:
    """The URIs from which Spark reads a table; None if there is no table.

    They are those of its files for Delta and Iceberg tables, and that of its folder for others.

    Raises:
        InvalidInputError: see :func:`files_of`.
    """
    with _opened(folder) as (files, root):
        if (listed := listed_files(files, root, name)) is not None:
            return [spark_uri(folder, name, one) for one in listed]
    return None if files_of(folder, name) is None else [spark_uri(folder, name)]


def runnable_query(folder: str, name: str, query: str) -> str:
    """A query of a table that readers of the report can run.

    It is Spark SQL, or a Python program for a Delta or Iceberg table.

    Args:
        folder: the folder of the tables.
        name: the name of the table.
        query: the query, in SQL that Spark and DuckDB have in common, with ``{table}`` for the name of the table.
    """
    with _opened(folder) as (files, root):
        opened = ""
        if is_iceberg_audit(files, root):
            opened = _OPENED_ICEBERG.format(uri=catalog_uri(str(Path(root).absolute())), name=name)
        elif is_delta_table(files, f"{root}/{name}"):
            opened = _OPENED_DELTA.format(place=str(Path(root, name).absolute()))
    if opened:
        return _PROGRAM.format(opened=opened, name=name, query=query.format(table=name))
    place = escape_pattern_characters(spark_uri(folder, name)).replace("`", "``")
    return query.format(table=f"parquet.`{place}`")


@contextmanager
def _opened(folder: str) -> Iterator[tuple[fs.FileSystem, str]]:
    """The file system of a folder, and its path there."""
    try:
        files, root = fs.FileSystem.from_uri(folder) if "://" in folder else (fs.LocalFileSystem(), folder)
        if files.get_file_info(root).type != fs.FileType.Directory:
            raise InvalidInputError(f"there is no folder {folder}: name the folder that the audit writes to")
        yield files, root.rstrip("/")
    except (ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"the folder {folder} cannot be read: {error}; name another folder") from error
