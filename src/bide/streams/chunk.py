"""Chunks: the batches of messages that a stream stores and sends, with one timestamp each."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from bide.errors import ProtocolError, UndecodableMessageError

HEADER: Final = struct.Struct(">BBHIqQQIIIB3x")
"""Magic and version, type, entries, records, time stamp, epoch, first offset, checksum, lengths of data and trailer."""

_MAGIC: Final = 0x50
_LENGTH: Final = struct.Struct(">I")
_BATCH: Final = struct.Struct(">BHII")

Unpack = Callable[[int, bytes, int], bytes]
"""Unpacks a batch of messages: from the number of the compression, the packed bytes, and the unpacked length."""

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

MOST_OF_BATCH: Final = 64 << 20
"""Bytes that one batch may have unpacked: it is in memory as a whole. RabbitMQ 4.3 refuses larger ones itself
(``stream.max_uncompressed_sub_entry_batch_size``)."""

MOST_OF_CHUNK: Final = 1 << 30
"""Bytes that the batches of one chunk may have unpacked, one after the other."""


class Undecodable(NamedTuple):
    """A batch of messages that cannot be read, in the place of its first message.

    Attributes:
        data: the entry as the chunk has it, with its header.
        reason: why it cannot be read.
    """

    data: bytes
    reason: str


def unpack_gzip(compression: int, data: bytes, length: int) -> bytes:
    """Unpack what the standard library can: nothing, and gzip.

    Raises:
        UndecodableMessageError: it is packed in another way, or not what its header says.
    """
    if compression == 0:
        return data
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else str(compression)
    if compression != 1:
        raise UndecodableMessageError(f"a batch of messages is packed by {name}, which is not read here")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        # One byte more than announced: a bound of 0 would be none, and the rest of the stream has a checksum.
        unpacked = unpacker.decompress(data, length + 1)
    except zlib.error as error:
        raise UndecodableMessageError(f"a batch of messages packed by {name} cannot be unpacked: {error}") from error
    if len(unpacked) != length or not unpacker.eof:
        raise UndecodableMessageError(f"a batch of messages packed by {name} is not {length:,} bytes, as it says")
    return unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk of messages.

    Attributes:
        first: the offset of its first message.
        count: how many messages are in it; their offsets follow one another.
        timestamp: when the broker stored it, milliseconds since 1970.
        entries: how many entries its data have; one may hold a batch of messages.
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
        """Read a chunk from the place in a frame where it begins.

        Raises:
            ProtocolError: it is not one, or its checksum is wrong.
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
            raise ProtocolError(f"the chunk at offset {first:,} came with a wrong checksum: it was damaged on its way")
        return cls(first=first, count=count, timestamp=timestamp, entries=entries, data=data)

    def messages(self, unpack: Unpack = unpack_gzip) -> Iterator[bytes | Undecodable | None]:
        """The encoded messages, one for each offset.

        The broker takes the number of messages in a batch from its publisher, and gives them as many offsets. A batch
        that cannot be read is :class:`Undecodable` at its first offset, and None at the others.

        Raises:
            ProtocolError: they are not as many as the header says.
        """
        data, at, found, left = self.data, 0, 0, MOST_OF_CHUNK
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
                kind, records, unpacked, packed = _BATCH.unpack_from(data, at)
                begun, start = at, at + _BATCH.size
                at = start + packed
                found += records
                if at > len(data):
                    break
                if not records:
                    # No offset is its own.
                    continue
                try:
                    batch = _unpacked(unpack, (kind & 0x70) >> 4, data[start:at], unpacked, left)
                    _check_count(batch, records)
                except UndecodableMessageError as error:
                    yield Undecodable(data[begun:at], str(error))
                    for _ in range(records - 1):
                        yield None
                    continue
                left -= len(batch)
                inner = 0
                for _ in range(records):
                    (size,) = size_of(batch, inner)
                    inner += 4 + size
                    yield batch[inner - size : inner]
        except struct.error:
            found = -1
        if found != self.count or at != len(data):
            raise ProtocolError(f"the chunk at offset {self.first:,} does not hold the {self.count:,} messages it says")


def _unpacked(unpack: Unpack, compression: int, packed: bytes, length: int, left: int) -> bytes:
    """The bytes of a batch.

    Args:
        length: that it says it has.
        left: that the chunk may still have.

    Raises:
        UndecodableMessageError: it has more, or cannot be unpacked.
    """
    if compression and length > min(MOST_OF_BATCH, left):
        limit = f"{MOST_OF_BATCH:,} bytes" if length > MOST_OF_BATCH else f"{MOST_OF_CHUNK:,} bytes, with its chunk"
        raise UndecodableMessageError(f"a batch of messages says that it unpacks to {length:,} bytes, over {limit}")
    return unpack(compression, packed, length)


def _check_count(batch: bytes, records: int) -> None:
    """Check that a batch consists of exactly this many messages.

    Raises:
        UndecodableMessageError: it does not.
    """
    at = found = 0
    end = len(batch) - 4
    while at <= end and found <= records:
        at += 4 + int.from_bytes(batch[at : at + 4])
        found += 1
    if at != len(batch) or found != records:
        raise UndecodableMessageError(f"a batch of messages does not consist of {records:,}, as it says")
