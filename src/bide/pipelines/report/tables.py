"""The audit's tables in a folder, as far as the report reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyarrow import ArrowInvalid, fs
from pyspark.sql import functions

from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.formats import for_spark, to_read

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "messages": {
        "target": "string",
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
"""The tables and columns that are read, with the types that they are read as."""

UNDECODABLE: Final[Mapping[str, str]] = {
    "stream": "string",
    "offset": "bigint",
    "reason": "string",
    "seen": "timestamp",
}
"""Those of the table ``undecodable``, which is there only if something could not be decoded."""

_ALL: Final = {**COLUMNS, "undecodable": UNDECODABLE}

_NAMES: Final = ("target", "group", "endpoint", "exception")


def read(spark: SparkSession, folder: str) -> dict[str, DataFrame]:
    """The tables that are there, each with the columns of :data:`COLUMNS` or :data:`UNDECODABLE`.

    Args:
        folder: a path, or a URI that Spark and Arrow know.

    Raises:
        InvalidInputError: as :func:`check`.
        InvalidColumnError: a table lacks a column.
    """
    check(folder)
    return {name: one for name in _ALL if (one := _read(spark, folder, name)) is not None}


def check(folder: str) -> None:
    """See whether there is anything to read, for which no Spark is needed.

    Raises:
        InvalidInputError: there is no such folder, or it cannot be read, or it has none of the tables.
    """
    if not any(_has_files(folder, name) for name in COLUMNS):
        wanted = ", ".join(COLUMNS)
        raise InvalidInputError(
            f"the folder {folder} has no table of the audit ({wanted}): name the one that 'bide pipeline audit --into' "
            "was given"
        )


def _read(spark: SparkSession, folder: str, name: str) -> DataFrame | None:
    place = for_spark(folder, name)
    if not _has_files(folder, name):
        return None
    rows = spark.read.parquet(to_read(place))
    columns = _ALL[name]
    missing = [column for column in columns if column not in rows.columns]
    if missing:
        raise InvalidColumnError(
            f"the table {place} has no column {', '.join(missing)}: it is none that the audit wrote"
        )
    return rows.select(*(_column(rows, column, kind) for column, kind in columns.items()))


def _column(rows: DataFrame, column: str, kind: str) -> Column:
    value = rows[column].cast(kind)
    # A name that is not known is one name, not none.
    return (functions.coalesce(value, functions.lit("")) if column in _NAMES else value).alias(column)


def _has_files(folder: str, name: str) -> bool:
    """Whether a table has any file: Spark takes an empty folder for an error."""
    try:
        files, root = fs.FileSystem.from_uri(folder) if "://" in folder else (fs.LocalFileSystem(), folder)
        if files.get_file_info(root).type != fs.FileType.Directory:
            raise InvalidInputError(f"there is no folder {folder}: name the one that the audit writes to")
        selector = fs.FileSelector(f"{root.rstrip('/')}/{name}", allow_not_found=True, recursive=True)
        return any(one.is_file and not _hidden(one.path, root) for one in files.get_file_info(selector))
    except (ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"the folder {folder} cannot be read: {error}") from error


def _hidden(path: str, root: str) -> bool:
    """Whether Spark passes a file over."""
    return any(part.startswith(("_", ".")) for part in path.removeprefix(root).split("/"))
