"""Rejected rows, in files that Spark can read and the sink can send again."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from bide.errors import InvalidInputError

STATUS_COLUMN: Final = "reject_status"
REASON_COLUMN: Final = "reject_reason"


class Rejects:
    """The rejected rows of one task, in one Parquet file that appears after the last row of the task.

    A retried task replaces the file of the previous attempt. The file of an unfinished attempt has a name with a
    leading underscore, which Spark ignores.

    Args:
        folder: a URI or an absolute path that all tasks can access.
        name: the name of the file, the same for each attempt.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._files, root = fs.FileSystem.from_uri(folder)
        self._root = root
        self._final = posixpath.join(root, f"{name}.parquet")
        self._temporary = posixpath.join(root, f"_{name}.{uuid4().hex[:8]}.tmp")
        self._writer: Any = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if error is not None:
            if self._writer is not None:
                self._files.delete_file(self._temporary)
        elif self._writer is not None:
            self._files.move(self._temporary, self._final)
        elif self._files.get_file_info(self._final).type != fs.FileType.NotFound:
            # The file of an earlier attempt. This attempt has rejected no rows.
            self._files.delete_file(self._final)

    def add(self, batch: pa.RecordBatch, found: Mapping[int, tuple[str, str, str | None]]) -> None:
        """Write rows of a batch to the file.

        Args:
            found: index of a row in the batch -> status in one word, reason, and the message id with which the row was
                published. None if it was not published: the file then has the row's own message id, if there is one.

        Raises:
            InvalidInputError: the folder or the file cannot be created.
        """
        places = sorted(found)
        rows = batch.take(pa.array(places, pa.int64()))
        for name in ("delay", "expiration"):
            rows = _with_whole_milliseconds(rows, name)
        used = pa.array([found[place][2] for place in places], pa.string())
        if "message_id" in rows.schema.names:
            used = pc.coalesce(used, rows.column("message_id").cast(pa.string()))
        rows = _with(rows, "message_id", used)
        rows = _with(rows, STATUS_COLUMN, pa.array([found[place][0] for place in places], pa.string()))
        rows = _with(rows, REASON_COLUMN, pa.array([found[place][1] for place in places], pa.string()))
        if self._writer is None:
            # A column without nulls in this batch may have some in the next.
            schema = pa.schema([one.with_nullable(True) for one in rows.schema])
            try:
                self._files.create_dir(self._root, recursive=True)
                self._writer = pq.ParquetWriter(self._temporary, schema, filesystem=self._files)
            except OSError as error:
                raise InvalidInputError(
                    f"the folder {self._root!r} for rejects cannot be used: {error}. Name another folder"
                ) from error
        self._writer.write_table(pa.Table.from_batches([rows]).cast(self._writer.schema))
        self.count += len(places)


def _with(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    place = rows.schema.get_field_index(name)
    return rows.append_column(name, column) if place < 0 else rows.set_column(place, name, column)


def _with_whole_milliseconds(rows: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Convert durations to milliseconds, the unit of integers in the sink. Spark would read them as microseconds."""
    place = rows.schema.get_field_index(name)
    if place < 0 or not pa.types.is_duration(rows.schema.field(place).type):
        return rows
    microseconds = pc.cast(rows.column(place), pa.int64())
    # Rounded up, so that a message is never early.
    milliseconds = pc.negate(
        pc.cast(pc.floor(pc.divide(pc.cast(pc.negate(microseconds), pa.float64()), 1_000.0)), pa.int64())
    )
    return rows.set_column(place, name, milliseconds)
