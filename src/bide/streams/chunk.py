"""Chunks: the units in which a stream stores and delivers messages, with one timestamp each."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from bide.errors import ProtocolError, UndecodableMessageError

HEADER: Final = struct.Struct(">BBHIqQQIIIB3x")
"""Magic and version, type, entries, records, timestamp, epoch, first offset, checksum, lengths of data and trailer."""

_MAGIC: Final = 0x50
_LENGTH: Final = struct.Struct(">I")
_BATCH: Final = struct.Struct(">BHII")

Decompress = Callable[[int, bytes, int], bytes]
"""Decompresses a sub-entry batch, given the number of the compression, the compressed bytes, and the length of the
result."""

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

MAX_BATCH_SIZE: Final = 64 << 20
"""Limit on the decompressed size of a sub-entry batch in bytes, because a batch is in memory as a whole. RabbitMQ 4.3
rejects larger batches itself (``stream.max_uncompressed_sub_entry_batch_size``)."""

MAX_CHUNK_SIZE: Final = 1 << 30
"""Limit on the sum of the decompressed sizes of the sub-entry batches in one chunk, in bytes."""


class Undecodable(NamedTuple):
    """A sub-entry batch that cannot be decompressed; it takes the place of its first message.

    Attributes:
        data: the entry of the chunk, with its header.
        reason: why the batch cannot be decompressed.
    """

    data: bytes
    reason: str


def decompress_gzip(compression: int, data: bytes, length: int) -> bytes:
    """Decompress a sub-entry batch that is compressed with gzip, or not at all, with the standard library.

    Raises:
        UndecodableMessageError: the batch has another compression, or its data do not match its header.
    """
    if compression == 0:
        return data
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else str(compression)
    if compression != 1:
        raise UndecodableMessageError(f"a sub-entry batch is compressed with {name}, which is not supported here")
    decompressor = zlib.decompressobj(wbits=31)
    try:
        # One byte more than announced, because zlib reads 0 as "no limit" and has to reach the checksum at the end.
        raw = decompressor.decompress(data, length + 1)
    except zlib.error as error:
        raise UndecodableMessageError(
            f"a sub-entry batch compressed with {name} cannot be decompressed: {error}"
        ) from error
    if len(raw) != length or not decompressor.eof:
        raise UndecodableMessageError(
            f"a sub-entry batch compressed with {name} does not have the {length:,} bytes that its header states, or "
            "is incomplete"
        )
    return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk of messages.

    Attributes:
        first: the offset of its first message.
        count: the number of messages, whose offsets are consecutive.
        timestamp: when the broker stored the chunk, in milliseconds since 1970.
        entries: the number of entries. An entry is a message, or a sub-entry batch: several messages, often compressed.
        data: the entries.
    """

    first: int
    count: int
    timestamp: int
    entries: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self.first + self.count

    @classmethod
    def read(cls, frame: bytes, at: int) -> Chunk:
        """Read the chunk that begins at the index *at* of a frame.

        Raises:
            ProtocolError: the bytes are not a chunk, or the checksum is wrong.
        """
        try:
            magic, kind, entries, count, timestamp, _, first, checksum, length, _, _ = HEADER.unpack_from(frame, at)
        except struct.error:
            raise ProtocolError("a chunk of a stream ends within its header") from None
        if magic & 0xF0 != _MAGIC or kind != 0:
            raise ProtocolError(
                f"a chunk of a stream begins with {magic:#04x} {kind:#04x}, which is not a message chunk"
            )
        start = at + HEADER.size
        data = frame[start : start + length]
        if len(data) != length:
            raise ProtocolError(f"the chunk at offset {first:,} has {len(data):,} bytes of {length:,}")
        if zlib.crc32(data) != checksum:
            raise ProtocolError(f"the chunk at offset {first:,} has a wrong checksum: it was damaged on its way")
        return cls(first=first, count=count, timestamp=timestamp, entries=entries, data=data)

    def messages(self, decompress: Decompress = decompress_gzip) -> Iterator[bytes | Undecodable | None]:
        """The encoded messages, one for each offset.

        The publisher of a sub-entry batch states how many messages it has, and the broker reserves that many offsets. A
        batch that cannot be decompressed yields an :class:`Undecodable` at its first offset, and None at the others.

        Raises:
            ProtocolError: the number of messages differs from the one in the header.
        """
        data, at, found, remaining = self.data, 0, 0, MAX_CHUNK_SIZE
        size_of = _LENGTH.unpack_from
        try:
            for _ in range(self.entries):
                (size,) = size_of(data, at)
                if size < 0x80000000:
                    at += 4 + size
                    if at > len(data):
                        break
                    found += 1
                    yield data[at - size : at]
                    continue
                kind, records, raw_size, size = _BATCH.unpack_from(data, at)
                entry, start = at, at + _BATCH.size
                at = start + size
                found += records
                if at > len(data):
                    break
                if not records:
                    # An empty batch has no offset at which it could be reported.
                    continue
                try:
                    batch = _decompress(decompress, (kind & 0x70) >> 4, data[start:at], raw_size, remaining)
                    _check_count(batch, records)
                except UndecodableMessageError as error:
                    yield Undecodable(data[entry:at], str(error))
                    for _ in range(records - 1):
                        yield None
                    continue
                remaining -= len(batch)
                inner = 0
                for _ in range(records):
                    (size,) = size_of(batch, inner)
                    inner += 4 + size
                    yield batch[inner - size : inner]
        except struct.error:
            found = -1
        if found != self.count or at != len(data):
            raise ProtocolError(
                f"the chunk at offset {self.first:,} does not hold the {self.count:,} messages that its header states"
            )


def _decompress(decompress: Decompress, compression: int, data: bytes, length: int, remaining: int) -> bytes:
    """The decompressed bytes of a sub-entry batch.

    Args:
        length: the number of decompressed bytes that the header of the batch states.
        remaining: bytes left until the limit of the chunk.

    Raises:
        UndecodableMessageError: the batch exceeds a limit, or cannot be decompressed.
    """
    if compression and length > min(MAX_BATCH_SIZE, remaining):
        limit = (
            f"the limit of {MAX_BATCH_SIZE:,} bytes"
            if length > MAX_BATCH_SIZE
            else f"the limit of {MAX_CHUNK_SIZE:,} bytes for all batches of a chunk"
        )
        raise UndecodableMessageError(f"a sub-entry batch decompresses to {length:,} bytes, over {limit}")
    return decompress(compression, data, length)


def _check_count(batch: bytes, records: int) -> None:
    """Check that a sub-entry batch consists of exactly this many messages.

    Raises:
        UndecodableMessageError: the batch has more or fewer messages.
    """
    at = found = 0
    end = len(batch) - 4
    while at <= end and found <= records:
        at += 4 + int.from_bytes(batch[at : at + 4])
        found += 1
    if at != len(batch) or found != records:
        raise UndecodableMessageError(
            f"a sub-entry batch does not consist of the {records:,} messages that its header states"
        )
