"""Buffer of record batches, in memory or in a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

MAX_IN_MEMORY: Final = 64 << 20
"""Bytes that are kept in memory before a file is used."""


class Spool:
    """Buffers record batches of the same schema, and returns them in order, any number of times.

    The file has no name, so that it disappears with the process, even a killed one. If ``SPARK_LOCAL_DIRS`` is set, the
    file is in the first of these folders, to which Spark spills, too. Otherwise it is in the system's temporary folder.
    """

    def __init__(self) -> None:
        folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
        self._file: Any = tempfile.SpooledTemporaryFile(  # noqa: SIM115 (closed at the end of the block)
            max_size=MAX_IN_MEMORY,
            dir=folder if os.path.isdir(folder) else None,  # noqa: PTH112 (Path("") is the current folder)
        )
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, batch: pa.RecordBatch) -> None:
        """Append a batch."""
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all batches. After the first call, :meth:`put` must not be called again."""
        if self._writer is None:
            return
        self._writer.close()
        self._file.seek(0)
        yield from pa.ipc.open_stream(self._file)
