"""A publisher of arbitrary bytes by the stream protocol."""

from __future__ import annotations

import gzip
import struct
import time

from bide.streams import frames
from bide.streams.connection import StreamConnection
from bide.streams.frames import Fields
from bide.streams.log import Address
from tests.timeouts import TIMEOUT

_PUBLISHER = 1


def message(data: bytes) -> bytes:
    """An entry with one message."""
    return struct.pack(">I", len(data)) + data


def batch(messages: list[bytes], *, compression: int = 0, records: int | None = None) -> bytes:
    """An entry with several messages; *records* is the number in its header."""
    raw = b"".join(map(message, messages))
    packed = gzip.compress(raw) if compression == 1 else raw
    count = len(messages) if records is None else records
    return any_batch(packed, compression=compression, records=count, unpacked=len(raw))


def any_batch(packed: bytes, *, compression: int, records: int, unpacked: int) -> bytes:
    """An entry with an arbitrary header."""
    return struct.pack(">BHII", 0x80 | compression << 4, records, unpacked, len(packed)) + packed


class _Publisher(StreamConnection):
    def publish_entries(self, stream: str, entries: list[bytes]) -> set[int]:
        self.declare_publisher(stream, "")
        self._confirmed: set[int] = set()
        self._refused: set[int] = set()
        for number, entry in enumerate(entries):
            head = struct.pack(">BIQ", _PUBLISHER, 1, number)
            self._send(frames.frame(frames.PUBLISH, head, entry))
            deadline = time.monotonic() + TIMEOUT
            while number not in self._confirmed | self._refused:
                self._dispatch(*self._receive_frame(deadline))
        return self._refused

    def _dispatch(self, key: int, fields: Fields) -> None:
        if key not in (frames.PUBLISH_CONFIRM, frames.PUBLISH_ERROR):
            super()._dispatch(key, fields)
            return
        fields.uint8()
        for _ in range(fields.uint32()):
            if key == frames.PUBLISH_CONFIRM:
                self._confirmed.add(fields.int64())
            else:
                self._refused.add(fields.int64())
                fields.uint16()


def publish(address: Address, stream: str, entries: list[bytes]) -> list[bytes]:
    """Publish entries one after the other, and wait for the confirm of each.

    Returns:
        Those that the broker took: from 4.3 on it refuses some whose header cannot be true.
    """
    with _Publisher(address.url, (address.url.hosts[0][0], address.port)) as connection:
        refused = connection.publish_entries(stream, entries)
    return [entry for number, entry in enumerate(entries) if number not in refused]
