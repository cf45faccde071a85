"""Small audits in this process, with Arrow and DuckDB.

A :mod:`bide.pipelines.audit.storage` reads and writes the tables, and DuckDB computes them. A round computes all
messages of each day that has new facts. (With Spark, a round computes only the messages that have new facts.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import date, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import compute as pc

from bide.pipelines.audit import queries
from bide.pipelines.audit.columns import (
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
)
from bide.pipelines.audit.fact_rows import fact_schema, rows_of
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.reading import FactReader
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.memory_database import memory_database
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    import duckdb

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
        self._storage = open_storage(folder)

    def append(self, reader: FactReader, ranges: Sequence[OffsetRange], batch: int) -> tuple[dict[str, int], set[date]]:
        """Append the facts of a batch. Returns the number of rows by table, and their days."""
        read = chain.from_iterable(map(reader.read, ranges))
        facts = pa.Table.from_batches(read, fact_schema(reader.source))
        counts: dict[str, int] = {}
        days: set[date] = set()
        for table in (*TABLES_BY_SOURCE[reader.source], UNDECODABLE):
            rows = rows_of(facts, table)
            if rows.num_rows:
                place = f"{UNDECODABLE}/source={reader.source}" if table == UNDECODABLE else table
                self._storage.append(rows, place, batch)
                days.update(pc.unique(rows.column("day")).to_pylist())
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
            tables.add("parts", self._storage.read(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
            days |= {row[0] for row in tables.rows(queries.newly_overdue("parts", now=now))}
            if days:
                self._compute(tables, days, now=now)
            if days or not folder.has("pending"):
                tables.add("parts", self._storage.read(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
                query = f"{queries.pending('parts')} order by due_hour nulls first, target nulls first"
                self._storage.replace(tables.table(query, arrow_schema(PENDING_COLUMNS)), "pending")
            if days or not folder.has("failures"):
                tables.add("parts", self._storage.read(FAILURES_STATE, arrow_schema(FAILURES_PARTS_COLUMNS)))
                query = f'{queries.failures("parts")} order by recent desc, count desc, "group" nulls first'
                self._storage.replace(tables.table(query, arrow_schema(FAILURES_COLUMNS)), "failures")
        folder.finish_work()
        return days

    def compact(self, days: Collection[date]) -> None:
        """Merge the small batches of facts of these days."""
        self._storage.compact(days)

    def pending(self) -> tuple[int, int]:
        """The number of pending messages, and how many of them are overdue."""
        rows = self._storage.read("pending", arrow_schema(PENDING_COLUMNS))
        return pc.sum(rows.column("count")).as_py() or 0, pc.sum(rows.column("overdue")).as_py() or 0

    def _compute(self, tables: _Tables, days: Collection[date], *, now: datetime) -> None:
        """Compute the messages, their lateness and the failures of whole days."""
        folder, storage = self._folder, self._storage
        for table, columns in FACT_COLUMNS.items():
            tables.add(table, storage.read(table, arrow_schema(columns), days))
        computed = tables.table(queries.messages(*FACT_COLUMNS, now=now, forms=_FORMS), MESSAGES_SCHEMA)
        replaced = {(day, one) for day in days for one in folder.batches(_MESSAGES, day)}
        number = 1 + max((one for _, one in replaced), default=-1)
        folder.begin_work(replaced | {(day, number) for day in days})
        storage.replace_days(computed, _MESSAGES, days, batch=number)
        tables.add(_MESSAGES, computed.append_column(BATCH, pa.repeat(pa.scalar(number), computed.num_rows)))
        parts = tables.table(
            queries.pending_parts(_MESSAGES, now=now, forms=_FORMS), arrow_schema(PENDING_PARTS_COLUMNS)
        )
        storage.replace_days(parts.drop_columns([BATCH]), PENDING_STATE, days, batch=number)
        late = tables.table(queries.lateness("delivered"), arrow_schema(LATENESS_COLUMNS))
        storage.replace_days(late, "lateness", days)
        failed = tables.table(queries.failures_parts("failed"), arrow_schema(FAILURES_PARTS_COLUMNS))
        storage.replace_days(failed, FAILURES_STATE, days)


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
        return self._database.sql(query).to_arrow_table().select(schema.names).cast(schema)


def _without_zone(kind: pa.DataType) -> pa.DataType:
    """The type without the zone of times: some comparisons of times with a zone need DuckDB's extension ``icu``."""
    if pa.types.is_list(kind):
        return pa.list_(pa.struct([(one.name, _without_zone(one.type)) for one in kind.value_type]))
    return pa.timestamp("us") if kind == TIMESTAMP else kind
