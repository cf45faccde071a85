"""Folder of an audit: its tables by day, and the state of unfinished work.

With Parquet tables::

    scheduled/day=2026-11-21/batch=7/*.parquet     facts; the same for delivered, processed, failed, occurrences
    undecodable/source=events/day=2026-11-21/batch=7/*.parquet   bytes that are not AMQP 1.0
    messages/day=2026-11-21/batch=3/*.parquet      computed from facts, by the round with this number
    lateness/day=2026-11-21/*.parquet              computed from the facts of that day
    pending/*.parquet  failures/*.parquet          of all days
    _state/                                        counts by day for these two tables, and which facts are new
    _state/ids/scheduled/day=2026-11-21/*.arrow    digests of message ids, for each file of a table with batches
    _state/schedules.json                          position in the schedule log, and the files of its state
    _state/positions/scheduled.json                positions in the streams of a source

With Delta and Iceberg tables, the number of the batch of facts is a column, and ``undecodable`` and the tables below
``_state`` are tables of this format too. The catalog of the Iceberg tables is ``_state/catalog.db``.

After a crash, the next run continues with the folder:

- The facts of a batch that was not committed are removed, and the messages of the batch are read again.
- A note with the days of a batch is written after its facts and before its positions, which commit the batch. The note
  is deleted when all tables that are computed from these facts are written.
- Before a round replaces batches of messages, it writes their numbers and the existing files to a work file. If the
  round does not finish, the next one replaces the same batches again. Files are deleted before their replacement is in
  place, so a day whose files have changed may lack rows, and is computed again from its facts.
"""

from __future__ import annotations

import json
import os
import posixpath
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.audit.table_format import VERSIONS_IN_WORDS, FolderVersion, TableFormat
from bide.pipelines.audit.unfinished_work import BatchKey, UnfinishedWork
from bide.pipelines.folder_lock import LOCK_FILE, hold
from bide.pipelines.formats import escape_pattern_characters, spark_uri
from bide.pipelines.listed_files import check_place, listed_files

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_VERSION_FILE: Final = "_state/audit.json"
_NEW_SUFFIX: Final = ".new"
_NOTES: Final = "_state/notes"
_WORK: Final = "_state/work.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note about the new facts of a batch.

    Attributes:
        name: the name of the source and the number of the batch.
        rows: the number of rows by table, and for ``occurrences`` also by outcome, as in ``occurrences/cancelled``.
        days: the days of these rows.
    """

    name: str
    rows: dict[str, int]
    days: tuple[date, ...]

    @property
    def batches(self) -> set[BatchKey]:
        """The batches of these rows, in each of the tables."""
        number = int(self.name.rpartition("-")[2])
        return {(day, number) for day in self.days}


class Folder:
    """The folder of an audit.

    Args:
        place: a path, or a URI that Spark and Arrow support, which the driver and all executors can access.
        table_format: the format of the tables; None for that of an existing audit, and Parquet for a new one.

    Attributes:
        files: the file system of the folder.

    Raises:
        InvalidInputError: Arrow does not support the URI. Or the format is ``delta`` or ``iceberg``, and the folder is
            a URI, or the package for the format does not support its path, or is not installed.
    """

    def __init__(self, place: str, *, table_format: TableFormat | None = None) -> None:
        self._wanted_format = table_format
        self.place = (place if "://" in place else os.path.abspath(place)).rstrip("/")  # noqa: PTH100 (no link is followed)
        if table_format in ("delta", "iceberg"):
            check_place(self.place, table_format)
        try:
            self.files, self._root = fs.FileSystem.from_uri(self.place)
        except (ValueError, OSError) as error:
            raise InvalidInputError(f"the folder {place!r} cannot be used: {error}; name another one") from error
        self._locked_by: int | None = None

    def begin(self) -> None:
        """Create the folder if it is missing.

        Raises:
            FolderInUseError: another audit is creating the folder.
            InvalidInputError: the folder contains other files, or an audit of another version or with tables of another
                format, or cannot be used.
        """
        try:
            self._begin()
        except OSError as error:
            raise InvalidInputError(f"the folder {self.place} cannot be used: {error}; name another one") from error

    def _begin(self) -> None:
        if not self._is_new():
            return
        self.files.create_dir(self.path("_state"), recursive=True)
        with self.lock():
            if self._is_new():
                self.write_version()

    def _is_new(self) -> bool:
        """Whether the folder has no audit yet, or only the files of one that was killed while it created the folder."""
        if self.exists(self.path(_VERSION_FILE)):
            found = self._read_version()
            if found.table_format is None:
                raise InvalidInputError(
                    f"the folder {self.place} has an audit of version {found.version}, but this bide writes "
                    f"{VERSIONS_IN_WORDS}: name another folder"
                )
            if self._wanted_format not in (None, found.table_format):
                raise InvalidInputError(
                    f"the audit in {self.place} has tables of the format {found.table_format}, not "
                    f"{self._wanted_format}: leave out the format, or name another folder"
                )
            return False
        begun = {LOCK_FILE, posixpath.basename(f"{_VERSION_FILE}{_NEW_SUFFIX}")}
        if {*self.entries(self._root)} - {"_state"} or {*self.entries(self.path("_state"))} - begun:
            raise InvalidInputError(f"the folder {self.place} contains other files than an audit: name another folder")
        return True

    @property
    def version(self) -> int:
        """The version of the audit in the folder."""
        return self._read_version().version

    @property
    def table_format(self) -> TableFormat:
        """The format of the tables in the folder."""
        if not self.exists(self.path(_VERSION_FILE)):
            return self._wanted_format or "parquet"
        return self._read_version().table_format or "parquet"

    def _read_version(self) -> FolderVersion:
        return FolderVersion.from_json(json.loads(self.read_bytes(self.path(_VERSION_FILE))))

    def write_version(self) -> None:
        """Record the format of the tables, and that the audit has the newest version for this format."""
        self.write_json(self.path(_VERSION_FILE), FolderVersion.of(self.table_format).to_json())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder against other audits, with :func:`bide.pipelines.folder_lock.hold`.

        A thread that holds the lock through this object may enter it again, in order to hold it for several rounds.

        Raises:
            FolderInUseError: on entering the context, if another audit holds the lock.
        """
        own = threading.get_ident()
        if self._locked_by == own:
            yield
            return
        with hold(self.files, self.path("_state"), what=f"the audit in {self.place}"):
            self._locked_by = own
            try:
                yield
            finally:
                self._locked_by = None

    def check(self) -> None:
        """Check that the folder has an audit.

        Raises:
            InvalidInputError: the folder has no audit, or cannot be read.
        """
        try:
            found = self.exists(self.path(_VERSION_FILE))
        except OSError as error:
            raise InvalidInputError(f"the folder {self.place} cannot be read: {error}; name another one") from error
        if not found:
            raise InvalidInputError(
                f"the folder {self.place} has no audit: name the folder that bide.pipelines.audit.run.run(...) writes "
                "to"
            )

    def location(self, *parts: str) -> str:
        """The URI of a table, for Spark."""
        return spark_uri(self.place, *parts)

    def write(self, rows: DataFrame, table: str, *, by: tuple[str, ...] = ("day",)) -> None:
        """Replace the partitions that the rows belong to, and leave other partitions unchanged.

        Args:
            by: the partition columns of the table; none to replace the whole table.
        """
        from bide.pipelines.session import times_with_statistics

        writer = rows.write.mode("overwrite").option("partitionOverwriteMode", "dynamic").partitionBy(*by)
        with times_with_statistics(rows.sparkSession):
            writer.parquet(self.location(table))

    def append(self, facts: DataFrame, table: str, batch: int) -> None:
        """Write the facts of a batch, and replace facts that an earlier attempt has written."""
        from pyspark.sql import functions as F  # noqa: N812 (the usual name)

        self.write(facts.withColumn("batch", F.lit(batch).cast("long")), table, by=("day", "batch"))

    def write_whole(self, rows: DataFrame, table: str, *order: str | Column) -> None:
        """Replace a small table with one file, sorted by *order*."""
        self.write(rows.repartition(1).sortWithinPartitions(*order), table, by=())

    def read(
        self, spark: SparkSession, table: str, schema: StructType, days: Collection[date] | None = None
    ) -> DataFrame:
        """Read a table; it is empty if it does not exist yet.

        Args:
            days: read only the files of these days.
        """
        names = [table] if days is None else [posixpath.join(table, f"day={day}") for day in sorted(days)]
        names = [name for name in names if self.exists(self.path(name))]
        if (files := listed_files(self.files, self._root, table)) is not None:
            places = [posixpath.join(table, file) for file in files]
            names = [place for place in places if any(place.startswith(f"{name}/") for name in names)]
        existing = [escape_pattern_characters(self.location(name)) for name in names]
        if not existing:
            return spark.createDataFrame([], schema)
        found = spark.read.schema(schema).option("basePath", self.location(table)).parquet(*existing)
        return found.select(*schema.names)

    def read_batches(
        self, spark: SparkSession, table: str, schema: StructType, batches: Collection[BatchKey]
    ) -> DataFrame:
        """Read the batches that exist, with a column ``batch``."""
        from pyspark.sql.types import LongType, StructField, StructType

        whole = StructType([*schema, StructField("batch", LongType())])
        existing = [
            escape_pattern_characters(self.location(*_parts(table, one)))
            for one in sorted(batches)
            if self.has(table, one)
        ]
        if not existing:
            return spark.createDataFrame([], whole)
        found = spark.read.schema(whole).option("basePath", self.location(table)).parquet(*existing)
        return found.select(*whole.names)

    def replace(self, rows: DataFrame, table: str, batches: Collection[BatchKey]) -> None:
        """Replace these batches with rows that have a day and a batch, and leave other batches unchanged."""
        before = {one: self.entries(self.path(*_parts(table, one))) for one in batches if self.has(table, one)}
        self.write(rows, table, by=("day", "batch"))
        for one, entries in before.items():
            # Spark leaves a batch for which there are no rows unchanged.
            if self.entries(path := self.path(*_parts(table, one))) == entries:
                self.files.delete_dir(path)

    def has(self, table: str, batch: BatchKey | None = None) -> bool:
        """Whether a table, or this batch of it, exists."""
        return self.exists(self.path(table) if batch is None else self.path(*_parts(table, batch)))

    def begin_work(self, batches: Collection[BatchKey]) -> None:
        """Record which batches of messages will be replaced, and the existing files of their days.

        A day that an interrupted round has changed counts as changed until the work is finished.
        """
        changed = self.unfinished_work().days
        work = {
            "batches": [[str(day), number] for day, number in sorted(batches)],
            "changed": sorted(map(str, changed)),
            "files": {str(day): self._computed_files(day) for day in {day for day, _ in batches} - changed},
        }
        self.write_json(self.path(_WORK), work)

    def unfinished_work(self) -> UnfinishedWork:
        """The recorded work of a round that did not finish; empty if there is none."""
        if not self.exists(path := self.path(_WORK)):
            return UnfinishedWork(batches=set(), days=set())
        work = json.loads(self.read_bytes(path))
        batches = {(date.fromisoformat(day), number) for day, number in work["batches"]}
        # A work file that an earlier release of bide wrote has no list of files.
        before = work.get("files", {})
        changed = {day for day, _ in batches if self._computed_files(day) != before.get(str(day))}
        return UnfinishedWork(batches=batches, days=changed | set(map(date.fromisoformat, work.get("changed", ()))))

    def _computed_files(self, day: date) -> list[str]:
        """The files of the first and the last table that a round changes for a day; file names are never reused."""
        found = []
        for table in ("messages", "lateness"):
            selector = fs.FileSelector(self.path(table, f"day={day}"), allow_not_found=True, recursive=True)
            found += [one.path.removeprefix(self._root) for one in self.files.get_file_info(selector) if one.is_file]
        return sorted(found)

    def finish_work(self) -> None:
        """Delete the record of :meth:`begin_work`."""
        if self.exists(path := self.path(_WORK)):
            self.files.delete_file(path)

    def add_note(self, note: Note) -> None:
        """Write a note about the new facts of a batch."""
        self.write_json(
            self.path(_NOTES, f"{note.name}.json"), {"rows": note.rows, "days": [str(day) for day in note.days]}
        )

    def notes(self) -> list[Note]:
        """The notes whose facts are not in all tables yet."""
        return [self._read_note(name) for name in self._note_names()]

    def noted_rows(self) -> int:
        """The number of rows in the notes, to show the progress of a round, which may delete notes at the same time."""
        rows = 0
        for name in self._note_names():
            with suppress(FileNotFoundError):
                rows += sum(count for table, count in self._read_note(name).rows.items() if "/" not in table)
        return rows

    def _note_names(self) -> list[str]:
        suffix = ".json"
        found = self.entries(self.path(_NOTES))
        return [name.removesuffix(suffix) for name in found if name.endswith(suffix)]

    def _read_note(self, name: str) -> Note:
        note = json.loads(self.read_bytes(self.path(_NOTES, f"{name}.json")))
        return Note(name=name, rows=note["rows"], days=tuple(date.fromisoformat(day) for day in note["days"]))

    def delete_notes(self, notes: Iterable[Note]) -> None:
        """Delete notes, after all tables that depend on their facts are written."""
        for note in notes:
            self.files.delete_file(self.path(_NOTES, f"{note.name}.json"))

    def drop_note(self, name: str) -> None:
        """Delete the note of this name, if it exists."""
        if self.exists(path := self.path(_NOTES, f"{name}.json")):
            self.files.delete_file(path)

    def path(self, *parts: str) -> str:
        """The path of a file or a folder, for :attr:`files`."""
        return posixpath.join(self._root, *parts)

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder."""
        return bool(self.files.get_file_info(path).type != fs.FileType.NotFound)

    def entries(self, path: str) -> list[str]:
        """The names in a folder; none if it is missing."""
        found = self.files.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(one.base_name for one in found)

    def read_bytes(self, path: str) -> bytes:
        """The content of a file."""
        with self.files.open_input_stream(path) as file:
            read: bytes = file.read()
            return read

    def write_json(self, path: str, content: dict[str, Any]) -> None:
        """Write a file atomically."""
        self.files.create_dir(posixpath.dirname(path))
        new = f"{path}{_NEW_SUFFIX}"
        with self.files.open_output_stream(new) as file:
            file.write(json.dumps(content, sort_keys=True).encode())
        self.files.move(new, path)


def _parts(table: str, batch: BatchKey) -> tuple[str, str, str]:
    day, number = batch
    return table, f"day={day}", f"batch={number}"
