"""Small audits in this process, with Arrow and DuckDB.

A :mod:`bide.pipelines.audit.storage` reads and writes the tables, and DuckDB computes them. A round computes the
messages that have new facts, as in :mod:`bide.pipelines.audit.refresh`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import compute as pc

from bide.pipelines.audit import merging, queries
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
    table_of_rows,
    with_batch,
)
from bide.pipelines.audit.fact_rows import fact_schema, rows_of
from bide.pipelines.audit.folder import Folder, Note
from bide.pipelines.audit.id_index import IDS_SCHEMA, IdIndex
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.reading import FactReader
from bide.pipelines.audit.round_work import RoundWork
from bide.pipelines.audit.storage import open_storage
from bide.pipelines.audit.unfinished_work import BatchKey
from bide.pipelines.memory_database import memory_database
from bide.streams.range_reader import OffsetRange

if TYPE_CHECKING:
    import duckdb

_MESSAGES: Final = "messages"
_KEY_SCHEMA: Final = pa.schema([("day", pa.date32()), (BATCH, pa.int64())])
_MACROS: Final = """
    create macro unix_micros(moment) as epoch_us(moment);
    create macro timestamp_micros(number) as make_timestamp(cast(number as bigint));
"""


class _DuckdbForms:
    unnest = "unnest"

    def last_due(self, waiting: str) -> str:
        return f"list_max(list_transform({waiting}, lambda one: one.due))"

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
        folder = self._folder
        with memory_database() as database:
            tables = _Tables(database)
            tables.add("parts", self._storage.read(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
            overdue = [(day, batch) for day, batch in tables.rows(queries.newly_overdue("parts", now=now))]
            work = RoundWork.of(folder, notes, overdue=overdue, batches=self._storage.batches)
            days, failed = work.days, work.days_with_failures
            if days:
                self._refresh_messages(tables, work, IdIndex(folder, database), now=now)
                if work.fresh["delivered"]:
                    self._refresh_lateness(tables, work.fresh["delivered"])
                if failed:
                    tables.add("failed", self._storage.read("failed", arrow_schema(FACT_COLUMNS["failed"]), failed))
                    parts = tables.table(queries.failures_parts("failed"), arrow_schema(FAILURES_PARTS_COLUMNS))
                    self._storage.replace_days(parts, FAILURES_STATE, failed)
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

    def _refresh_messages(self, tables: _Tables, work: RoundWork, index: IdIndex, *, now: datetime) -> None:
        """Refresh the table of messages, and the counts of pending messages."""
        storage, days = self._storage, work.days_with_facts
        for table, columns in FACT_COLUMNS.items():
            tables.add(f"new_{table}", storage.read_batches(table, arrow_schema(columns), work.fresh[table]))
        each = (f"select message_id, day from new_{table} where message_id is not null" for table in FACT_COLUMNS)
        tables.create("ids", f"select distinct * from ({' union all '.join(each)})")
        files = self._files_with(tables, index, days)
        for table, columns in FACT_COLUMNS.items():
            tables.add(f"old_{table}", storage.read_files(table, with_batch(arrow_schema(columns)), files[table]))
            tables.add_batches("fresh", work.fresh[table])
            others = f"old_{table} anti join fresh using (day, {BATCH}) semi join ids using (message_id, day)"
            tables.create(f"all_{table}", f"select * from new_{table} union all by name select * from {others}")
        computed = queries.messages(*(f"all_{table}" for table in FACT_COLUMNS), now=now, forms=_FORMS)

        sizes = {day: storage.batches(_MESSAGES, day) for day in days}
        number = 1 + max((one for some in sizes.values() for one in some), default=-1)
        merged = {(day, one) for day, some in sizes.items() for one in merging.too_many(some)}
        schema = with_batch(MESSAGES_SCHEMA)
        tables.add("found", storage.read_files(_MESSAGES, _KEY_SCHEMA, files[_MESSAGES]))
        found = {(day, one) for day, one in tables.rows(f"select distinct day, {BATCH} from found")}
        replaced = found | work.to_rewrite | merged
        tables.add("replaced", storage.read_batches(_MESSAGES, MESSAGES_SCHEMA, replaced))
        tables.add_batches("merged", merged)
        tables.create(
            "unchanged",
            f"select replaced.* replace (if(merged.day is null, replaced.{BATCH}, {number}) as {BATCH}) from replaced "
            f"left join merged using (day, {BATCH}) anti join ids using (message_id, day)",
        )
        unchanged = queries.mark_overdue("unchanged", schema.names, now=now, forms=_FORMS)
        together = tables.table(
            f"select *, {number} as {BATCH} from ({computed}) union all by name {unchanged}", schema
        )
        touched = replaced | {(day, number) for day in days}
        self._folder.begin_work(touched)
        storage.replace_batches(together, _MESSAGES, touched)
        tables.add(_MESSAGES, together)
        parts = tables.table(
            queries.pending_parts(_MESSAGES, now=now, forms=_FORMS), arrow_schema(PENDING_PARTS_COLUMNS)
        )
        storage.replace_batches(parts, PENDING_STATE, touched)

    def _files_with(self, tables: _Tables, index: IdIndex, days: Collection[date]) -> dict[str, list[str]]:
        """The files of facts and of messages that have any of the messages in the table ``ids``, by table."""
        found: dict[str, list[str]] = {table: [] for table in (*FACT_COLUMNS, _MESSAGES)}
        for day in sorted(days):
            ids = tables.table(f"select message_id from ids where day = date '{day}'", IDS_SCHEMA)
            wanted = index.digests_of(ids.to_batches())
            for table, with_them in found.items():
                files = self._storage.files(table, day)
                index.prune(table, day, files)
                with_them += index.files_with(wanted, table, files)
        return found

    def _refresh_lateness(self, tables: _Tables, fresh: Collection[BatchKey]) -> None:
        """Refresh the table of lateness, for the minutes in which newly delivered messages were due."""
        storage, days = self._storage, {day for day, _ in fresh}
        key = "minute, target, day"
        tables.create("minutes", f"select distinct {key} from ({queries.with_due_minute('new_delivered')})")
        ((first, last),) = tables.rows("select min(minute), max(minute) from minutes")
        if first is None:
            return
        span = (first.replace(tzinfo=UTC), last.replace(tzinfo=UTC) + timedelta(minutes=1))
        files = [file for day in days for file in storage.files("delivered", day)]
        delivered = storage.read_files("delivered", arrow_schema(FACT_COLUMNS["delivered"]), files, due=span)
        tables.add("delivered", delivered)
        tables.add("lateness", storage.read("lateness", arrow_schema(LATENESS_COLUMNS), days))
        same = " and ".join(f"fact.{name} is not distinct from minutes.{name}" for name in key.split(", "))
        with_minute = queries.with_due_minute("delivered")
        tables.create(
            "again", f"select fact.* exclude (minute) from ({with_minute}) as fact semi join minutes on {same}"
        )
        unchanged = f"select fact.* from lateness as fact anti join minutes on {same}"
        late = tables.table(
            f"{queries.lateness('again')} union all by name {unchanged}", arrow_schema(LATENESS_COLUMNS)
        )
        storage.replace_days(late, "lateness", days)


class _Tables:
    """Arrow tables that are registered in a DuckDB database."""

    def __init__(self, database: duckdb.DuckDBPyConnection) -> None:
        self._database = database
        self._database.execute(_MACROS)

    def add(self, name: str, rows: pa.Table) -> None:
        """Add or replace a table."""
        schema = pa.schema([one.with_type(_without_zone(one.type)) for one in rows.schema])
        self._database.register(name, rows.cast(schema))

    def add_batches(self, name: str, batches: Collection[BatchKey]) -> None:
        """Add or replace a table with days and numbers of batches."""
        self.add(name, table_of_rows(sorted(batches), _KEY_SCHEMA))

    def create(self, name: str, query: str) -> None:
        """Add or replace a table with the result of a query."""
        self._database.execute(f"create or replace temporary table {name} as {query}")

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
