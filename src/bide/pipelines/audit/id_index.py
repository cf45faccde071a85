"""Index of the message ids in the files of an audit, to find the files that have some.

For each file of a table, ``_state/ids`` has the sorted 64-bit digests of its message ids. Files of tables are never
changed, and their names are never reused. So the index is only a cache: what is missing is made again from the tables,
and what is left over is deleted.

Different ids with the same digest do no harm: a round reads a file that has none of its messages.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet

if TYPE_CHECKING:
    import duckdb

    from bide.pipelines.audit.folder import Folder
    from bide.pipelines.audit.table_files import TableFile

Digests = np.ndarray[Any, np.dtype[np.uint64]]
"""Sorted digests of message ids."""

IDS_SCHEMA: Final = pa.schema([("message_id", pa.string())])

_INDEX: Final = "_state/ids"
_SUFFIX: Final = ".arrow"
_NEW_FILE: Final = "_state/ids.new"
_SCHEMA: Final = pa.schema([("digest", pa.uint64())])
_QUERY: Final = """
    select distinct md5_number_lower(message_id) as digest from id_column where message_id is not null order by digest
"""


class IdIndex:
    """The index of an audit.

    Args:
        database: where digests are computed.
    """

    def __init__(self, folder: Folder, database: duckdb.DuckDBPyConnection) -> None:
        self._folder = folder
        self._database = database

    def digests_of_files(self, table: str, files: Iterable[TableFile]) -> Digests:
        """The digests of the messages in files."""
        return union_of_digests(self._read(table, one.path) for one in files)

    def digests_of_ids(self, ids: Iterable[pa.RecordBatch]) -> Digests:
        """The digests of messages, whose ids are in the only column."""
        self._database.register("id_column", pa.RecordBatchReader.from_batches(IDS_SCHEMA, ids))
        try:
            found = self._database.sql(_QUERY).to_arrow_table().column("digest")
        finally:
            self._database.unregister("id_column")
        digests: Digests = found.to_numpy()
        return digests

    def files_with(self, wanted: Digests, table: str, files: Iterable[TableFile]) -> list[TableFile]:
        """The files that have any of the messages with these digests."""
        return [one for one in files if _have_common(wanted, self._read(table, one.path))]

    def prune(self, table: str, day: date, files: Iterable[TableFile]) -> None:
        """Delete the index of all other files of a day."""
        kept = {posixpath.basename(_index_of(one.path)) for one in files}
        place = self._folder.path(_INDEX, table, f"day={day}")
        for name in self._folder.entries(place):
            if name not in kept:
                self._folder.files.delete_file(posixpath.join(place, name))

    def _read(self, table: str, file: str) -> Digests:
        index = self._folder.path(_INDEX, table, _index_of(file))
        try:
            with self._folder.files.open_input_file(index) as opened:
                digests: Digests = pa.ipc.open_file(opened).read_all().column("digest").to_numpy()
                return digests
        except (FileNotFoundError, pa.ArrowInvalid):  # the latter if it was cut off when the machine lost power
            return self._write(self._folder.path(table, file), index)

    def _write(self, source: str, index: str) -> Digests:
        files, new = self._folder.files, self._folder.path(_NEW_FILE)
        with files.open_input_file(source) as opened:
            digests = self.digests_of_ids(parquet.ParquetFile(opened).iter_batches(columns=IDS_SCHEMA.names))
        with files.open_output_stream(new) as output, pa.ipc.new_file(output, _SCHEMA) as writer:
            writer.write_table(pa.table([digests], schema=_SCHEMA))
        files.create_dir(posixpath.dirname(index))
        files.move(new, index)
        return digests


def _index_of(file: str) -> str:
    """The index of a file, in the folder of the day: folders of batches would stay behind, empty."""
    day, _, rest = file.partition("/")
    return f"{day}/{rest.replace('/', '-')}{_SUFFIX}"


def union_of_digests(some: Iterable[Digests]) -> Digests:
    """All of these digests."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *some]))


def _have_common(some: Digests, more: Digests) -> bool:
    few, many = sorted((some, more), key=len)
    if not len(few):
        return False
    places = np.minimum(np.searchsorted(many, few), len(many) - 1)
    return bool((many[places] == few).any())
