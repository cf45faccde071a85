"""The folder of an audit: tables of Parquet files by day, and what is still to be worked out.

::

    scheduled/day=2026-11-21/batch=7/*.parquet     facts; the same for delivered, processed, failed
    undecodable/source=events/day=2026-11-21/batch=7/*.parquet   bytes that are not AMQP 1.0
    messages/day=2026-11-21/batch=3/*.parquet      worked out of the facts, by the round that last did
    lateness/day=2026-11-21/*.parquet              worked out of the facts of that day
    pending/*.parquet  failures/*.parquet          of all days
    _state/                                        what these two are made of, and which facts are new
    _checkpoint/                                   how far the streams were read: Spark's own

Whoever is killed leaves a folder that the next run goes on with. A batch of facts takes the place of what was written
of the same batch before. The days that it has facts of are written down after the facts and before Spark takes the
batch for done, and struck out when all that follows from them is written. Which batches of messages a round replaces is
written down before it begins with that, with the files that are there: the next one replaces them again if it did not
come to its end. Spark deletes what it replaces before it puts the new in its place, so that a day whose files have
changed may lack rows: only its facts are sure to have all.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from bide.errors import InvalidInputError
from bide.pipelines.folder_lock import LOCK, hold
from bide.pipelines.formats import for_spark, to_read

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

VERSION: Final = 2

Batch = tuple[date, int]
"""A batch of one day of a table."""

_BATCH: Final = re.compile(r"batch=([0-9]+)")
_HEAD: Final = "_state/audit.json"
_NEW: Final = ".new"
_NOTES: Final = "_state/notes"
_MERGED: Final = "_state/merged"
_MERGE: Final = "_state/merge.json"
_WORK: Final = "_state/work.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a batch of a source has brought.

    Attributes:
        name: of the source and the batch.
        rows: by table.
        days: that they belong to.
    """

    name: str
    rows: dict[str, int]
    days: tuple[date, ...]

    @property
    def batches(self) -> set[Batch]:
        """Those that it tells of, in each of the tables that have rows."""
        number = int(self.name.rpartition("-")[2])
        return {(day, number) for day in self.days}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a round that did not come to its end has left.

    Attributes:
        batches: of messages that it was to replace.
        days: of which it has changed something. Rows of them may be missing, and may be there twice.
    """

    batches: set[Batch]
    days: set[date]

    def __bool__(self) -> bool:
        return bool(self.batches)


class Folder:
    """An audit's folder.

    Args:
        place: a path, or a URI that Spark and Arrow know, which the driver and all executors reach.

    Raises:
        InvalidInputError: Arrow does not know such a URI.
    """

    def __init__(self, place: str) -> None:
        self.place = (place if "://" in place else os.path.abspath(place)).rstrip("/")  # noqa: PTH100 (as it is)
        try:
            self._files, self._root = fs.FileSystem.from_uri(self.place)
        except (ValueError, OSError) as error:
            raise InvalidInputError(f"the folder {place!r} cannot be used: {error}") from error
        self._locked_by: int | None = None

    def begin(self) -> None:
        """Make the folder where it is missing.

        Raises:
            FolderInUseError: another audit is just making it.
            InvalidInputError: it has other things in it, or another version of bide's, or cannot be used.
        """
        try:
            self._begin()
        except OSError as error:
            raise InvalidInputError(f"the folder {self.place} cannot be used: {error}; name another one") from error

    def _begin(self) -> None:
        if not self._is_new():
            return
        self._files.create_dir(self._path("_state"), recursive=True)
        with self.lock():
            if self._is_new():
                self._write(self._path(_HEAD), {"version": VERSION})

    def _is_new(self) -> bool:
        """Whether no audit was begun here, or one that was killed before it had begun."""
        if self._exists(self._path(_HEAD)):
            version = json.loads(self._read(self._path(_HEAD)))["version"]
            if version != VERSION:
                raise InvalidInputError(
                    f"the folder {self.place} has an audit of version {version}, and this bide writes {VERSION}: "
                    "name another folder"
                )
            return False
        begun = {LOCK, posixpath.basename(f"{_HEAD}{_NEW}")}
        if {*self._entries(self._root)} - {"_state"} or {*self._entries(self._path("_state"))} - begun:
            raise InvalidInputError(f"the folder {self.place} has things that are no audit: name another folder")
        return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other audits from this folder meanwhile. A lock that a dead process has left does not count.

        The thread that has it by this object may take it again: who runs many rounds holds it in between.

        Raises:
            FolderInUseError: entering it, another audit has it.
        """
        own = threading.get_ident()
        if self._locked_by == own:
            yield
            return
        with hold(self._files, self._path("_state"), what=f"the audit in {self.place}"):
            self._locked_by = own
            try:
                yield
            finally:
                self._locked_by = None

    def check(self) -> None:
        """See whether an audit is here.

        Raises:
            InvalidInputError: there is none, or the folder cannot be read.
        """
        try:
            found = self._exists(self._path(_HEAD))
        except OSError as error:
            raise InvalidInputError(f"the folder {self.place} cannot be read: {error}") from error
        if not found:
            raise InvalidInputError(
                f"the folder {self.place} is not of an audit: name the one that 'bide pipeline audit --into' was given"
            )

    def location(self, *parts: str) -> str:
        """Where a table is, for Spark."""
        return for_spark(self.place, *parts)

    def has_positions(self, source: str) -> bool:
        """Whether Spark has written down how far a source was read."""
        return bool(self._entries(self._path("_checkpoint", source, "offsets")))

    def write(self, rows: DataFrame, table: str, *, by: tuple[str, ...] = ("day",)) -> None:
        """Write rows in the place of those partitions that they belong to; the others stay as they are.

        Args:
            by: the columns that the table is partitioned by.
        """
        (
            rows.write.mode("overwrite")
            .option("partitionOverwriteMode", "dynamic")
            .partitionBy(*by)
            .parquet(self.location(table))
        )

    def append(self, facts: DataFrame, table: str, batch: int) -> None:
        """Write the facts of a batch, in the place of what is there of it."""
        from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

        self.write(facts.withColumn("batch", F.lit(batch).cast("long")), table, by=("day", "batch"))

    def write_whole(self, rows: DataFrame, table: str, *order: str | Column) -> None:
        """Write a small table anew, as one file in this order."""
        rows.repartition(1).sortWithinPartitions(*order).write.mode("overwrite").parquet(self.location(table))

    def read(
        self, spark: SparkSession, table: str, schema: StructType, days: Collection[date] | None = None
    ) -> DataFrame:
        """Rows of a table, none where it does not exist yet.

        Args:
            days: only of these; no other files are looked at.
        """
        names = [table] if days is None else [posixpath.join(table, f"day={day}") for day in sorted(days)]
        there = [to_read(self.location(name)) for name in names if self._exists(self._path(name))]
        if not there:
            return spark.createDataFrame([], schema)
        found = spark.read.schema(schema).option("basePath", self.location(table)).parquet(*there)
        return found.select(*schema.names)

    def read_batches(
        self, spark: SparkSession, table: str, schema: StructType, batches: Collection[Batch]
    ) -> DataFrame:
        """Rows of these batches, those that are there, with a column ``batch``."""
        from pyspark.sql.types import LongType, StructField, StructType

        whole = StructType([*schema, StructField("batch", LongType())])
        there = [to_read(self.location(*_parts(table, one))) for one in sorted(batches) if self.has(table, one)]
        if not there:
            return spark.createDataFrame([], whole)
        found = spark.read.schema(whole).option("basePath", self.location(table)).parquet(*there)
        return found.select(*whole.names)

    def replace(self, rows: DataFrame, table: str, batches: Collection[Batch]) -> None:
        """Write rows, of which each has its day and batch, in the place of these batches, and leave the others."""
        before = {one: self._entries(self._path(*_parts(table, one))) for one in batches if self.has(table, one)}
        self.write(rows, table, by=("day", "batch"))
        for one, entries in before.items():
            # What got no rows was not touched.
            if self._entries(path := self._path(*_parts(table, one))) == entries:
                self._files.delete_dir(path)

    def has(self, table: str, batch: Batch | None = None) -> bool:
        """Whether a table is there, or this batch of it."""
        return self._exists(self._path(table) if batch is None else self._path(*_parts(table, batch)))

    def batches(self, table: str, day: date, *, under: int | None = None) -> list[int]:
        """The batches that a day of a table consists of.

        Args:
            under: only those that have fewer bytes than this.
        """
        place = self._path(table, f"day={day}")
        found = {int(match[1]): 0 for one in self._entries(place) if (match := _BATCH.fullmatch(one))}
        if under is not None:
            for number in found:
                files = fs.FileSelector(posixpath.join(place, f"batch={number}"), recursive=True)
                found[number] = sum(one.size or 0 for one in self._files.get_file_info(files))
        return sorted(number for number, size in found.items() if under is None or size < under)

    def merge(self, rows: DataFrame, table: str, day: date, batches: list[int]) -> None:
        """Put the batches of a day together into one, of which these are the rows.

        They are written aside first. What follows is written down before it is done, and :meth:`finish_merges` does
        again what of it an interruption has left: no row is there twice, and none is lost.
        """
        rows.coalesce(1).drop("day").write.mode("overwrite").parquet(self.location(_MERGED))
        self._write(self._path(_MERGE), {"table": table, "day": str(day), "batches": batches})
        self.finish_merges()

    def finish_merges(self) -> None:
        """Finish what :meth:`merge` has begun."""
        if not self._exists(note := self._path(_MERGE)):
            return
        told = json.loads(self._read(note))
        place = self._path(told["table"], f"day={told['day']}")
        merged = self._path(_MERGED)
        if self._exists(merged):
            for batch in told["batches"]:
                if self._exists(old := posixpath.join(place, f"batch={batch}")):
                    self._files.delete_dir(old)
            # Under the number of the last one, which is done with: Spark never comes back to it.
            self._files.move(merged, posixpath.join(place, f"batch={told['batches'][-1]}"))
        self._files.delete_file(note)

    def begin_work(self, batches: Collection[Batch]) -> None:
        """Write down which batches of messages are about to be replaced, and what is there of their days.

        What an interruption has left of a day is no state to compare with: until the work is finished, it counts as
        changed.
        """
        changed = self.unfinished_work().days
        told = {
            "batches": [[str(day), number] for day, number in sorted(batches)],
            "changed": sorted(map(str, changed)),
            "files": {str(day): self._worked_out(day) for day in {day for day, _ in batches} - changed},
        }
        self._write(self._path(_WORK), told)

    def unfinished_work(self) -> Work:
        """What was written down so, if it was not finished."""
        if not self._exists(path := self._path(_WORK)):
            return Work(batches=set(), days=set())
        told = json.loads(self._read(path))
        batches = {(date.fromisoformat(day), number) for day, number in told["batches"]}
        # What an earlier bide wrote tells of no files.
        before = told.get("files", {})
        changed = {day for day, _ in batches if self._worked_out(day) != before.get(str(day))}
        return Work(batches=batches, days=changed | set(map(date.fromisoformat, told.get("changed", ()))))

    def _worked_out(self, day: date) -> list[str]:
        """The files of what a round changes first and last of a day. No two that Spark writes have the same name."""
        found = []
        for table in ("messages", "lateness"):
            place = fs.FileSelector(self._path(table, f"day={day}"), allow_not_found=True, recursive=True)
            found += [one.path.removeprefix(self._root) for one in self._files.get_file_info(place) if one.is_file]
        return sorted(found)

    def finish_work(self) -> None:
        """Strike it out."""
        if self._exists(path := self._path(_WORK)):
            self._files.delete_file(path)

    def note(self, note: Note) -> None:
        """Write down what a batch has brought."""
        self._write(
            self._path(_NOTES, f"{note.name}.json"), {"rows": note.rows, "days": [str(day) for day in note.days]}
        )

    def notes(self) -> list[Note]:
        """The notes that were not struck out."""
        return [self._read_note(name) for name in self._note_names()]

    def noted(self) -> int:
        """Rows that the notes tell of, to show how far a round is. It may strike them out meanwhile."""
        rows = 0
        for name in self._note_names():
            with suppress(FileNotFoundError):
                rows += sum(self._read_note(name).rows.values())
        return rows

    def _note_names(self) -> list[str]:
        suffix = ".json"
        found = self._entries(self._path(_NOTES))
        return [name.removesuffix(suffix) for name in found if name.endswith(suffix)]

    def _read_note(self, name: str) -> Note:
        told = json.loads(self._read(self._path(_NOTES, f"{name}.json")))
        return Note(name=name, rows=told["rows"], days=tuple(date.fromisoformat(day) for day in told["days"]))

    def strike_out(self, notes: Iterable[Note]) -> None:
        """Delete notes, because all that follows from them is written."""
        for note in notes:
            self._files.delete_file(self._path(_NOTES, f"{note.name}.json"))

    def _path(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)

    def _exists(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type != fs.FileType.NotFound)

    def _entries(self, path: str) -> list[str]:
        found = self._files.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(one.base_name for one in found)

    def _read(self, path: str) -> bytes:
        with self._files.open_input_stream(path) as file:
            read: bytes = file.read()
            return read

    def _write(self, path: str, told: dict[str, Any]) -> None:
        """Write a file that appears with all that is in it or not at all."""
        self._files.create_dir(posixpath.dirname(path))
        new = f"{path}{_NEW}"
        with self._files.open_output_stream(new) as file:
            file.write(json.dumps(told, sort_keys=True).encode())
        self._files.move(new, path)


def _parts(table: str, batch: Batch) -> tuple[str, str, str]:
    day, number = batch
    return table, f"day={day}", f"batch={number}"
