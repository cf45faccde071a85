"""Tables of an audit as Delta tables, read and written with deltalake."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import dataset, fs

from bide.pipelines.audit import merging
from bide.pipelines.audit.columns import (
    APPENDED_TABLES,
    FACT_COLUMNS,
    FAILURES_STATE,
    PENDING_STATE,
    UNDECODABLE,
    arrow_schema,
)
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.delta import import_deltalake, newest_files

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

RETENTION: Final = timedelta(hours=1)
"""How long files and log entries of earlier versions of a table are kept: for queries of these versions."""

CHECKPOINT_INTERVAL: Final = 20
"""The number of versions after which the log gets a checkpoint, and expired log entries are deleted."""

VACUUM_FILES: Final = 20
"""The number of expired files from which they are deleted. A deletion writes two versions."""

FILES_PER_VERSION: Final = 20
"""A look for expired files lists the whole folder of a table. It is due after one version for each of this number of
files, so that its cost for a version stays the same."""

_VACUUMED: Final = "_state/vacuumed.json"
_STAGED: Final = "_state/staged"
_FACTS: Final = (*FACT_COLUMNS, UNDECODABLE)
_TABLES: Final = (
    *(*_FACTS, "messages", "lateness", "pending", "failures", "schedules_pending"),
    *(PENDING_STATE, FAILURES_STATE),
)


class DeltaStorage:
    """See :class:`bide.pipelines.audit.storage.TableStorage`. Each change of a table is a transaction of Delta.

    Batches are rows with a number in the column ``batch``. A storage is for one round.

    Raises:
        InvalidInputError: deltalake is not installed, or does not support the path.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._deltalake = import_deltalake(folder.path())
        self._opened: dict[str, Any] = {}

    def read(self, table: str, schema: pa.Schema, days: Collection[date] | None = None) -> pa.Table:
        if not self._exists(table):
            return schema.empty_table()
        files = self._files_of(table)
        if days is not None:
            files = _of_days(files, days)
        if not files.num_rows:
            return schema.empty_table()
        # Not by deltalake: it prepares each file of the table in Python, those of other days too. And its own file
        # system is in Python: Arrow's threads that still use it at exit abort the process.
        found = dataset.dataset(
            files.column("path").to_pylist(),
            schema=schema,
            format="parquet",
            filesystem=fs.SubTreeFileSystem(self._folder.path(table), fs.LocalFileSystem()),
            partitioning=dataset.partitioning(pa.schema([one for one in schema if one.name == "day"]), flavor="hive"),
        )
        return found.to_table(columns=schema.names)

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        if rows.num_rows:
            self._write(_with(rows, batch=batch), table, mode="append")

    def drop_batch(self, table: str, number: int) -> None:
        if self._folder.exists(staged := self._folder.path(self.staging(table))):
            self._folder.files.delete_dir(staged)
        name, equal = _split(table)
        if self._exists(name):
            self._open(name).delete(_sql({**equal, BATCH: number}))

    def staging(self, table: str) -> str:
        return f"{_STAGED}/{table}"

    def append_staged(self, table: str, batch: int) -> None:
        if not self._folder.exists(staged := self._folder.path(self.staging(table))):
            return
        schema = arrow_schema(APPENDED_TABLES[table]).append(pa.field(BATCH, pa.int64()))
        partitions = pa.schema([schema.field("day"), schema.field(BATCH)])
        found = dataset.dataset(
            staged,
            schema=schema,
            format="parquet",
            filesystem=fs.LocalFileSystem(),
            partitioning=dataset.partitioning(partitions, flavor="hive"),
        )
        self._write(found.scanner().to_reader(), table, mode="append")
        self._folder.files.delete_dir(staged)

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date], *, batch: int | None = None) -> None:
        if batch is not None:
            rows = _with(rows, batch=batch)
        if self._exists(table):
            listed = ", ".join(f"'{day}'" for day in sorted(days))
            self._write(rows, table, mode="overwrite", predicate=f"day in ({listed})")
        elif rows.num_rows:
            self._write(rows, table, mode="append")

    def replace(self, rows: pa.Table, table: str) -> None:
        self._write(rows, table, mode="overwrite")

    def compact(self, days: Collection[date]) -> None:
        if not days:
            return
        for table in filter(self._exists, _FACTS):
            self._merge_small_files(table, days)
        place = self._folder.path(_VACUUMED)
        vacuumed = json.loads(self._folder.read_bytes(place)) if self._folder.exists(place) else {}
        versions = {table: self._vacuum(table, vacuumed.get(table, 0)) for table in filter(self._exists, _TABLES)}
        if versions != vacuumed:
            self._folder.write_json(place, versions)

    def _merge_small_files(self, table: str, days: Collection[date]) -> None:
        """Merge the small files of each of these days that has more than :data:`merging.MAX_BATCHES` of them."""
        files = _of_days(self._files_of(table), days)
        small = files.filter(pc.less(files.column("size_bytes"), merging.SMALL_BYTES)).column("partition.day")
        for day, count in Counter(small.to_pylist()).items():
            if count > merging.MAX_BATCHES:
                self._open(table).optimize.compact([("day", "=", str(day))], target_size=merging.SMALL_BYTES)

    def _vacuum(self, table: str, since: int) -> int:
        """Delete expired files if there are many, some versions after the last look for them.

        Args:
            since: the version at the last look.

        Returns:
            The version at the last look, which may be now.
        """
        opened = self._open(table)
        if opened.version() - since < max(VACUUM_FILES, self._files_of(table).num_rows // FILES_PER_VERSION):
            return since
        # Full, because a write that was killed leaves files that no version names.
        if len(opened.vacuum(full=True)) >= VACUUM_FILES:
            opened.vacuum(dry_run=False, full=True)
        return int(opened.version())

    def _files_of(self, table: str) -> pa.Table:
        """The files of the newest version, with the columns ``path``, ``size_bytes`` and ``partition.day``."""
        return newest_files(self._open(table), self._folder.path(table))

    def _write(self, rows: Any, table: str, *, mode: str, predicate: str | None = None) -> None:
        """Write in one transaction."""
        name, equal = _split(table)
        for column, value in equal.items():
            rows = rows.append_column(column, pa.repeat(pa.scalar(value), rows.num_rows))
        if not self._exists(name):
            self._create(name, rows.schema)
        self._deltalake.write_deltalake(self._open(name), rows, mode=mode, predicate=predicate)

    def _create(self, table: str, schema: pa.Schema) -> None:
        """Create a table in a transaction of its own, so that no folder has files before it is a Delta table."""
        interval = f"interval {int(RETENTION.total_seconds())} seconds"
        self._deltalake.DeltaTable.create(
            self._folder.path(table),
            schema,
            partition_by=[one for one in ("source", "day") if one in schema.names],
            configuration={
                "delta.deletedFileRetentionDuration": interval,
                "delta.logRetentionDuration": interval,
                "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
            },
        )

    def _exists(self, table: str) -> bool:
        is_known = table in self._opened
        return is_known or bool(self._deltalake.DeltaTable.is_deltatable(self._folder.path(table)))

    def _open(self, table: str) -> Any:
        """The newest version of a table. It is loaded once: that reads the names of all its files."""
        if (opened := self._opened.get(table)) is None:
            opened = self._opened[table] = self._deltalake.DeltaTable(self._folder.path(table))
        else:
            opened.update_incremental()
        return opened


def _of_days(files: pa.Table, days: Collection[date]) -> pa.Table:
    """The files of these days."""
    return files.filter(pc.is_in(files.column("partition.day"), pa.array(days, pa.date32())))


def _with(rows: pa.Table, *, batch: int) -> pa.Table:
    """The rows with the column ``batch``."""
    return rows.append_column(BATCH, pa.repeat(pa.scalar(batch, pa.int64()), rows.num_rows))


def _split(table: str) -> tuple[str, dict[str, str]]:
    """The name of a table, and the values of its partition columns."""
    name, _, source = table.partition("/source=")
    return name, {"source": source} if source else {}


def _sql(equal: Mapping[str, str | int]) -> str:
    return " and ".join(f"{name} = {value!r}" for name, value in equal.items())
