"""Chunks: what a stream stores and sends at once, a few or some thousand messages with one time stamp."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from bide.errors import ProtocolError, UndecodableMessageError

HEADER: Final = struct.Struct(">BBHIqQQIIIB3x")
"""Magic and version, type, entries, records, time stamp, epoch, first offset, checksum, lengths of data and trailer."""

_MAGIC: Final = 0x50
_LENGTH: Final = struct.Struct(">I")
_BATCH: Final = struct.Struct(">BHII")

Unpack = Callable[[int, bytes, int], bytes]
"""Unpacks a batch of messages: from the number of the compression, the packed bytes, and the unpacked length."""

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")


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
        unpacked = unpacker.decompress(data, length)
    except zlib.error as error:
        raise UndecodableMessageError(f"a batch of messages packed by {name} cannot be unpacked: {error}") from error
    if len(unpacked) != length or unpacker.unconsumed_tail:
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

    def messages(self, unpack: Unpack = unpack_gzip) -> Iterator[bytes]:
        """The encoded messages, one for each offset.

        Raises:
            ProtocolError: they are not as many as the header says.
            UndecodableMessageError: a batch cannot be unpacked.
        """
        data, at, found = self.data, 0, 0
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
                start = at + _BATCH.size
                at = start + packed
                batch = unpack((kind & 0x70) >> 4, data[start:at], unpacked)
                inner = 0
                for _ in range(records):
                    (size,) = size_of(batch, inner)
                    inner += 4 + size
                    found += 1
                    yield batch[inner - size : inner]
        except struct.error:
            found = -1
        if found != self.count or at != len(data):
            raise ProtocolError(f"the chunk at offset {self.first:,} does not hold the {self.count:,} messages it says")
