"""Tables of an audit as Delta tables, read and written with deltalake."""

from __future__ import annotations

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
from bide.pipelines.delta import import_deltalake

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

RETENTION: Final = timedelta(hours=1)
"""How long files and log entries of earlier versions of a table are kept: for queries of these versions."""

CHECKPOINT_INTERVAL: Final = 20
"""The number of versions after which the log gets a checkpoint, and expired log entries are deleted."""

VACUUM_FILES: Final = 20
"""The number of expired files from which they are deleted. A deletion writes two versions."""

_STAGED: Final = "_state/staged"
_FACTS: Final = (*FACT_COLUMNS, UNDECODABLE)
_TABLES: Final = (
    *(*_FACTS, "messages", "lateness", "pending", "failures", "schedules_pending"),
    *(PENDING_STATE, FAILURES_STATE),
)


class DeltaStorage:
    """See :class:`bide.pipelines.audit.storage.TableStorage`. Each change of a table is a transaction of Delta.

    Batches are rows with a number in the column ``batch``.

    Raises:
        InvalidInputError: deltalake is not installed, or does not support the path.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._deltalake = import_deltalake(folder.path())

    def read(self, table: str, schema: pa.Schema, days: Collection[date] | None = None) -> pa.Table:
        if not self._exists(table):
            return schema.empty_table()
        wanted = None if days is None else pc.field("day").isin(pa.array(days, pa.date32()))
        # deltalake's own file system is in Python: Arrow's threads that still use it at exit abort the process.
        files = fs.SubTreeFileSystem(self._folder.path(table), fs.LocalFileSystem())
        rows = self._open(table).to_pyarrow_table(columns=schema.names, filters=wanted, filesystem=files)
        return rows.select(schema.names).cast(schema)

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
        for table in filter(self._exists, _FACTS):
            self._merge_small_files(table, days)
        for table in filter(self._exists, _TABLES):
            # Full, because a write that was killed leaves files that no version names.
            if len(self._open(table).vacuum(full=True)) >= VACUUM_FILES:
                self._open(table).vacuum(dry_run=False, full=True)

    def _merge_small_files(self, table: str, days: Collection[date]) -> None:
        """Merge the small files of each of these days that has more than :data:`merging.MAX_BATCHES` of them."""
        files = self._open(table).get_add_actions(flatten=True)
        small: Counter[date] = Counter()
        for day, size in zip(*(files.column(one).to_pylist() for one in ("partition.day", "size_bytes")), strict=True):
            small[day] += size < merging.SMALL_BYTES
        for day in days:
            if small[day] > merging.MAX_BATCHES:
                self._open(table).optimize.compact([("day", "=", str(day))], target_size=merging.SMALL_BYTES)

    def _write(self, rows: Any, table: str, *, mode: str, predicate: str | None = None) -> None:
        """Write in one transaction."""
        name, equal = _split(table)
        for column, value in equal.items():
            rows = rows.append_column(column, pa.repeat(pa.scalar(value), rows.num_rows))
        if not self._exists(name):
            self._create(name, rows.schema)
        self._deltalake.write_deltalake(self._folder.path(name), rows, mode=mode, predicate=predicate)

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
        return bool(self._deltalake.DeltaTable.is_deltatable(self._folder.path(table)))

    def _open(self, table: str) -> Any:
        return self._deltalake.DeltaTable(self._folder.path(table))


def _with(rows: pa.Table, *, batch: int) -> pa.Table:
    """The rows with the column ``batch``."""
    return rows.append_column(BATCH, pa.repeat(pa.scalar(batch, pa.int64()), rows.num_rows))


def _split(table: str) -> tuple[str, dict[str, str]]:
    """The name of a table, and the values of its partition columns."""
    name, _, source = table.partition("/source=")
    return name, {"source": source} if source else {}


def _sql(equal: Mapping[str, str | int]) -> str:
    return " and ".join(f"{name} = {value!r}" for name, value in equal.items())
