"""Tables of an audit as Iceberg tables, read and written with pyiceberg."""

from __future__ import annotations

import itertools
import posixpath
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.audit import merging
from bide.pipelines.audit.columns import FACT_COLUMNS, UNDECODABLE, UNDECODABLE_COLUMNS, arrow_schema, with_batch
from bide.pipelines.audit.queries import BATCH
from bide.pipelines.audit.table_files import TableFile
from bide.pipelines.audit.unfinished_work import BatchKey
from bide.pipelines.audit.versioned_storage import (
    FACTS,
    TABLES,
    VersionedStorage,
    partition_columns,
    split_source,
    with_batch_number,
    with_columns,
)
from bide.pipelines.iceberg import (
    data_files,
    identifier,
    import_pyiceberg,
    open_catalog,
    open_table,
    path_in_table,
)

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

RETENTION: Final = timedelta(minutes=10)
"""How long a version of a table is kept after the next one has replaced it, for queries of this version. pyiceberg
copies the list of snapshots several times in each transaction, so that an hour of them would make transactions slow."""

EXPIRED_SNAPSHOTS: Final = 20
"""The number of expired snapshots from which they are removed, and then the files that no snapshot has."""

FILES_PER_SNAPSHOT: Final = 100
"""A look for these files reads the names of all files of a table. It is due after one expired snapshot for each of this
number of files, so that its cost for a snapshot stays the same."""

METADATA_VERSIONS: Final = 5
"""The number of earlier metadata files of a table that are kept. Each has all snapshots."""

MANIFESTS: Final = 20
"""The number of lists of files from which they are merged."""

MANIFEST_BYTES: Final = 128 * 1024
"""The size of merged lists of files. A change of a file writes the list that has it again."""

STAGED_BYTES: Final = 64 * 1024 * 1024
"""The size in memory of the staged rows that are appended together, in one transaction with the others."""

_LAST_BATCH: Final = "bide.last-batch"
"""The table property with the last batch that was appended, so that no list of files is read for batches after it."""


class IcebergStorage(VersionedStorage):
    """See :class:`bide.pipelines.audit.storage.TableStorage`. Each change of a table is a transaction of Iceberg.

    A storage is for one round.

    Raises:
        InvalidInputError: pyiceberg is not installed, or does not support the path.
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._expressions = import_pyiceberg(folder.path()).expressions
        self._catalog = open_catalog(folder.path())
        weakref.finalize(self, self._catalog.close)
        self._opened: dict[str, Any] = {}
        self._lists: dict[tuple[str, frozenset[date] | None], tuple[str, list[_File]]] = {}

    def files(self, table: str, day: date) -> list[TableFile]:
        found = ((one, *one.batches) for one in self._listed(table, {day}))
        return [
            TableFile(path=one.path, size=one.file.file_size_in_bytes, first=first, last=last)
            for one, first, last in found
        ]

    def replace_batches(self, rows: pa.Table, table: str, batches: Collection[BatchKey]) -> None:
        files = [(day, one) for day in {day for day, _ in batches} for one in self._listed(table, {day})]
        replaced = [one.file for day, one in files if (day, one.batches[0]) in batches]
        self._write(table, [rows], replaced=replaced)

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        self._write(table, [with_batch_number(rows, batch)], batch=batch)

    def drop_batch(self, table: str, number: int) -> None:
        self._delete_staged_rows(table)
        name, equal = split_source(table)
        opened, last_batch = self._open(name), _last_batch(table)
        if opened is None or (last := int(opened.properties.get(last_batch, -1))) < number:
            return
        wanted = [self._expressions.EqualTo(column, value) for column, value in {BATCH: number, **equal}.items()]
        with opened.transaction() as transaction:
            transaction.delete(self._expressions.And(*wanted) if equal else wanted[0])
            if last == number:
                transaction.set_properties({last_batch: str(number - 1)})

    def append_staged(self, table: str, batch: int) -> None:
        if (rows := self._staged_rows(table)) is not None:
            self._write(table, _tables_of(rows.scanner().to_reader()), batch=batch)
            self._delete_staged_rows(table)

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date]) -> None:
        self._write(table, [rows], replaced=[one.file for one in self._listed(table, days)])

    def replace(self, rows: pa.Table, table: str) -> None:
        if self._open(table) is None:
            self._create(table, rows.schema)  # without rows, too, as for the other formats
        self._write(table, [rows], replaced=[one.file for one in self._listed(table)])

    def compact(self, days: Collection[date]) -> None:
        if not days:
            return
        for table in FACTS:
            self._merge_small_files(table, days)
        for table in TABLES:
            self._delete_expired(table)

    def _merge_small_files(self, table: str, days: Collection[date]) -> None:
        """Merge small files of each partition of these days, as :func:`merging.to_merge` merges small batches."""
        partitions = defaultdict(list)
        for one in self._listed(table, days):
            partitions[one.file.partition].append(one)
        for files in partitions.values():
            sizes = {number: one.file.file_size_in_bytes for number, one in enumerate(files)}
            if some := [files[number] for number in merging.to_merge(sizes)]:
                rows = self.read_files(table, _facts_schema(table), [one.path for one in some])
                self._write(table, [rows], replaced=[one.file for one in some])

    def _delete_expired(self, table: str) -> None:
        """Remove expired snapshots if there are many, and then the files that no snapshot has.

        These include files of writes that were killed. The lock of the folder keeps other writers out.
        """
        if (opened := self._open(table)) is None or (current := opened.current_snapshot()) is None:
            return
        before = datetime.now(UTC) - RETENTION
        # A query may still read a version that was replaced just now, however old this version is.
        pairs = itertools.pairwise(opened.snapshots())
        replaced = {one.snapshot_id for one, later in pairs if later.timestamp_ms < before.timestamp() * 1000}
        expired = list(replaced - {one.snapshot_id for one in opened.refs().values()})  # without branches and tags
        if len(expired) < max(EXPIRED_SNAPSHOTS, int(current.summary["total-data-files"]) // FILES_PER_SNAPSHOT):
            return
        opened.maintenance.expire_snapshots().by_ids(expired).commit()
        needed, files, place = _needed_files(opened), self._folder.files, self._folder.path(table)
        folders = set()
        for one in files.get_file_info(fs.FileSelector(place, recursive=True)):
            # The paths are relative, because the folder may have been named by a symbolic link, now or earlier.
            if one.is_file and one.mtime < before and posixpath.relpath(one.path, place) not in needed:
                files.delete_file(one.path)
                folders.add(posixpath.dirname(one.path))
        for path in folders:
            while path != place and not self._folder.entries(path):
                files.delete_dir(path)
                path = posixpath.dirname(path)

    def _paths(self, table: str, days: Collection[date] | None) -> list[str]:
        return [one.path for one in self._listed(table, days)]

    def _listed(self, table: str, days: Collection[date] | None = None) -> list[_File]:
        """The files of the newest version of a table, or only those of these days."""
        if (opened := self._open(table)) is None or (days is not None and not days):
            return []
        # A round asks several times for the files of a day, between two changes of the table.
        key = (table, None if days is None else frozenset(days))
        version, listed = self._lists.get(key, ("", []))
        if version == opened.metadata_location:
            return listed
        of_days, found = None, self._expressions
        if days is not None:
            # An expression with more than 200 values would not leave out any file.
            of_days = found.And(found.GreaterThanOrEqual("day", min(days)), found.LessThanOrEqual("day", max(days)))
        files = [_File(opened, path, file) for path, file in data_files(opened, of_days)]
        listed = sorted((one for one in files if days is None or one.day in days), key=lambda one: one.path)
        self._lists[key] = (opened.metadata_location, listed)
        return listed

    def _write(
        self, table: str, tables: Iterable[pa.Table], *, replaced: Collection[Any] = (), batch: int | None = None
    ) -> None:
        """Replace these files with rows, or append the rows of a batch, in one transaction."""
        name, equal = split_source(table)
        written = (with_columns(rows, equal) for rows in tables if rows.num_rows)
        first = list(itertools.islice(written, 1))
        if not first and not replaced:
            return
        opened = self._open(name) or self._create(name, first[0].schema)
        with opened.transaction() as transaction:
            if replaced:
                with transaction.update_snapshot().overwrite() as change:
                    for one in replaced:
                        change.delete_data_file(one)
            for rows in itertools.chain(first, written):
                transaction.append(rows)
            if batch is not None:
                transaction.set_properties({_last_batch(table): str(batch)})

    def _create(self, table: str, schema: pa.Schema) -> Any:
        """Create a table in a transaction of its own, so that no folder has files before it is an Iceberg table."""
        namespace, _ = name = identifier(table)
        self._catalog.create_namespace_if_not_exists(namespace)
        place = self._folder.path(table)
        properties = {
            "commit.manifest-merge.enabled": "true",
            "commit.manifest.min-count-to-merge": str(MANIFESTS),
            "commit.manifest.target-size-bytes": str(MANIFEST_BYTES),
            "write.data.path": place,
            # pyiceberg compares this with the size in memory. A merge has to make one file, or it would be repeated.
            "write.target-file-size-bytes": str(2**40),
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": str(METADATA_VERSIONS),
        }
        transaction = self._catalog.create_table_transaction(name, schema, location=place, properties=properties)
        with transaction, transaction.update_spec() as partitions:
            for column in partition_columns(table, schema):
                partitions.add_identity(column)
        return self._open(table)

    def _open(self, table: str) -> Any:
        """The newest version of a table; None if it does not exist."""
        if (opened := self._opened.get(table)) is not None:
            return opened.refresh()
        opened = open_table(self._catalog, self._folder.path(), table)
        if opened is not None:
            self._opened[table] = opened
        return opened


class _File:
    """A file of a table.

    Attributes:
        path: its path in the folder of the table.
        file: its description by pyiceberg.
    """

    def __init__(self, opened: Any, path: str, file: Any) -> None:
        self._opened = opened
        self.path = path
        self.file = file

    @property
    def day(self) -> date:
        """The day of all its rows, in a table with days."""
        return date(1970, 1, 1) + timedelta(days=self._bounds("day")[0])

    @property
    def batches(self) -> tuple[int, int]:
        """The first and the last batch of its rows, in a table with batches."""
        return self._bounds(BATCH)

    def _bounds(self, column: str) -> tuple[int, int]:
        """The least and the greatest value of a column."""
        from pyiceberg.conversions import from_bytes

        field = self._opened.schema().find_field(column)
        bounds = [one or {} for one in (self.file.lower_bounds, self.file.upper_bounds)]
        if not all(field.field_id in one for one in bounds):
            raise InvalidInputError(
                f"the Iceberg table {self._opened.location()} has a file without statistics of the column {column}, "
                "because another program has changed it: name another folder"
            )
        least, greatest = (int(from_bytes(field.field_type, one[field.field_id])) for one in bounds)
        return least, greatest


def _needed_files(opened: Any) -> set[str]:
    """The files that the snapshots of a table have, and those of its metadata, as paths in its folder.

    Raises:
        InvalidInputError: another program has changed the table, so that it has files in other folders.
    """
    metadata = opened.metadata
    found = {opened.metadata_location, *(one.metadata_file for one in metadata.metadata_log)}
    found |= {one.statistics_path for one in (*metadata.statistics, *metadata.partition_statistics)}
    for snapshot in opened.snapshots():
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(opened.io):
            if manifest.manifest_path not in found:
                found.add(manifest.manifest_path)
                found |= {one.data_file.file_path for one in manifest.fetch_manifest_entry(opened.io)}
    return {path_in_table(opened, one) for one in found}


def _facts_schema(table: str) -> pa.Schema:
    """The schema of a table of facts, with its columns ``batch`` and ``source``."""
    if table == UNDECODABLE:
        return with_batch(arrow_schema(UNDECODABLE_COLUMNS)).append(pa.field("source", pa.string()))
    return with_batch(arrow_schema(FACT_COLUMNS[table]))


def _last_batch(table: str) -> str:
    """The name of the table property with the last batch of a table, or of a source in it."""
    _, equal = split_source(table)
    return ".".join((_LAST_BATCH, *equal.values()))


def _tables_of(reader: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """The rows in tables of about :data:`STAGED_BYTES`."""
    waiting: list[pa.RecordBatch] = []
    for one in reader:
        waiting.append(one)
        if sum(some.nbytes for some in waiting) >= STAGED_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting = []
    yield pa.Table.from_batches(waiting, reader.schema)
