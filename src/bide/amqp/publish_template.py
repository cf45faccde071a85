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

_FRAME_HEADER: Final = struct.Struct(">BHI")
_CONTENT_HEADER: Final = struct.Struct(">BHIHHQH")
_TABLE_SIZE: Final = struct.Struct(">I")
_FRAME_END: Final = bytes((codec.FRAME_END,))
_LENGTH_OCTETS: Final = tuple(bytes((length,)) for length in range(256))

_PROPERTY_FLAGS: Final = dict(codec.PROPERTY_FLAGS)
_HEADERS_FLAG: Final = _PROPERTY_FLAGS["headers"]
_CORRELATION_ID_FLAG: Final = _PROPERTY_FLAGS["correlation_id"]
_TIMESTAMP_FLAG: Final = _PROPERTY_FLAGS["timestamp"]

_PROPERTIES_OFFSET: Final = 14
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

    __slots__ = (
        "_after_correlation_id",
        "_after_headers",
        "_after_timestamp",
        "_before_correlation_id",
        "_before_headers",
        "_fixed_size",
        "_flags",
        "_max_payload",
    )

    def __init__(self, values: Mapping[str, Any], *, frame_max: int) -> None:
        self._flags = int.from_bytes(codec.properties(values)[:2], "big") | _PROPERTY_FLAGS["message_id"]
        self._before_headers = _encoded(values, "content_type", "content_encoding")
        self._before_correlation_id = _encoded(values, "delivery_mode", "priority")
        self._after_correlation_id = _encoded(values, "reply_to", "expiration")
        self._after_headers = self._before_correlation_id + self._after_correlation_id
        self._after_timestamp = _encoded(values, "type", "user_id", "app_id", "cluster_id")
        self._fixed_size = (
            _PROPERTIES_OFFSET + len(self._before_headers) + len(self._after_headers) + 1 + len(self._after_timestamp)
        )
        self._max_payload = frame_max - codec.FRAME_OVERHEAD

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
        flags, size, above = self._flags, self._fixed_size + len(name), self._after_headers
        table = time = b""
        if headers:
            flags |= _HEADERS_FLAG
            table = _TABLE_SIZE.pack(len(headers))
            size += len(table) + len(headers)
        if correlation_id is not None:
            flags |= _CORRELATION_ID_FLAG
            above = self._before_correlation_id + codec.short_string(correlation_id) + self._after_correlation_id
            size += len(above) - len(self._after_headers)
        if timestamp is not None:
            flags |= _TIMESTAMP_FLAG
            time = codec.properties({"timestamp": timestamp})[2:]
            size += len(time)
        codec.check_header_size(size, self._max_payload)
        length = len(body)
        if length > self._max_payload:
            bodies = b"".join(codec.body_frames(channel, body, self._max_payload))
        elif length:
            bodies = b"".join((_FRAME_HEADER.pack(codec.BODY, channel, length), body, _FRAME_END))
        else:
            bodies = b""
        return b"".join(
            (
                _FRAME_HEADER.pack(codec.METHOD, channel, len(start)),
                start,
                _FRAME_END,
                _CONTENT_HEADER.pack(codec.HEADER, channel, size, codec.BASIC_CLASS, 0, length, flags),
                self._before_headers,
                table,
                headers,
                above,
                _LENGTH_OCTETS[len(name)],
                name,
                time,
                self._after_timestamp,
                _FRAME_END,
                bodies,
            )
        )


def _encoded(values: Mapping[str, Any], *names: str) -> bytes:
    return codec.properties({name: values.get(name) for name in names})[2:]
