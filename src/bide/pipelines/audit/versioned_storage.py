"""Reading of tables of an audit by the list of files of their newest version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from datetime import date, datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import dataset, fs

from bide.pipelines.audit.columns import (
    APPENDED_TABLES,
    FACT_COLUMNS,
    FAILURES_STATE,
    PENDING_STATE,
    UNDECODABLE,
    arrow_schema,
    with_batch,
)
from bide.pipelines.audit.queries import BATCH

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder

WITH_FOLDERS_OF_BATCHES: Final = ("messages", PENDING_STATE)
"""Tables whose batches are replaced, so that no file has rows of several. Files of facts are merged instead."""

FACTS: Final = (*FACT_COLUMNS, UNDECODABLE)
TABLES: Final = (
    *(*FACTS, "messages", "lateness", "pending", "failures", "schedules_pending"),
    *(PENDING_STATE, FAILURES_STATE),
)
_STAGED: Final = "_state/staged"


class VersionedStorage(ABC):
    """The reading part of :class:`bide.pipelines.audit.storage.TableStorage`, for formats with versions of tables.

    Batches are rows with a number in the column ``batch``. The files are in Hive's folders of partitions.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def read(self, table: str, schema: pa.Schema, days: Collection[date] | None = None) -> pa.Table:
        return self.read_files(table, schema, self._paths(table, days))

    def read_files(
        self, table: str, schema: pa.Schema, files: Iterable[str], *, due: tuple[datetime, datetime] | None = None
    ) -> pa.Table:
        if not (paths := list(files)):
            return schema.empty_table()
        # Not by deltalake: it prepares each file of the table in Python, those of other days too. And its own file
        # system is in Python: Arrow's threads that still use it at exit abort the process. Nor by pyiceberg, which
        # would list the files again.
        found = dataset.dataset(
            paths,
            schema=schema,
            format="parquet",
            filesystem=fs.SubTreeFileSystem(self._folder.path(table), fs.LocalFileSystem()),
            partitioning=dataset.partitioning(
                pa.schema([one for one in schema if one.name in partition_columns(table, schema)]), flavor="hive"
            ),
        )
        span = None if due is None else (dataset.field("due") >= due[0]) & (dataset.field("due") <= due[1])
        return found.to_table(columns=schema.names, filter=span)

    def staging(self, table: str) -> str:
        return f"{_STAGED}/{table}"

    def _staged_rows(self, table: str) -> dataset.Dataset | None:
        """The staged rows of a table, with their batch; None if there are none."""
        if not self._folder.exists(staged := self._folder.path(self.staging(table))):
            return None
        schema = with_batch(arrow_schema(APPENDED_TABLES[table]))
        partitions = pa.schema([schema.field("day"), schema.field(BATCH)])
        return dataset.dataset(
            staged,
            schema=schema,
            format="parquet",
            filesystem=fs.LocalFileSystem(),
            partitioning=dataset.partitioning(partitions, flavor="hive"),
        )

    def _delete_staged_rows(self, table: str) -> None:
        if self._folder.exists(staged := self._folder.path(self.staging(table))):
            self._folder.files.delete_dir(staged)

    @abstractmethod
    def _paths(self, table: str, days: Collection[date] | None) -> list[str]:
        """The files of the newest version of a table, or only those of these days, as paths in its folder."""


def partition_columns(table: str, schema: pa.Schema) -> list[str]:
    """The columns of a table that are partition columns."""
    names = ("source", "day", BATCH) if table in WITH_FOLDERS_OF_BATCHES else ("source", "day")
    return [one for one in names if one in schema.names]


def with_batch_number(rows: pa.Table, batch: int) -> pa.Table:
    """The rows with the column ``batch``."""
    return rows.append_column(BATCH, pa.repeat(pa.scalar(batch, pa.int64()), rows.num_rows))


def split_source(table: str) -> tuple[str, dict[str, str]]:
    """The name of a table, and the source in a name such as ``undecodable/source=events``, as a column."""
    name, _, source = table.partition("/source=")
    return name, {"source": source} if source else {}


def with_columns(rows: pa.Table, values: dict[str, str]) -> pa.Table:
    """The rows with more columns, which have the same value in all rows."""
    for column, value in values.items():
        rows = rows.append_column(column, pa.repeat(pa.scalar(value), rows.num_rows))
    return rows
