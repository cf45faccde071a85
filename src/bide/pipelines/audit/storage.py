"""Tables of an audit as Arrow tables, in the format of its folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date, datetime
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from bide.pipelines.audit.parquet_storage import ParquetStorage
from bide.pipelines.audit.table_files import TableFile
from bide.pipelines.audit.unfinished_work import BatchKey

if TYPE_CHECKING:
    from bide.pipelines.audit.folder import Folder


class TableStorage(Protocol):
    """The tables of an audit. Rows have the column ``day``, except those of tables that are not partitioned."""

    def read(self, table: str, schema: pa.Schema, days: Collection[date] | None = None) -> pa.Table:
        """Read the rows of these days, or of all days. The column ``batch`` is added if the schema has it.

        A table that does not exist has no rows.
        """
        ...

    def files(self, table: str, day: date) -> list[TableFile]:
        """The files of a day of a table with batches."""
        ...

    def read_files(
        self, table: str, schema: pa.Schema, files: Iterable[str], *, due: tuple[datetime, datetime] | None = None
    ) -> pa.Table:
        """Read the rows of files. The column ``batch`` is added if the schema has it.

        Args:
            files: paths in the folder of the table.
            due: first and last due time; other rows may be left out.
        """
        ...

    def replace_batches(self, rows: pa.Table, table: str, batches: Collection[BatchKey]) -> None:
        """Replace the rows of these batches. The new rows are of these batches too, and have a column ``batch``."""
        ...

    def append(self, rows: pa.Table, table: str, batch: int) -> None:
        """Append the rows of a batch."""
        ...

    def drop_batch(self, table: str, number: int) -> None:
        """Delete the rows of a batch, appended and staged ones, if there are any."""
        ...

    def staging(self, table: str) -> str:
        """The folder for files ``day=*/batch=*/*.parquet`` that :meth:`append_staged` appends."""
        ...

    def append_staged(self, table: str, batch: int) -> None:
        """Append the staged rows of a batch."""
        ...

    def replace_days(self, rows: pa.Table, table: str, days: Collection[date]) -> None:
        """Replace all rows of these days in a table without batches."""
        ...

    def replace(self, rows: pa.Table, table: str) -> None:
        """Replace all rows of a table that is not partitioned."""
        ...

    def compact(self, days: Collection[date]) -> None:
        """Merge the small files of facts of these days, and delete files that are not needed any more."""
        ...


def open_storage(folder: Folder) -> TableStorage:
    """The tables of an audit.

    Raises:
        InvalidInputError: the package for the format is not installed.
    """
    if folder.table_format == "parquet":
        return ParquetStorage(folder)
    if folder.table_format == "delta":
        from bide.pipelines.audit.delta_storage import DeltaStorage

        return DeltaStorage(folder)
    from bide.pipelines.audit.iceberg_storage import IcebergStorage

    return IcebergStorage(folder)
