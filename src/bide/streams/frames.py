"""Frames of the RabbitMQ stream protocol that readers and publishers send and receive."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bide.errors import (
    AccessRefusedError,
    AuthenticationError,
    BrokerError,
    ConnectionLostError,
    ProtocolError,
    TargetNotFoundError,
    VirtualHostError,
)

DECLARE_PUBLISHER: Final = 0x01
PUBLISH: Final = 0x02
PUBLISH_CONFIRM: Final = 0x03
PUBLISH_ERROR: Final = 0x04
QUERY_PUBLISHER_SEQUENCE: Final = 0x05
SUBSCRIBE: Final = 0x07
DELIVER: Final = 0x08
CREDIT: Final = 0x09
UNSUBSCRIBE: Final = 0x0C
METADATA: Final = 0x0F
METADATA_UPDATE: Final = 0x10
PEER_PROPERTIES: Final = 0x11
SASL_HANDSHAKE: Final = 0x12
SASL_AUTHENTICATE: Final = 0x13
TUNE: Final = 0x14
OPEN: Final = 0x15
CLOSE: Final = 0x16
HEARTBEAT: Final = 0x17
PARTITIONS: Final = 0x19
STREAM_STATS: Final = 0x1C
RESPONSE: Final = 0x8000
"""The bit of a key that marks a response."""

OK: Final = 1
NO_SUCH_STREAM: Final = 2
STREAM_NOT_AVAILABLE: Final = 6
VHOST_FAILURE: Final = 0x0C
ACCESS_REFUSED: Final = 0x10
NO_SUCH_PUBLISHER: Final = 0x12
AUTHENTICATION_FAILURES: Final = frozenset({0x08, 0x0B})

CODES: Final = {
    0x01: "ok",
    0x02: "stream does not exist",
    0x03: "subscription id already exists",
    0x04: "subscription id does not exist",
    0x05: "stream already exists",
    0x06: "stream not available",
    0x07: "SASL mechanism not supported",
    0x08: "authentication failure",
    0x09: "SASL error",
    0x0A: "SASL challenge",
    0x0B: "this user may log in from the broker's own machine only",
    0x0C: "virtual host access failure",
    0x0D: "unknown frame",
    0x0E: "frame too large",
    0x0F: "internal error",
    0x10: "access refused",
    0x11: "precondition failed",
    0x12: "publisher does not exist",
    0x13: "no offset",
}

FIRST: Final = struct.pack(">H", 1)
LAST: Final = struct.pack(">H", 2)
"""Positions to subscribe from: the first chunk, and the last one."""

PUBLISH_OVERHEAD: Final = 13
"""Bytes of a Publish frame beside its messages."""

MESSAGE_OVERHEAD: Final = 12
"""Bytes of a message in a Publish frame beside its contents."""

_HEAD: Final = struct.Struct(">HH")
_LONG: Final = struct.Struct(">I")
_SHORT: Final = struct.Struct(">H")
_PUBLISHED: Final = struct.Struct(">QI")


def at_offset(offset: int) -> bytes:
    """The position of the chunk that holds this offset."""
    return struct.pack(">HQ", 4, offset)


def at_time(milliseconds: int) -> bytes:
    """The position of the first chunk stored at this time or later, in milliseconds since 1970."""
    return struct.pack(">Hq", 5, milliseconds)


def string(text: str) -> bytes:
    """Encode a string.

    Raises:
        ProtocolError: the string is longer than 32,767 bytes of UTF-8.
    """
    data = text.encode()
    if len(data) > 0x7FFF:
        raise ProtocolError(f"a text of {len(data):,} bytes is too long for the stream protocol: the limit is 32,767")
    return _SHORT.pack(len(data)) + data


def frame(key: int, *parts: bytes) -> bytes:
    """Encode a frame."""
    body = b"".join(parts)
    return _LONG.pack(len(body) + 4) + _HEAD.pack(key, 1) + body


def request(key: int, correlation_id: int, *parts: bytes) -> bytes:
    """Encode a request, which the broker answers with the same correlation id."""
    return frame(key, _LONG.pack(correlation_id), *parts)


def properties(pairs: Mapping[str, str]) -> bytes:
    """Encode a map of strings."""
    return _LONG.pack(len(pairs)) + b"".join(string(name) + string(value) for name, value in pairs.items())


def strings(texts: Sequence[str]) -> bytes:
    """Encode a list of strings."""
    return _LONG.pack(len(texts)) + b"".join(string(text) for text in texts)


def credit(subscription: int, chunks: int) -> bytes:
    """Encode a Credit frame, which lets the broker send this many more chunks."""
    return frame(CREDIT, struct.pack(">BH", subscription, chunks))


def subscribe(correlation_id: int, subscription: int, stream: str, position: bytes, credit: int) -> bytes:
    """Encode a Subscribe request, with a position and the credit for the first chunks."""
    parts = (struct.pack(">B", subscription), string(stream), position, struct.pack(">HI", credit, 0))
    return request(SUBSCRIBE, correlation_id, *parts)


def publish(publisher: int, first: int, messages: Sequence[bytes]) -> bytes:
    """Encode a Publish frame, from encoded messages with consecutive publishing ids."""
    parts = [struct.pack(">BI", publisher, len(messages))]
    for number, data in enumerate(messages, first):
        parts += (_PUBLISHED.pack(number, len(data)), data)
    return frame(PUBLISH, *parts)


class Fields:
    """The fields of a frame, decoded one after the other.

    Each method that reads a field raises :class:`~bide.errors.ProtocolError` when the frame ends too early.
    """

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self._at = at

    @property
    def rest(self) -> tuple[bytes, int]:
        """The frame, and the index of its first byte that has not been read."""
        return self._data, self._at

    def skip(self, size: int) -> None:
        """Skip this many bytes."""
        self._at += size

    def _take(self, form: str) -> int:
        try:
            (value,) = struct.unpack_from(form, self._data, self._at)
        except struct.error:
            raise ProtocolError("a frame of the stream protocol ends too early") from None
        self._at += struct.calcsize(form)
        return int(value)

    def uint8(self) -> int:
        """One byte."""
        return self._take(">B")

    def uint16(self) -> int:
        """Two bytes."""
        return self._take(">H")

    def uint32(self) -> int:
        """Four bytes."""
        return self._take(">I")

    def int64(self) -> int:
        """Eight bytes, signed."""
        return self._take(">q")

    def int64s(self) -> list[int]:
        """A list of values of eight bytes, signed."""
        form = f">{self.uint32()}q"
        try:
            values = struct.unpack_from(form, self._data, self._at)
        except struct.error:
            raise ProtocolError("a frame of the stream protocol ends too early") from None
        self._at += struct.calcsize(form)
        return list(values)

    def string(self) -> str:
        """A string; null is read as an empty one."""
        length = self._take(">h")
        if length < 0:
            return ""
        end = self._at + length
        if end > len(self._data):
            raise ProtocolError("a frame of the stream protocol ends too early")
        text = self._data[self._at : end].decode("utf-8", "replace")
        self._at = end
        return text

    def strings(self) -> list[str]:
        """A list of strings."""
        return [self.string() for _ in range(self.uint32())]

    def properties(self) -> dict[str, str]:
        """A map of strings."""
        return {self.string(): self.string() for _ in range(self.uint32())}

    def statistics(self) -> dict[str, int]:
        """A map of numbers."""
        return {self.string(): self.int64() for _ in range(self.uint32())}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMetadata:
    """Leader and replicas of a stream.

    Attributes:
        code: a response code; unless it is ``OK``, the other attributes are empty.
        leader: host and port of the leader; None while the stream has none.
        replicas: host and port of each replica.
    """

    code: int
    leader: tuple[str, int] | None
    replicas: tuple[tuple[str, int], ...]


def metadata(fields: Fields) -> dict[str, StreamMetadata]:
    """Decode the response to a Metadata request."""
    brokers = {}
    for _ in range(fields.uint32()):
        reference = fields.uint16()
        brokers[reference] = (fields.string(), fields.uint32())
    streams = {}
    for _ in range(fields.uint32()):
        name, code, leader = fields.string(), fields.uint16(), fields.uint16()
        references = [fields.uint16() for _ in range(fields.uint32())]
        streams[name] = StreamMetadata(
            code=code,
            leader=brokers.get(leader),
            replicas=tuple(brokers[one] for one in references if one in brokers),
        )
    return streams


def refusal(code: int, what: str) -> BrokerError:
    """The error for a response code.

    Args:
        what: the start of the error message, such as "the broker at localhost:5552 refused stream 's'".
    """
    kind: type[BrokerError] = BrokerError
    if code in AUTHENTICATION_FAILURES:
        kind = AuthenticationError
    elif code == VHOST_FAILURE:
        kind = VirtualHostError
    elif code == NO_SUCH_STREAM:
        kind = TargetNotFoundError
    elif code == ACCESS_REFUSED:
        kind = AccessRefusedError
    elif code in (STREAM_NOT_AVAILABLE, NO_SUCH_PUBLISHER):
        # A leader is being elected or starting, or has moved: the caller may retry, as after a lost connection.
        kind = ConnectionLostError
    return kind(f"{what}: {CODES.get(code, f'code {code:#04x}')}")
