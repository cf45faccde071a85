"""Messages of streams as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from bide.errors import UndecodableMessageError
from bide.spark.stream_rows import MessageRow, RowReader
from bide.streams.chunk import COMPRESSIONS, Chunk, Undecodable, decompress_gzip

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 8 << 20
"""Limits of a record batch. It has at least one row, however large."""

_BY_ARROW: Final = frozenset({"lz4", "zstd"})


def decompress(compression: int, data: bytes, length: int) -> bytes:
    """Decompress a sub-entry batch.

    Raises:
        UndecodableMessageError: the compression is not supported (snappy), or the data do not match the header of the
            batch.
    """
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else ""
    if name not in _BY_ARROW:
        return decompress_gzip(compression, data, length)
    try:
        # pa.decompress is unsafe here: it pads a result shorter than announced with uninitialized memory.
        with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
            raw: bytes = stream.read(length + 1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UndecodableMessageError(
            f"a sub-entry batch compressed with {name} cannot be decompressed: {error}"
        ) from error
    if len(raw) != length:
        raise UndecodableMessageError(
            f"a sub-entry batch compressed with {name} does not have the {length:,} bytes that its header states"
        )
    return raw


class RecordBatchBuilder:
    """Converts the chunks of one stream into record batches with the columns of a schema.

    Args:
        raw: whether undecodable messages become rows, rather than an error.
    """

    def __init__(self, schema: pa.Schema, stream: str, *, raw: bool) -> None:
        self._schema = schema
        self._stream = stream
        self._raw = raw
        self._reader = RowReader(set(schema.names))
        self._rows: list[MessageRow] = []
        self._offsets: list[int] = []
        self._timestamps: list[int] = []
        self._bytes = 0

    def add(self, chunk: Chunk, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Add the messages of a chunk from index *first* up to but not including *last*; yields each full record batch.

        Raises:
            UndecodableMessageError: a message cannot be decoded, and ``raw`` is false.
        """
        timestamp = chunk.timestamp * 1000
        rows, read = self._rows, self._reader.read
        for offset, data in enumerate(islice(chunk.messages(decompress), first, last), chunk.first + first):
            if data is None:
                # Part of an undecodable sub-entry batch, which is one row, at its first offset.
                continue
            try:
                if isinstance(data, Undecodable):
                    raise UndecodableMessageError(data.reason)
                row = read(data)
            except UndecodableMessageError as error:
                row = self._undecodable(data, offset, error)
            rows.append(row)
            self._offsets.append(offset)
            self._timestamps.append(timestamp)
            self._bytes += len(data) if row.undecodable is None else len(row.value)
            if self._bytes >= MAX_BYTES or len(rows) >= MAX_ROWS:
                yield self.take()
                rows = self._rows

    def _undecodable(self, data: bytes | Undecodable, offset: int, error: UndecodableMessageError) -> MessageRow:
        if not self._raw:
            raise UndecodableMessageError(
                f"the message at offset {offset:,} of stream {self._stream!r} cannot be decoded: {error}. To read such "
                "messages as raw bytes, set the option undecodable=raw"
            ) from error
        return MessageRow(data.data if isinstance(data, Undecodable) else data, undecodable=str(error))

    @property
    def rows(self) -> int:
        """The number of rows in the batch so far."""
        return len(self._rows)

    def take(self) -> pa.RecordBatch:
        """Return the rows so far as a batch, and start a new one."""
        columns: dict[str, Any] = dict(zip(MessageRow._fields, zip(*self._rows, strict=True), strict=False))
        columns["offset"] = self._offsets
        columns["timestamp"] = self._timestamps
        columns["stream"] = pa.repeat(self._stream, len(self._rows))
        arrays = [pa.array(columns[field.name], type=field.type) for field in self._schema]
        self._rows, self._offsets, self._timestamps, self._bytes = [], [], [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
