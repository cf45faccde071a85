"""Pre-encoded frames of similar messages, completed with the fields that differ.

Encoding a publish field by field takes more time than the rest of the publish, and similar messages have most of these
bytes in common.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from bide.amqp import codec

_HEAD: Final = struct.Struct(">BHI")
_CONTENT: Final = struct.Struct(">BHIHHQH")
_SIZE: Final = struct.Struct(">I")
_END: Final = bytes((codec.FRAME_END,))
_LENGTHS: Final = tuple(bytes((length,)) for length in range(256))

_FLAGS: Final = dict(codec.PROPERTY_FLAGS)
_HEADERS: Final = _FLAGS["headers"]
_CORRELATION_ID: Final = _FLAGS["correlation_id"]
_TIMESTAMP: Final = _FLAGS["timestamp"]

_BEFORE: Final = 14
"""Bytes before the properties in the payload of a content header: class, weight, body size, flags."""


class PublishTemplate:
    """The encoded properties that similar messages share.

    Args:
        values: the shared properties by their AMQP names. Headers, correlation id, message id and timestamp are filled
            in for each message.
        frame_max: the connection's maximum frame size in bytes.

    Raises:
        InvalidInputError: a value is too long or of the wrong type.
    """

    __slots__ = ("_above", "_below", "_fixed", "_flags", "_lower", "_room", "_top", "_upper")

    def __init__(self, values: Mapping[str, Any], *, frame_max: int) -> None:
        self._flags = int.from_bytes(codec.properties(values)[:2], "big") | _FLAGS["message_id"]
        self._top = _encoded(values, "content_type", "content_encoding")
        self._upper = _encoded(values, "delivery_mode", "priority")
        self._lower = _encoded(values, "reply_to", "expiration")
        self._above = self._upper + self._lower
        self._below = _encoded(values, "type", "user_id", "app_id", "cluster_id")
        self._fixed = _BEFORE + len(self._top) + len(self._above) + 1 + len(self._below)
        self._room = frame_max - codec.FRAME_OVERHEAD

    def frames(
        self,
        channel: int,
        start: bytes,
        *,
        headers: bytes,
        message_id: str,
        body: bytes,
        correlation_id: str | None = None,
        timestamp: datetime | None = None,
    ) -> bytes:
        """All frames of one message: method, content header, and as many body frames as the frame size requires.

        Args:
            start: the payload of the method frame, see :func:`codec.start_of_publish`.
            headers: the encoded items of the header table; empty for no headers.
            message_id: at most 255 bytes of UTF-8.

        Raises:
            InvalidInputError: the properties do not fit into one frame, or one of these values cannot be encoded.
        """
        name = message_id.encode()
        flags, size, above = self._flags, self._fixed + len(name), self._above
        table = time = b""
        if headers:
            flags |= _HEADERS
            table = _SIZE.pack(len(headers))
            size += len(table) + len(headers)
        if correlation_id is not None:
            flags |= _CORRELATION_ID
            above = self._upper + codec.short_string(correlation_id) + self._lower
            size += len(above) - len(self._above)
        if timestamp is not None:
            flags |= _TIMESTAMP
            time = codec.properties({"timestamp": timestamp})[2:]
            size += len(time)
        codec.check_header_size(size, self._room)
        length = len(body)
        if length > self._room:
            bodies = b"".join(codec.body_frames(channel, body, self._room))
        elif length:
            bodies = b"".join((_HEAD.pack(codec.BODY, channel, length), body, _END))
        else:
            bodies = b""
        return b"".join(
            (
                _HEAD.pack(codec.METHOD, channel, len(start)),
                start,
                _END,
                _CONTENT.pack(codec.HEADER, channel, size, codec.BASIC_CLASS, 0, length, flags),
                self._top,
                table,
                headers,
                above,
                _LENGTHS[len(name)],
                name,
                time,
                self._below,
                _END,
                bodies,
            )
        )


def _encoded(values: Mapping[str, Any], *names: str) -> bytes:
    return codec.properties({name: values.get(name) for name in names})[2:]
