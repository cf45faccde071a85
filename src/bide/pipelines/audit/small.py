"""Small audits in this process, with Arrow and DuckDB.

A :mod:`bide.pipelines.audit.storage` reads and writes the tables, and DuckDB computes them. A round computes the
messages that have new facts, as in :mod:`bide.pipelines.audit.refresh`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
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
from bide.pipelines.audit.table_files import TableFile, sizes_of_batches
from bide.pipelines.audit.unfinished_work import BatchKey
from bide.pipelines.engine import NeedsSparkError
from bide.pipelines.memory_database import memory_database
from bide.runtime.wording import in_bytes
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
        largest: the largest size in bytes of the files with earlier messages that a round reads; None for any size.
    """

    def __init__(self, folder: Folder, *, largest: int | None = None) -> None:
        self._folder = folder
        self._largest = largest
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
        """Compute the tables again for messages with new facts, and for messages that have become overdue.

        After an interruption, a refresh with the same notes has the same result.

        Args:
            notes: the notes of batches whose facts are new.
            now: the time until which the streams were read.

        Returns:
            The days that were written.

        Raises:
            NeedsSparkError: the files with earlier messages are too large.
        """
        folder = self._folder
        with memory_database() as database:
            tables = _Tables(database)
            tables.add("parts", self._storage.read(PENDING_STATE, arrow_schema(PENDING_PARTS_COLUMNS)))
            overdue = [(day, batch) for day, batch in tables.rows(queries.newly_overdue("parts", now=now))]
            work = RoundWork.of(folder, notes, overdue=overdue, batches=self._batches)
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
            if failed or not folder.has("failures"):
                tables.add("parts", self._storage.read(FAILURES_STATE, arrow_schema(FAILURES_PARTS_COLUMNS)))
                query = f'{queries.failures("parts")} order by recent desc, count desc, "group" nulls first'
                self._storage.replace(tables.table(query, arrow_schema(FAILURES_COLUMNS)), "failures")
        folder.finish_work()
        return days

    def _batches(self, table: str, day: date) -> Collection[int]:
        return sizes_of_batches(self._storage.files(table, day))

    def compact(self, days: Collection[date]) -> None:
        """Merge the small batches of facts of these days."""
        self._storage.compact(days)

    def pending(self) -> tuple[int, int]:
        """The number of pending messages, and how many of them are overdue."""
        rows = self._storage.read("pending", arrow_schema(PENDING_COLUMNS))
        return pc.sum(rows.column("count")).as_py() or 0, pc.sum(rows.column("overdue")).as_py() or 0

    def _refresh_messages(self, tables: _Tables, work: RoundWork, index: IdIndex, *, now: datetime) -> None:
        """Refresh the table of messages, and the counts of pending messages."""
        for table, columns in FACT_COLUMNS.items():
            tables.add(f"new_{table}", self._read_batches(table, arrow_schema(columns), work.fresh[table]))
        each = (f"select message_id, day from new_{table} where message_id is not null" for table in FACT_COLUMNS)
        tables.create("ids", f"select distinct * from ({' union all '.join(each)})")
        found = self._find_earlier(tables, work, index)
        self._add_facts(tables, work, found)
        computed = queries.messages(*(f"all_{table}" for table in FACT_COLUMNS), now=now, forms=_FORMS)

        number, schema = found.number, with_batch(MESSAGES_SCHEMA)
        replaced = found.batches | work.to_rewrite | found.merged
        tables.add("replaced", self._read_batches(_MESSAGES, MESSAGES_SCHEMA, replaced))
        tables.add_batches("merged", found.merged)
        tables.create(
            "unchanged",
            f"select replaced.* replace (if(merged.day is null, replaced.{BATCH}, {number}) as {BATCH}) from replaced "
            f"left join merged using (day, {BATCH}) anti join ids using (message_id, day)",
        )
        unchanged = queries.mark_overdue("unchanged", schema.names, now=now, forms=_FORMS)
        written = tables.table(f"select *, {number} as {BATCH} from ({computed}) union all by name {unchanged}", schema)
        touched = replaced | {(day, number) for day in work.days_with_facts}
        self._folder.begin_work(touched)
        self._storage.replace_batches(written, _MESSAGES, touched)
        tables.add(_MESSAGES, written)
        parts = tables.table(
            queries.pending_parts(_MESSAGES, now=now, forms=_FORMS), arrow_schema(PENDING_PARTS_COLUMNS)
        )
        self._storage.replace_batches(parts, PENDING_STATE, touched)

    def _find_earlier(self, tables: _Tables, work: RoundWork, index: IdIndex) -> _Earlier:
        """Find what the tables have of the messages in the table ``ids``.

        Raises:
            NeedsSparkError: the files are too large.
        """
        found = _Earlier()
        size = 0
        for day in sorted(work.days):
            messages = self._storage.files(_MESSAGES, day)
            sizes = sizes_of_batches(messages)
            if day in work.days_with_facts:
                listed = {**{table: self._storage.files(table, day) for table in FACT_COLUMNS}, _MESSAGES: messages}
                files = self._files_with(tables, work, index, day, listed)
                for table in FACT_COLUMNS:
                    found.facts[table] += [one.path for one in files[table]]
                    size += sum(one.size for one in files[table])
                found.batches |= {(day, one.first) for one in files[_MESSAGES]}
                found.merged |= {(day, one) for one in merging.to_merge(sizes)}
                found.number = max(found.number, 1 + max(sizes, default=-1))
            replaced = found.batches | work.to_rewrite | found.merged
            size += sum(some for one, some in sizes.items() if (day, one) in replaced)
        if self._largest is not None and size > self._largest:
            most = in_bytes(self._largest)
            raise NeedsSparkError(f"the files with earlier facts have {in_bytes(size)}, more than {most}")
        return found

    def _files_with(
        self, tables: _Tables, work: RoundWork, index: IdIndex, day: date, listed: Mapping[str, Collection[TableFile]]
    ) -> dict[str, list[TableFile]]:
        """The other files of a day that have any of the messages in the table ``ids``, by table.

        Args:
            listed: all files of the day, by table.
        """
        ids = tables.table(f"select message_id from ids where day = date '{day}'", IDS_SCHEMA)
        wanted = index.digests_of_ids(ids.to_batches())
        found = {}
        for table, files in listed.items():
            index.prune(table, day, files)
            new = work.fresh.get(table, ())
            others = (one for one in files if not all((day, batch) in new for batch in one.batches))
            found[table] = index.files_with(wanted, table, others)
        return found

    def _add_facts(self, tables: _Tables, work: RoundWork, found: _Earlier) -> None:
        """Add tables ``all_*`` with all facts of the messages in the table ``ids``."""
        for table, columns in FACT_COLUMNS.items():
            tables.create(f"all_{table}", f"select * from new_{table}")
            tables.add_batches("fresh", work.fresh[table])
            for path in found.facts[table]:
                # One after the other, because most rows of a file are those of other messages.
                tables.add("file", self._storage.read_files(table, with_batch(arrow_schema(columns)), [path]))
                others = f"file anti join fresh using (day, {BATCH}) semi join ids using (message_id, day)"
                tables.insert(f"all_{table}", f"select * from {others}")

    def _read_batches(self, table: str, schema: pa.Schema, batches: Collection[BatchKey]) -> pa.Table:
        """Read the rows of these batches, with a column ``batch``."""
        found = [with_batch(schema).empty_table()]
        for day in sorted({day for day, _ in batches}):
            numbers = {number for that, number in batches if that == day}
            files = [one.path for one in self._storage.files(table, day) if not numbers.isdisjoint(one.batches)]
            rows = self._storage.read_files(table, with_batch(schema), files)
            found.append(rows.filter(pc.is_in(rows.column(BATCH), pa.array(numbers, pa.int64()))))
        return pa.concat_tables(found)

    def _refresh_lateness(self, tables: _Tables, fresh: Collection[BatchKey]) -> None:
        """Refresh the table of lateness, for the minutes in which newly delivered messages were due."""
        storage, days = self._storage, {day for day, _ in fresh}
        key = ("minute", "target", "day")
        new = queries.with_due_minute("new_delivered")
        tables.create("minutes", f"select distinct {', '.join(key)} from ({new})")
        ((first, last),) = tables.rows("select min(minute), max(minute) from minutes")
        if first is None:
            return
        span = (first.replace(tzinfo=UTC), last.replace(second=59, microsecond=999_999, tzinfo=UTC))
        schema = arrow_schema(FACT_COLUMNS["delivered"])
        tables.add("delivered", schema.empty_table())
        tables.create("again", "select * from delivered")
        same = " and ".join(f"fact.{name} is not distinct from minutes.{name}" for name in key)
        of_minutes = f"({queries.with_due_minute('delivered')}) as fact semi join minutes on {same}"
        for path in (one.path for day in sorted(days) for one in storage.files("delivered", day)):
            # One after the other, because most rows of a file may be of other minutes.
            tables.add("delivered", storage.read_files("delivered", schema, [path], due=span))
            tables.insert("again", f"select fact.* exclude (minute) from {of_minutes}")
        tables.add("lateness", storage.read("lateness", arrow_schema(LATENESS_COLUMNS), days))
        unchanged = f"select fact.* from lateness as fact anti join minutes on {same}"
        late = tables.table(
            f"{queries.lateness('again')} union all by name {unchanged}", arrow_schema(LATENESS_COLUMNS)
        )
        storage.replace_days(late, "lateness", days)


@dataclass(slots=True)
class _Earlier:
    """What the tables have of the messages of a round.

    Attributes:
        facts: files of facts, by table.
        batches: the batches of messages.
        merged: small batches of messages to merge into the new one.
        number: the number of the new batch.
    """

    facts: dict[str, list[str]] = field(default_factory=lambda: {table: [] for table in FACT_COLUMNS})
    batches: set[BatchKey] = field(default_factory=set)
    merged: set[BatchKey] = field(default_factory=set)
    number: int = 0


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

    def insert(self, name: str, query: str) -> None:
        """Append the result of a query to a table."""
        self._database.execute(f"insert into {name} by name {query}")

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
