"""Encoder of AMQP 0-9-1.

bide has its own encoder for three reasons. Encoding is the hot path of publishing. pamqp rejects names that RabbitMQ
accepts (over 127 characters, or with characters such as ``~``). And pamqp writes an integer in the smallest type that
holds it, but some peers expect a certain type: NServiceBus reads its delay as a signed 32-bit integer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final

from bide.errors import InvalidInputError

PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"
METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
HEARTBEAT: Final = 8
FRAME_END: Final = 0xCE
FRAME_OVERHEAD: Final = 8
"""Bytes of a frame around its payload."""

HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
BASIC_CLASS: Final = 60

_FRAME: Final = struct.Struct(">BHI")
_BODY_HEADER: Final = struct.Struct(">HHQ")
_METHOD: Final = struct.Struct(">HH")
_SHORT: Final = struct.Struct(">H")
_LONG: Final = struct.Struct(">I")
_LONGLONG: Final = struct.Struct(">Q")
_ARRAY: Final = struct.Struct(">cI")
_INT32: Final = struct.Struct(">ci")
_INT64: Final = struct.Struct(">cq")
_DOUBLE: Final = struct.Struct(">cd")
_TIMESTAMP: Final = struct.Struct(">cQ")
_DECIMAL: Final = struct.Struct(">cBi")

PROPERTY_FLAGS: Final = (
    ("content_type", 1 << 15),
    ("content_encoding", 1 << 14),
    ("headers", 1 << 13),
    ("delivery_mode", 1 << 12),
    ("priority", 1 << 11),
    ("correlation_id", 1 << 10),
    ("reply_to", 1 << 9),
    ("expiration", 1 << 8),
    ("message_id", 1 << 7),
    ("timestamp", 1 << 6),
    ("type", 1 << 5),
    ("user_id", 1 << 4),
    ("app_id", 1 << 3),
    ("cluster_id", 1 << 2),
)
"""The properties in the order of a content header, each with its flag."""


def short_string(text: str) -> bytes:
    """A short string: at most 255 bytes of UTF-8.

    Raises:
        InvalidInputError: the text is longer, or cannot be encoded as UTF-8.
    """
    raw = _utf8(text)
    if len(raw) > 255:
        raise InvalidInputError(f"{text[:40]!r}... takes {len(raw)} bytes, the limit is 255: use a shorter one")
    return bytes((len(raw),)) + raw


def _utf8(text: str, name: str = "") -> bytes:
    if not isinstance(text, str):
        raise InvalidInputError(f"{text!r} is of type {type(text).__name__}, where AMQP requires text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        where = f"{name!r} is {text!r}, which" if name else repr(text)
        raise InvalidInputError(f"{where} holds characters that UTF-8 cannot encode: remove them") from error


def long_string(value: bytes) -> bytes:
    """A long string: bytes with a four-byte length."""
    return _LONG.pack(len(value)) + value


def array(items: bytes) -> bytes:
    """A list as a value of a table, from its encoded items."""
    return _ARRAY.pack(b"A", len(items)) + items


def table(items: Mapping[str, Any] | None) -> bytes:
    """A field table.

    Raises:
        InvalidInputError: a name is too long, or a value has no AMQP type.
    """
    if not items:
        return b"\x00\x00\x00\x00"
    raw = table_items(items)
    return _LONG.pack(len(raw)) + raw


def table_items(items: Mapping[str, Any]) -> bytes:
    """The names and values of a field table, without its length in front.

    Raises:
        InvalidInputError: a name is too long, or a value has no AMQP type.
    """
    try:
        return b"".join([short_string(name) + field_value(value, name) for name, value in items.items()])
    except RecursionError:
        # "from None" hides a traceback of a thousand nested calls.
        raise InvalidInputError("a header holds tables or lists that are nested too deeply: send it as JSON") from None


def field_value(value: Any, name: str = "") -> bytes:
    """One value of a table. An integer is signed 32-bit if it fits, else signed 64-bit.

    Args:
        name: the name of the header or argument, for the error message.

    Raises:
        InvalidInputError: the value has no AMQP type.
    """
    match value:
        case str():
            return b"S" + long_string(_utf8(value))
        case bool():
            return b"t\x01" if value else b"t\x00"
        case int():
            if -(1 << 31) <= value < 1 << 31:
                return _INT32.pack(b"I", value)
            if -(1 << 63) <= value < 1 << 63:
                return _INT64.pack(b"l", value)
            raise InvalidInputError(f"{name!r} is {value}, which takes more than 64 bits: send it as text")
        case float():
            if not isfinite(value):
                # The broker cannot decode it and closes the connection, with everything in flight on it.
                raise InvalidInputError(f"{name!r} is {value}, which RabbitMQ does not accept: send it as text")
            return _DOUBLE.pack(b"d", value)
        case None:
            return b"V"
        case bytes() | bytearray():
            return b"x" + long_string(bytes(value))
        case datetime():
            return _TIMESTAMP.pack(b"T", _seconds(value, name))
        case Mapping():
            return b"F" + table(value)
        case list() | tuple():
            return array(b"".join(field_value(one, name) for one in value))
        case Decimal():
            return _decimal(value, name)
        case _:
            raise InvalidInputError(
                f"{name!r} is of type {type(value).__name__}, which AMQP cannot carry: send it as text"
            )


def _seconds(value: Any, name: str) -> int:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidInputError(f"{name!r} is {value!r}, which has no time zone: give an aware datetime")
    seconds = int(value.timestamp())
    if seconds < 0:
        raise InvalidInputError(f"{name!r} is {value.isoformat()}, but AMQP timestamps begin in 1970: send it as text")
    return seconds


def _decimal(value: Decimal, name: str) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if isinstance(exponent, int) and -255 <= exponent <= 0:
        unscaled = int("".join(map(str, digits)) or "0") * (-1 if sign else 1)
        if -(1 << 31) <= unscaled < 1 << 31:
            return _DECIMAL.pack(b"D", -exponent, unscaled)
    raise InvalidInputError(f"{name!r} is {value}, which the AMQP decimal cannot hold: send it as text")


def properties(values: Mapping[str, Any]) -> bytes:
    """The property flags and list of a content header.

    Args:
        values: the properties by their AMQP names, with underscores; None is the same as absent.

    Raises:
        InvalidInputError: a value is too long or of the wrong type.
    """
    flags = 0
    parts = []
    for name, flag in PROPERTY_FLAGS:
        value = values.get(name)
        if value is None:
            continue
        flags |= flag
        if name == "headers":
            parts.append(table(value))
        elif name in ("delivery_mode", "priority"):
            if not isinstance(value, int) or not 0 <= value <= 255:
                raise InvalidInputError(f"the {name} {value!r} is not a whole number from 0 to 255")
            parts.append(bytes((value,)))
        elif name == "timestamp":
            parts.append(_LONGLONG.pack(_seconds(value, name)))
        else:
            parts.append(short_string(value))
    return _SHORT.pack(flags) + b"".join(parts)


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One frame."""
    return b"".join((_FRAME.pack(kind, channel, len(payload)), payload, b"\xce"))


def method(class_id: int, method_id: int, *parts: bytes) -> bytes:
    """The payload of a method frame."""
    return _METHOD.pack(class_id, method_id) + b"".join(parts)


def bits(*flags: bool) -> bytes:
    """Up to eight flags in one octet, the first in the lowest bit."""
    return bytes((sum(1 << position for position, flag in enumerate(flags) if flag),))


def short(value: int) -> bytes:
    """An unsigned 16-bit integer."""
    return _SHORT.pack(value)


def long(value: int) -> bytes:
    """An unsigned 32-bit integer."""
    return _LONG.pack(value)


def long_long(value: int) -> bytes:
    """An unsigned 64-bit integer."""
    return _LONGLONG.pack(value)


def publish(
    channel: int,
    *,
    exchange: str,
    routing_key: str,
    mandatory: bool,
    encoded_properties: bytes,
    body: bytes,
    frame_max: int,
) -> list[bytes]:
    """The frames of one message: method, content header, and as many body frames as the frame size requires.

    Raises:
        InvalidInputError: the properties are too large. Unlike a body, they have to fit into one frame, or the broker
            closes the connection.
    """
    start = start_of_publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory)
    header = _BODY_HEADER.pack(BASIC_CLASS, 0, len(body)) + encoded_properties
    room = frame_max - FRAME_OVERHEAD
    check_header_size(len(header), room)
    return [frame(METHOD, channel, start), frame(HEADER, channel, header), *body_frames(channel, body, room)]


def start_of_publish(*, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    """The payload of a ``basic.publish`` method frame.

    Raises:
        InvalidInputError: a name is too long.
    """
    return publish_to(exchange) + short_string(routing_key) + bits(mandatory)


def publish_to(exchange: str) -> bytes:
    """The payload of a ``basic.publish`` method frame up to the routing key. Routing key and flags follow.

    Raises:
        InvalidInputError: the name is too long.
    """
    return method(BASIC_CLASS, 40, b"\x00\x00", short_string(exchange))


def check_header_size(size: int, room: int) -> None:
    """Check that the payload of a content header fits into one frame.

    Raises:
        InvalidInputError: the payload is larger.
    """
    if size > room:
        raise InvalidInputError(
            f"the headers and properties take {size} bytes, the limit is {room}: put more into the body, or "
            "raise frame_max on the broker"
        )


def body_frames(channel: int, body: bytes, room: int) -> list[bytes]:
    """The body frames, each with a payload of at most ``room`` bytes."""
    return [frame(BODY, channel, body[offset : offset + room]) for offset in range(0, len(body), room)]
