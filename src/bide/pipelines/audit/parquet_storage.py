"""Tables of an audit as folders of Parquet files, read and written with Arrow."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Iterator
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import fs, parquet

from bide.pipelines.audit import merging
from bide.pipelines.audit.columns import APPENDED_TABLES, arrow_schema
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.table_files import TableFile, files_of_day, is_data_file, parquet_files, partition_of
from bide.pipelines.audit.unfinished_work import BatchKey

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
            names = self._folder.entries(self._folder.path(table))
            return self.read_files(table, schema, [one for one in names if is_data_file(one)])
        if days is None:
            names = self._folder.entries(self._folder.path(table))
            days = [date.fromisoformat(one.removeprefix("day=")) for one in names if one.startswith("day=")]
        files = (parquet_files(self._folder, table, day) for day in days)
        return self.read_files(table, schema, [path for some in files for path, _ in some])

    def files(self, table: str, day: date) -> list[TableFile]:
        return files_of_day(self._folder, table, day)

    def read_files(
        self, table: str, schema: pa.Schema, files: Iterable[str], *, due: tuple[datetime, datetime] | None = None
    ) -> pa.Table:
        rows = (self._read(self._folder.path(table, one), schema, due) for one in files)
        return pa.concat_tables([schema.empty_table(), *rows])

    def replace_batches(self, rows: pa.Table, table: str, batches: Collection[BatchKey]) -> None:
        found = {(day, batch): some for day, more in _by(rows, "day") for batch, some in _by(more, BATCH)}
        for day, batch in batches:
            # File names are never reused, so that Folder.unfinished_work can see which days have changed.
            self._replace(found.get((day, batch)), f"{table}/day={day}/batch={batch}")

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        for day, some in _by(rows, "day"):
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

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date]) -> None:
        found = dict(_by(rows, "day"))
        for day in days:
            self._replace(found.get(day), f"{table}/day={day}")

    def replace(self, rows: pa.Table, table: str) -> None:
        files = self._folder.files
        self._write(rows, table, name=_ONLY_FILE)
        # Spark names its files differently, and leaves folders behind if it is killed.
        for one in files.get_file_info(fs.FileSelector(self._folder.path(table))):
            if one.base_name != _ONLY_FILE:
                (files.delete_file if one.is_file else files.delete_dir)(one.path)

    def compact(self, days: Collection[date]) -> None:
        for table, day, batches in merging.facts_to_merge(self._folder, days):
            files = [one.path for one in self.files(table, day) if one.first in batches]
            rows = self.read_files(table, arrow_schema(APPENDED_TABLES[table]), files)
            if self._folder.exists(merged := self._folder.path(merging.MERGED_FOLDER)):
                self._folder.files.delete_dir(merged)
            self._write(rows.drop_columns(["day"]), merging.MERGED_FOLDER)
            merging.replace_batches(self._folder, table, day, batches)

    def _read(self, path: str, schema: pa.Schema, due: tuple[datetime, datetime] | None) -> pa.Table:
        """Read a file, and add the columns ``day`` and ``batch`` from its path if the schema has them."""
        stored = [one for one in schema if one.name not in ("day", BATCH)]
        with self._folder.files.open_input_file(path) as opened:
            # Spark writes times as INT96 by default, which Arrow would read as nanoseconds.
            file = parquet.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            groups = [one for one in range(file.num_row_groups) if due is None or _may_be_due(file, one, due)]
            rows = file.read_row_groups(groups, columns=[one.name for one in stored])
        columns = {one.name: rows.column(one.name).cast(one.type) for one in stored}
        if "day" in schema.names:
            day = date.fromisoformat(partition_of("day", path))
            columns["day"] = pa.repeat(pa.scalar(day, pa.date32()), rows.num_rows)
        if BATCH in schema.names:
            columns[BATCH] = pa.repeat(pa.scalar(int(partition_of(BATCH, path)), pa.int64()), rows.num_rows)
        return pa.table([columns[one.name] for one in schema], schema=schema)

    def _replace(self, rows: pa.Table | None, place: str) -> None:
        """Replace a folder with one file. Without rows, only delete the folder."""
        if self._folder.exists(old := self._folder.path(place)):
            self._folder.files.delete_dir(old)
        if rows is not None:
            self._write(rows, place)

    def _write(self, rows: pa.Table, *parts: str, name: str | None = None) -> None:
        """Write a file into a folder atomically, by default with a name that was never used."""
        new, folder = self._folder.path(_NEW_FILE), self._folder.path(*parts)
        parquet.write_table(rows, new, filesystem=self._folder.files)
        self._folder.files.create_dir(folder)
        self._folder.files.move(new, posixpath.join(folder, name or f"part-00000-{uuid4()}.parquet"))


def _may_be_due(file: parquet.ParquetFile, group: int, span: tuple[datetime, datetime]) -> bool:
    """Whether a row group may have rows that are due in a span, whose end is included."""
    found = file.metadata.row_group(group).column(file.schema.names.index("due")).statistics
    return found is None or not found.has_min_max or (found.min <= span[1] and found.max >= span[0])


def _by(rows: pa.Table, column: str) -> Iterator[tuple[Any, pa.Table]]:
    """The rows of each value of a column, without the column."""
    for value in pc.unique(rows.column(column)).to_pylist():
        yield value, rows.filter(pc.equal(rows.column(column), value)).drop_columns([column])
