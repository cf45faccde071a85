"""Tables of an audit as folders of Parquet files, read and written with Arrow."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator
from datetime import date
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import fs, parquet

from bide.pipelines.audit import merging
from bide.pipelines.audit.columns import APPENDED_TABLES, arrow_schema
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.formats import is_hidden

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

_NEW_FILE: Final = "_state/new.parquet"
_ONLY_FILE: Final = "part-00000.parquet"


class ParquetStorage:
    """See :class:`bide.pipelines.audit.storage.TableStorage`. Batches are folders, and so are days."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def read(self, table: str, schema: pa.Schema, days: Collection[date] | None = None) -> pa.Table:
        if "day" not in schema.names:
            return self._read(table, None, schema)
        if days is None:
            names = self._folder.entries(self._folder.path(table))
            days = [date.fromisoformat(one.removeprefix("day=")) for one in names if one.startswith("day=")]
        return pa.concat_tables([schema.empty_table(), *self._days_of(table, days, schema)])

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        for day, some in _by_day(rows):
            self._write(some, table, f"day={day}", f"batch={batch}")

    def drop_batch(self, table: str, number: int) -> None:
        for day in self._folder.entries(self._folder.path(table)):
            if self._folder.exists(left := self._folder.path(table, day, f"batch={number}")):
                self._folder.files.delete_dir(left)

    def staging(self, table: str) -> str:
        # Batches take effect when their positions are written, so their files may be in place before.
        return table

    def append_staged(self, table: str, batch: int) -> None:
        pass

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date], *, batch: int | None = None) -> None:
        found = dict(_by_day(rows))
        for day in days:
            # File names are never reused, so that Folder.unfinished_work can see which days have changed.
            self._replace(found.get(day), f"{table}/day={day}", *(() if batch is None else (f"batch={batch}",)))

    def replace(self, rows: pa.Table, table: str) -> None:
        files = self._folder.files
        self._write(rows, table, name=_ONLY_FILE)
        # Spark names its files differently, and leaves folders behind if it is killed.
        for one in files.get_file_info(fs.FileSelector(self._folder.path(table))):
            if one.base_name != _ONLY_FILE:
                (files.delete_file if one.is_file else files.delete_dir)(one.path)

    def compact(self, days: Collection[date]) -> None:
        for table, day, batches in merging.facts_to_merge(self._folder, days):
            schema = arrow_schema(APPENDED_TABLES[table])
            places = [posixpath.join(table, f"day={day}", f"batch={one}") for one in batches]
            rows = pa.concat_tables([self._read(place, day, schema) for place in places])
            if self._folder.exists(merged := self._folder.path(merging.MERGED_FOLDER)):
                self._folder.files.delete_dir(merged)
            self._write(rows.drop_columns(["day"]), merging.MERGED_FOLDER)
            merging.replace_batches(self._folder, table, day, batches)

    def _days_of(self, table: str, days: Collection[date], schema: pa.Schema) -> Iterator[pa.Table]:
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

    def _replace(self, rows: pa.Table | None, place: str, *below: str) -> None:
        """Replace a folder with one file, in the subfolder *below* if given. Without rows, only delete the folder."""
        if self._folder.exists(old := self._folder.path(place)):
            self._folder.files.delete_dir(old)
        if rows is not None:
            self._write(rows, place, *below)

    def _write(self, rows: pa.Table, *parts: str, name: str | None = None) -> None:
        """Write a file into a folder atomically, by default with a name that was never used."""
        new, folder = self._folder.path(_NEW_FILE), self._folder.path(*parts)
        parquet.write_table(rows, new, filesystem=self._folder.files)
        self._folder.files.create_dir(folder)
        self._folder.files.move(new, posixpath.join(folder, name or f"part-00000-{uuid4()}.parquet"))


def _by_day(rows: pa.Table) -> Iterator[tuple[date, pa.Table]]:
    """The rows of each day, without the column ``day``."""
    for day in pc.unique(rows.column("day")).to_pylist():
        yield day, rows.filter(pc.equal(rows.column("day"), day)).drop_columns(["day"])
