"""Tables of facts of a small audit in this process, with DuckDB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa
from pyarrow import fs

from bide.pipelines.audit.columns import FACT_COLUMNS, TIMESTAMP, arrow_schema
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.formats import is_below_hidden, is_uri
from bide.pipelines.listed_files import listed_files
from bide.pipelines.memory_database import memory_database
from bide.pipelines.replay import queries
from bide.pipelines.replay.choices import FAILURE_KEY
from bide.pipelines.small_table import MAX_SMALL_BYTES, read_columns
from bide.runtime.wording import in_bytes

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

_COPIES: Final = ("message_id", "target", "stream", "offset", "layout", "sent", "due")
_ENDS: Final = ("message_id", "queue", "ended", "stream", "offset", "type", "endpoint", "sent", "due")
_READ: Final = {
    "scheduled": (*_COPIES, "scheduled"),
    "delivered": (*_COPIES, "delivered"),
    "processed": _ENDS,
    "failed": (*_ENDS, "kind", "exception", "text", "group"),
}
"""The tables that are read, with their columns."""

_FOUND: Final = (*FAILURE_KEY, "type", "endpoint", "reason", "exception", "text", "group", "sent")
"""The columns of failures that a replay needs."""

_FUNCTIONS: Final = "create macro unix_micros(moment) as epoch_us(moment)"
_PLAIN: Final = pa.timestamp("us")


class FactTables:
    """The tables of facts of an audit.

    Args:
        database: the database.
        size: the size of the files in words, as a reason for this engine.
    """

    def __init__(self, database: duckdb.DuckDBPyConnection, size: str) -> None:
        self.size = size
        self._database = database

    def failures(self, *, earlier: pa.Table | None = None) -> list[dict[str, Any]]:
        """The failures, with the oldest first; see :func:`bide.pipelines.replay.queries.failures`.

        Times are in microseconds since the Unix epoch. The conditions of this process compare columns of text only, so
        other columns are left out.

        Args:
            earlier: failures to leave out, with the columns :data:`bide.pipelines.replay.choices.FAILURE_KEY`.
        """
        new = ""
        if earlier is not None:
            self.add("earlier", earlier)
            same = " and ".join(f"e.{name} = f.{name}" for name in FAILURE_KEY)
            new = f"where not exists (select 1 from earlier as e where {same})"
        times = {name: f"unix_micros(f.{name})" for name in ("failed_at", "sent")}
        selected = ", ".join(times.get(name, f"f.{name}") for name in _FOUND)
        query = f"select {selected} from ({queries.failures('failed', 'processed')}) as f {new} order by f.place"
        return [dict(zip(_FOUND, row, strict=True)) for row in self._database.execute(query).fetchall()]

    def locate(self, chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add ``stream`` and ``offset`` to failures; see :func:`bide.pipelines.replay.queries.located`."""
        texts, times = ("message_id", "queue"), ("failed_at", "sent")
        columns: dict[str, pa.Array] = {name: pa.array([row[name] for row in chosen], pa.string()) for name in texts}
        columns |= {name: pa.array([row[name] for row in chosen], pa.int64()).cast(_PLAIN) for name in times}
        columns["place"] = pa.array(range(len(chosen)), pa.int64())
        self._database.register("chosen", pa.table(columns))
        located = queries.located("chosen", "scheduled", "delivered")
        places = self._database.execute(f"select l.stream, l.offset from ({located}) as l order by l.place").fetchall()
        return [
            {**row, "stream": stream, "offset": offset} for row, (stream, offset) in zip(chosen, places, strict=True)
        ]

    def add(self, name: str, rows: pa.Table) -> None:
        """Add a table."""
        # Comparisons of times with a zone need an extension of DuckDB.
        plain = pa.schema([(one.name, _PLAIN if one.type == TIMESTAMP else one.type) for one in rows.schema])
        self._database.register(name, rows.cast(plain))


@contextmanager
def fact_tables(folder: Folder, *, largest: int | None = MAX_SMALL_BYTES) -> Iterator[FactTables]:
    """The tables of facts that a replay needs, read into memory.

    Args:
        largest: the largest size of their files in bytes; None for any size.

    Raises:
        InvalidInputError: a file is incomplete, or was removed.
        NeedsSparkError: the folder is a URI, the tables are too large, or only Spark can read them.
    """
    if is_uri(folder.place):
        raise NeedsSparkError(f"{folder.place} is a URI")
    files = {name: _files_of(folder, name) for name in _READ}
    size = sum(one.size for some in files.values() for one in some)
    shown = f"the facts of the audit have {in_bytes(size)}"
    if largest is not None and size > largest:
        raise NeedsSparkError(f"{shown}, more than {in_bytes(largest)}")
    room = largest
    try:
        with memory_database() as database:
            database.execute(_FUNCTIONS)
            tables = FactTables(database, shown)
            for name, columns in _READ.items():
                schema = pa.schema([arrow_schema(FACT_COLUMNS[name]).field(column) for column in columns])
                rows = schema.empty_table()
                if files[name]:
                    read, room = read_columns([Path(one.path) for one in files[name]], columns, largest=room)
                    rows = _with_schema(read, name, schema)
                tables.add(name, rows)
            yield tables
    except duckdb.Error as error:
        first = str(error).partition("\n")[0]
        raise NeedsSparkError(f"DuckDB cannot search it ({first})") from error


def _files_of(folder: Folder, table: str) -> list[fs.FileInfo]:
    """The files of a table that Spark reads too."""
    root = folder.path(table)
    if (listed := listed_files(folder.files, folder.path(), table)) is not None:
        return list(folder.files.get_file_info([f"{root}/{one}" for one in listed]))
    found = folder.files.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))
    return [one for one in found if one.is_file and not is_below_hidden(one.path, root)]


def _with_schema(rows: pa.Table, table: str, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, with null for those that an earlier release of bide did not write."""
    columns = []
    for one in schema:
        column = rows.column(one.name) if one.name in rows.column_names else pa.nulls(rows.num_rows, one.type)
        if column.type != one.type:
            raise NeedsSparkError(f"the column {one.name!r} of the table {table!r} is {column.type}")
        columns.append(column)
    return pa.table(columns, schema=schema)
