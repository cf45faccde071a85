"""Small audits in this process, with Arrow and DuckDB.

Arrow reads and writes the files, and DuckDB computes the tables. A round computes all messages of each day that has new
facts. (With Spark, a round computes only the messages that have new facts.)
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Sequence
from datetime import date, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import parquet

from bide.pipelines.audit import merging, queries
from bide.pipelines.audit.columns import (
    APPENDED_TABLES,
    FACT_COLUMNS,
    FAILURES_COLUMNS,
    FAILURES_PARTS_COLUMNS,
    FAILURES_STATE,
    LATENESS_COLUMNS,
    MESSAGES_SCHEMA,
    PENDING_COLUMNS,
    PENDING_PARTS_COLUMNS,
    PENDING_STATE,
    TABLES_BY_SOURCE,
    TIMESTAMP,
    UNDECODABLE,
    arrow_schema,
    table_of_rows,
)
from bide.pipelines.audit.fact_rows import fact_schema, rows_of
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.reading import FactReader
from bide.pipelines.formats import is_hidden
from bide.pipelines.memory_database import memory_database
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    import duckdb

_NEW_FILE: Final = "_state/new.parquet"
_MESSAGES: Final = "messages"
_MACROS: Final = """
    create macro unix_micros(moment) as epoch_us(moment);
    create macro timestamp_micros(number) as make_timestamp(cast(number as bigint));
"""


class _DuckdbForms:
    unnest = "unnest"

    def struct(self, **fields: str) -> str:
        pairs = ", ".join(f"'{name}': {value}" for name, value in fields.items())
        return f"{{{pairs}}}"

    def list_of_structs(self, **fields: str) -> str:
        order = ", ".join(f"{value} nulls first" for value in fields.values())
        return f"list({self.struct(**fields)} order by {order})"


_FORMS: Final = _DuckdbForms()


class SmallAudit:
    """Engine for rounds in this process.

    Args:
        folder: a folder on this machine.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def append(self, reader: FactReader, ranges: Sequence[OffsetRange], batch: int) -> tuple[dict[str, int], set[date]]:
        """Append the facts of a batch. Returns the number of rows by table, and their days."""
        read = chain.from_iterable(map(reader.read, ranges))
        facts = pa.Table.from_batches(read, fact_schema(reader.source))
        counts: dict[str, int] = {}
        days: set[date] = set()
        for table in (*TABLES_BY_SOURCE[reader.source], UNDECODABLE):
            rows = rows_of(facts, table)
            place = f"{UNDECODABLE}/source={reader.source}" if table == UNDECODABLE else table
            for day, some in _by_day(rows):
                self._write(some, place, f"day={day}", f"batch={batch}")
                days.add(day)
            if rows.num_rows:
                counts[table] = rows.num_rows
        return counts, days

    def refresh(self, notes: Collection[Note], *, now: datetime) -> set[date]:
        """Compute the tables again for the days of new facts, and of messages that have become overdue.

        After an interruption, a refresh with the same notes has the same result.

        Args:
            notes: the notes of batches whose facts are new.
            now: the time until which the streams were read.

        Returns:
            The days that were written.
        """
        folder, unfinished = self._folder, self._folder.unfinished_work()
        days = {day for note in notes if any(map(note.rows.get, FACT_COLUMNS)) for day in note.days}
        days |= unfinished.days | {day for day, _ in unfinished.batches}
        with memory_database() as database:
            tables = _Tables(database)
            tables.add("parts", self._read_all(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
            days |= {row[0] for row in tables.rows(queries.newly_overdue("parts", now=now))}
            if days:
                self._compute(tables, days, now=now)
            if days or not folder.has("pending"):
                tables.add("parts", self._read_all(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
                query = f"{queries.pending('parts')} order by due_hour nulls first, target nulls first"
                self._replace(tables.table(query, arrow_schema(PENDING_COLUMNS)), "pending")
            if days or not folder.has("failures"):
                tables.add("parts", self._read_all(FAILURES_STATE, arrow_schema(FAILURES_PARTS_COLUMNS)))
                query = f'{queries.failures("parts")} order by recent desc, count desc, "group" nulls first'
                self._replace(tables.table(query, arrow_schema(FAILURES_COLUMNS)), "failures")
        folder.finish_work()
        return days

    def compact(self, days: Collection[date]) -> None:
        """Merge the small batches of facts of these days."""
        for table, day, batches in merging.facts_to_merge(self._folder, days):
            schema = arrow_schema(APPENDED_TABLES[table])
            places = [posixpath.join(table, f"day={day}", f"batch={one}") for one in batches]
            rows = pa.concat_tables([self._read(place, day, schema) for place in places])
            if self._folder.exists(merged := self._folder.path(merging.MERGED_FOLDER)):
                self._folder.files.delete_dir(merged)
            self._write(rows.drop_columns(["day"]), merging.MERGED_FOLDER)
            merging.replace_batches(self._folder, table, day, batches)

    def pending(self) -> tuple[int, int]:
        """The number of pending messages, and how many of them are overdue."""
        rows = self._read("pending", None, arrow_schema(PENDING_COLUMNS))
        return pc.sum(rows.column("count")).as_py() or 0, pc.sum(rows.column("overdue")).as_py() or 0

    def _compute(self, tables: _Tables, days: Collection[date], *, now: datetime) -> None:
        """Compute the messages, their lateness and the failures of whole days."""
        folder = self._folder
        for table, columns in FACT_COLUMNS.items():
            schema = arrow_schema(columns)
            tables.add(table, pa.concat_tables([schema.empty_table(), *self._days_of(table, days, schema)]))
        computed = tables.table(queries.messages(*FACT_COLUMNS, now=now, forms=_FORMS), MESSAGES_SCHEMA)
        replaced = {(day, one) for day in days for one in folder.batches(_MESSAGES, day)}
        number = 1 + max((one for _, one in replaced), default=-1)
        folder.begin_work(replaced | {(day, number) for day in days})
        self._replace_days(computed, _MESSAGES, days, batch=number)
        tables.add(_MESSAGES, computed.append_column(BATCH, pa.repeat(pa.scalar(number), computed.num_rows)))
        parts = tables.table(
            queries.pending_parts(_MESSAGES, now=now, forms=_FORMS), arrow_schema(PENDING_PARTS_COLUMNS)
        )
        self._replace_days(parts.drop_columns([BATCH]), PENDING_STATE, days, batch=number)
        late = tables.table(queries.lateness("delivered"), arrow_schema(LATENESS_COLUMNS))
        self._replace_days(late, "lateness", days)
        failed = tables.table(queries.failures_parts("failed"), arrow_schema(FAILURES_PARTS_COLUMNS))
        self._replace_days(failed, FAILURES_STATE, days)

    # -- Files

    def _read_all(self, table: str, schema: pa.Schema) -> pa.Table:
        """Read a table of all days. Rows have the number of their batch if the schema has that column."""
        days = (
            name.partition("=")[2] for name in self._folder.entries(self._folder.path(table)) if name.startswith("day=")
        )
        found = self._days_of(table, map(date.fromisoformat, days), schema)
        return pa.concat_tables([schema.empty_table(), *found])

    def _days_of(self, table: str, days: Collection[date] | Iterator[date], schema: pa.Schema) -> Iterator[pa.Table]:
        for day in days:
            place = f"{table}/day={day}"
            yield self._read(place, day, schema)
            for batch in self._folder.batches(table, day):
                yield self._read(f"{place}/batch={batch}", day, schema, batch=batch)

    def _read(self, place: str, day: date | None, schema: pa.Schema, *, batch: int = 0) -> pa.Table:
        """Read the files in a folder, and add the columns ``day`` and ``batch`` if the schema has them."""
        named = {"day": (pa.date32(), day), BATCH: (pa.int64(), batch)}
        stored = [one for one in schema if one.name not in named]
        found = [schema.empty_table()]
        for name in self._folder.entries(self._folder.path(place)):
            if is_hidden(name) or not name.endswith(".parquet"):
                continue
            with self._folder.files.open_input_file(self._folder.path(place, name)) as file:
                # Spark writes times as INT96, which Arrow would read as nanoseconds.
                whole = parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")
                rows = whole.read(columns=[one.name for one in stored])
            columns = {one.name: rows.column(one.name).cast(one.type) for one in stored}
            columns |= {one: pa.repeat(pa.scalar(value, kind), rows.num_rows) for one, (kind, value) in named.items()}
            found.append(pa.table([columns[one.name] for one in schema], schema=schema))
        return pa.concat_tables(found)

    def _replace_days(self, rows: pa.Table, table: str, days: Collection[date], *, batch: int | None = None) -> None:
        """Replace all rows of these days."""
        found = dict(_by_day(rows))
        for day in days:
            self._replace(found.get(day), f"{table}/day={day}", *(() if batch is None else (f"batch={batch}",)))

    def _replace(self, rows: pa.Table | None, place: str, *below: str) -> None:
        """Replace a folder with one file, in the subfolder *below* if given. Without rows, only delete the folder.

        File names are never reused, so that :meth:`Folder.unfinished_work` can see which days have changed.
        """
        if self._folder.exists(old := self._folder.path(place)):
            self._folder.files.delete_dir(old)
        if rows is not None:
            self._write(rows, place, *below)

    def _write(self, rows: pa.Table, *parts: str) -> None:
        """Write a file into a folder atomically."""
        new, folder = self._folder.path(_NEW_FILE), self._folder.path(*parts)
        parquet.write_table(rows, new, filesystem=self._folder.files)
        self._folder.files.create_dir(folder)
        self._folder.files.move(new, posixpath.join(folder, f"part-00000-{uuid4()}.parquet"))


class _Tables:
    """Arrow tables that are registered in a DuckDB database."""

    def __init__(self, database: duckdb.DuckDBPyConnection) -> None:
        self._database = database
        self._database.execute(_MACROS)

    def add(self, name: str, rows: pa.Table) -> None:
        """Add or replace a table."""
        schema = pa.schema([one.with_type(_without_zone(one.type)) for one in rows.schema])
        self._database.register(name, rows.cast(schema))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a result."""
        return self._database.execute(query).fetchall()

    def table(self, query: str, schema: pa.Schema) -> pa.Table:
        """The result of a query, with the columns and types of a schema. DuckDB's times are in UTC."""
        return table_of_rows(self.rows(query), schema)


def _without_zone(kind: pa.DataType) -> pa.DataType:
    """The type without the zone of times: some comparisons of times with a zone need DuckDB's extension ``icu``."""
    if pa.types.is_list(kind):
        return pa.list_(pa.struct([(one.name, _without_zone(one.type)) for one in kind.value_type]))
    return pa.timestamp("us") if kind == TIMESTAMP else kind


def _by_day(rows: pa.Table) -> Iterator[tuple[date, pa.Table]]:
    """The rows of each day, without the column ``day``."""
    for day in pc.unique(rows.column("day")).to_pylist():
        yield day, rows.filter(pc.equal(rows.column("day"), day)).drop_columns(["day"])
