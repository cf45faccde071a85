"""Tables of an audit as Delta tables, read and written with deltalake."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import compute as pc

from bide.errors import InvalidInputError
from bide.pipelines.audit import merging
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.table_files import TableFile
from bide.pipelines.audit.unfinished_work import BatchKey
from bide.pipelines.audit.versioned_storage import (
    FACTS,
    TABLES,
    WITH_FOLDERS_OF_BATCHES,
    VersionedStorage,
    partition_columns,
    split_source,
    with_batch_number,
    with_columns,
)
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


class DeltaStorage(VersionedStorage):
    """See :class:`bide.pipelines.audit.storage.TableStorage`. Each change of a table is a transaction of Delta.

    A storage is for one round.

    Raises:
        InvalidInputError: deltalake is not installed, or does not support the path.
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._deltalake = import_deltalake(folder.path())
        self._opened: dict[str, Any] = {}
        self._listed: dict[str, tuple[int, Any]] = {}
        """The files of a version, by table."""

    def files(self, table: str, day: date) -> list[TableFile]:
        if not self._exists(table):
            return []
        found = self._files_of_days(table, {day})
        names = ("path", "size_bytes", *_batch_columns(table))
        if found.column(names[-1]).null_count:
            raise InvalidInputError(
                f"the Delta table {self._folder.path(table)} has a file without statistics of batches, because another "
                "program has changed it: name another folder"
            )
        rows = zip(*(found.column(name).to_pylist() for name in names), strict=True)
        return [TableFile(path=path, size=size, first=first, last=last) for path, size, first, last in rows]

    def replace_batches(self, rows: pa.Table, table: str, batches: Collection[BatchKey]) -> None:
        numbers: defaultdict[date, list[str]] = defaultdict(list)
        for day, number in sorted(batches):
            numbers[day].append(str(number))
        each = (f"(day = '{day}' and {BATCH} in ({', '.join(some)}))" for day, some in numbers.items())
        self._overwrite(rows, table, " or ".join(each))

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        if rows.num_rows:
            self._write(with_batch_number(rows, batch), table, mode="append")

    def drop_batch(self, table: str, number: int) -> None:
        self._delete_staged_rows(table)
        name, equal = split_source(table)
        if self._exists(name):
            self._open(name).delete(_sql({**equal, BATCH: number}))

    def append_staged(self, table: str, batch: int) -> None:
        if (rows := self._staged_rows(table)) is not None:
            self._write(rows.scanner().to_reader(), table, mode="append")
            self._delete_staged_rows(table)

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date]) -> None:
        listed = ", ".join(f"'{day}'" for day in sorted(days))
        self._overwrite(rows, table, f"day in ({listed})")

    def replace(self, rows: pa.Table, table: str) -> None:
        self._write(rows, table, mode="overwrite")

    def compact(self, days: Collection[date]) -> None:
        if not days:
            return
        for table in filter(self._exists, FACTS):
            self._merge_small_files(table, days)
        place = self._folder.path(_VACUUMED)
        vacuumed = json.loads(self._folder.read_bytes(place)) if self._folder.exists(place) else {}
        versions = {table: self._vacuum(table, vacuumed.get(table, 0)) for table in filter(self._exists, TABLES)}
        if versions != vacuumed:
            self._folder.write_json(place, versions)

    def _merge_small_files(self, table: str, days: Collection[date]) -> None:
        """Merge the small files of each of these days that has more than :data:`merging.MAX_BATCHES` of them."""
        files = self._files_of_days(table, days)
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

    def _paths(self, table: str, days: Collection[date] | None) -> list[str]:
        if not self._exists(table):
            return []
        files = self._files_of(table) if days is None else self._files_of_days(table, days)
        found: list[str] = files.column("path").to_pylist()
        return found

    def _files_of(self, table: str) -> pa.Table:
        """The files of the newest version, with the columns of :func:`newest_files`."""
        opened = self._open(table)
        version, files = self._listed.get(table, (-1, None))
        if version != opened.version():
            files = newest_files(opened, self._folder.path(table))
            self._listed[table] = (opened.version(), files)
        return files

    def _files_of_days(self, table: str, days: Collection[date]) -> pa.Table:
        files = self._files_of(table)
        return files.filter(pc.is_in(files.column("partition.day"), pa.array(days, pa.date32())))

    def _overwrite(self, rows: pa.Table, table: str, predicate: str) -> None:
        """Replace the rows of which this is true with rows of which it is true."""
        if self._exists(table):
            self._write(rows, table, mode="overwrite", predicate=predicate)
        elif rows.num_rows:
            self._write(rows, table, mode="append")

    def _write(self, rows: Any, table: str, *, mode: str, predicate: str | None = None) -> None:
        """Write in one transaction."""
        name, equal = split_source(table)
        if equal:
            rows = with_columns(rows, equal)
        if not self._exists(name):
            self._create(name, rows.schema)
        self._deltalake.write_deltalake(self._open(name), rows, mode=mode, predicate=predicate)

    def _create(self, table: str, schema: pa.Schema) -> None:
        """Create a table in a transaction of its own, so that no folder has files before it is a Delta table."""
        interval = f"interval {int(RETENTION.total_seconds())} seconds"
        self._deltalake.DeltaTable.create(
            self._folder.path(table),
            schema,
            partition_by=partition_columns(table, schema),
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


def _batch_columns(table: str) -> tuple[str, str]:
    """The columns with the first and the last batch in a file, among those of :func:`newest_files`."""
    if table in WITH_FOLDERS_OF_BATCHES:
        return f"partition.{BATCH}", f"partition.{BATCH}"
    return f"min.{BATCH}", f"max.{BATCH}"


def _sql(equal: Mapping[str, str | int]) -> str:
    return " and ".join(f"{name} = {value!r}" for name, value in equal.items())
