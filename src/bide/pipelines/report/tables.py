"""Tables of an audit that a report reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyarrow import ArrowInvalid, fs
from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.errors import InvalidColumnError, InvalidInputError
from bide.pipelines.formats import for_spark, to_read

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

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

OPTIONAL: Final[Mapping[str, Mapping[str, str]]] = {
    "undecodable": {"stream": "string", "offset": "bigint", "reason": "string", "seen": "timestamp"},
    "occurrences": {"target": "string", "due": "timestamp", "outcome": "string", "lateness_ms": "double"},
    "schedules_pending": {"target": "string", "due_hour": "timestamp", "count": "bigint", "overdue": "bigint"},
}
"""The tables that exist only if there are undecodable messages, or a schedule log."""

_ALL: Final = {**COLUMNS, **OPTIONAL}

_NAMES: Final = ("target", "type", "group", "endpoint", "exception")


def read(spark: SparkSession, folder: str) -> dict[str, DataFrame]:
    """Read the tables that exist, each with the columns of :data:`COLUMNS` or :data:`OPTIONAL`.

    Args:
        folder: a path, or a URI that Spark and Arrow support.

    Raises:
        InvalidInputError: see :func:`check`.
        InvalidColumnError: a table lacks a column.
    """
    check(folder)
    return {name: one for name in _ALL if (one := _read(spark, folder, name)) is not None}


def check(folder: str) -> None:
    """Check, without Spark, that a folder has tables.

    Raises:
        InvalidInputError: the folder does not exist, cannot be read, or has none of the tables.
    """
    if not any(_has_files(folder, name) for name in COLUMNS):
        wanted = ", ".join(COLUMNS)
        raise InvalidInputError(
            f"the folder {folder} has no table of an audit ({wanted}): name the folder that "
            "bide.pipelines.audit.run.run(...) writes to"
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
            f"the table {place} has no column {', '.join(missing)}, so an audit did not write it: name another folder"
        )
    return rows.select(*(_column(rows, column, kind) for column, kind in columns.items()))


def _column(rows: DataFrame, column: str, kind: str) -> Column:
    value = rows[column].cast(kind)
    # An empty text instead of null, so that unknown names form one group.
    return (F.coalesce(value, F.lit("")) if column in _NAMES else value).alias(column)


def _has_files(folder: str, name: str) -> bool:
    """Whether a table has any file. Reading an empty folder is an error in Spark."""
    try:
        files, root = fs.FileSystem.from_uri(folder) if "://" in folder else (fs.LocalFileSystem(), folder)
        if files.get_file_info(root).type != fs.FileType.Directory:
            raise InvalidInputError(f"there is no folder {folder}: name the folder that the audit writes to")
        selector = fs.FileSelector(f"{root.rstrip('/')}/{name}", allow_not_found=True, recursive=True)
        return any(one.is_file and not _hidden(one.path, root) for one in files.get_file_info(selector))
    except (ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"the folder {folder} cannot be read: {error}; name another folder") from error


def _hidden(path: str, root: str) -> bool:
    """Whether Spark ignores a file."""
    return any(part.startswith(("_", ".")) for part in path.removeprefix(root).split("/"))
