"""Decoder of received frames: methods, content headers, and message properties.

pamqp decodes other methods. bide decodes messages itself, so that an invalid value does not make the rest of the
message unreadable: pamqp rejects a whole header for a timestamp out of range, and a whole frame for text that is not
UTF-8, and it decodes negative decimals as positive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Final

import pamqp.frame
from pamqp.base import Frame

from bide.amqp.codec import PROPERTY_FLAGS
from bide.amqp.delivery import Delivery, Return
from bide.durations import EPOCH
from bide.runtime.logs import logger

log = logger(__name__)

_METHOD_OFFSET: Final = 7
_ARGUMENTS_OFFSET: Final = 11
_FLAGS_OFFSET: Final = 19
"""The position of the property flags in a frame: after the frame header, class, weight and body size."""

_MAX_TIMESTAMP: Final = 253_402_300_799
"""The end of the year 9999. Timestamps that a sender wrote in milliseconds, against the specification, exceed it."""

_DECIMAL_CONTEXT: Final = Context(prec=10, traps=[])
"""A separate decimal context, because the context of the thread may round. An AMQP decimal has at most ten digits."""

_MAX_DEPTH: Final = 50
"""Tables and lists nested deeper than this stay encoded bytes. A frame can nest deeper than Python's stack allows."""

_LONG_STRING_TYPE: Final = ord("S")
_INT64_TYPE: Final = ord("l")

_SHORT: Final = struct.Struct(">H")
_LONG: Final = struct.Struct(">I")
_LONGLONG: Final = struct.Struct(">Q")
_SIGNED_LONGLONG: Final = struct.Struct(">q")
_DECIMAL: Final = struct.Struct(">Bi")
_TAG_AND_FLAG: Final = struct.Struct(">QB")

_NUMBER_FORMATS: Final[Mapping[int, struct.Struct]] = {
    # The type letters as RabbitMQ reads them. They differ from the specification: see the page "AMQP 0-9-1 Errata" of
    # RabbitMQ's documentation, section "Field types".
    ord("b"): struct.Struct(">b"),
    ord("B"): struct.Struct(">B"),
    ord("s"): struct.Struct(">h"),
    ord("u"): struct.Struct(">H"),
    ord("I"): struct.Struct(">i"),
    ord("i"): struct.Struct(">I"),
    _INT64_TYPE: _SIGNED_LONGLONG,
    ord("L"): _SIGNED_LONGLONG,
    ord("f"): struct.Struct(">f"),
    ord("d"): struct.Struct(">d"),
}


def announcement(frame: bytes) -> Delivery | Return | None:
    """The message that a method frame announces, without its content; None for any other method.

    Raises:
        ValueError: the frame ends too soon.
    """
    decode = _ANNOUNCEMENTS.get(frame[_METHOD_OFFSET:_ARGUMENTS_OFFSET])
    if decode is None:
        return None
    try:
        return decode(frame)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the method frame ends too soon ({error})") from error


def _deliver(frame: bytes) -> Delivery:
    consumer_tag, offset = _short_string(frame, _ARGUMENTS_OFFSET)
    delivery_tag, redelivered = _TAG_AND_FLAG.unpack_from(frame, offset)
    exchange, offset = _short_string(frame, offset + _TAG_AND_FLAG.size)
    routing_key, _ = _short_string(frame, offset)
    return Delivery(
        consumer_tag=consumer_tag,
        delivery_tag=delivery_tag,
        redelivered=bool(redelivered & 1),
        exchange=exchange,
        routing_key=routing_key,
    )


def _get_ok(frame: bytes) -> Delivery:
    delivery_tag, redelivered = _TAG_AND_FLAG.unpack_from(frame, _ARGUMENTS_OFFSET)
    exchange, offset = _short_string(frame, _ARGUMENTS_OFFSET + _TAG_AND_FLAG.size)
    routing_key, offset = _short_string(frame, offset)
    (message_count,) = _LONG.unpack_from(frame, offset)
    return Delivery(
        delivery_tag=delivery_tag,
        redelivered=bool(redelivered & 1),
        exchange=exchange,
        routing_key=routing_key,
        message_count=message_count,
    )


def _return(frame: bytes) -> Return:
    (reply_code,) = _SHORT.unpack_from(frame, _ARGUMENTS_OFFSET)
    reply_text, offset = _short_string(frame, _ARGUMENTS_OFFSET + 2)
    exchange, offset = _short_string(frame, offset)
    routing_key, _ = _short_string(frame, offset)
    return Return(reply_code=reply_code, reply_text=reply_text, exchange=exchange, routing_key=routing_key)


_ANNOUNCEMENTS: Final[Mapping[bytes, Callable[[bytes], Delivery | Return]]] = {
    b"\x00\x3c\x00\x32": _return,
    b"\x00\x3c\x00\x3c": _deliver,
    b"\x00\x3c\x00\x47": _get_ok,
}


def properties(frame: bytes) -> dict[str, Any]:
    """The properties in a content header frame, by their AMQP names; absent ones are left out.

    Raises:
        ValueError: the frame ends too soon, or holds a type that AMQP 0-9-1 does not have.
    """
    try:
        (flags,) = _SHORT.unpack_from(frame, _FLAGS_OFFSET)
        offset = _FLAGS_OFFSET + 2
        values: dict[str, Any] = {}
        for name in _names(flags):
            if name == "headers":
                values[name], offset = _table(frame, offset, 1)
            elif name in ("delivery_mode", "priority"):
                values[name], offset = frame[offset], offset + 1
            elif name == "timestamp":
                values[name], offset = _timestamp(frame, offset)
            else:
                values[name], offset = _short_string(frame, offset)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the content header ends too soon ({error})") from error
    return values


class Properties(Mapping[str, Any]):
    """The properties in a content header frame, decoded when one of them is first read.

    For a consumer that reads only bodies, the two dozen headers of a delayed message cost nothing. Properties that
    cannot be decoded must not close the connection at each redelivery: a warning is logged, and the message has no
    properties.
    """

    __slots__ = ("_frame", "_values")

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._values: dict[str, Any] | None = None

    def _decoded(self) -> dict[str, Any]:
        # Another thread may be decoding too: read the values first, and drop the frame after they are set.
        frame, values = self._frame, self._values
        if values is None:
            try:
                values = properties(frame)
            except ValueError as error:
                log.warning("the properties of a message cannot be decoded (%s): it is delivered without them", error)
                values = {}
            self._values = values
            self._frame = b""
        return values

    def __getitem__(self, name: str) -> Any:
        return self._decoded()[name]

    def get(self, name: str, default: Any = None, /) -> Any:
        """The property, or the default if it is absent. An endpoint calls this seven times for each message."""
        return (self._values or self._decoded()).get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __repr__(self) -> str:
        return repr(self._decoded())


def table(raw: bytes, offset: int) -> tuple[dict[str, Any], int]:
    """A field table, and the position after it.

    Raises:
        ValueError: the table ends too soon, or holds a type that AMQP 0-9-1 does not have.
    """
    try:
        return _table(raw, offset, 1)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the table ends too soon ({error})") from error


@lru_cache(maxsize=256)
def _names(flags: int) -> tuple[str, ...]:
    """The names of the properties that are present."""
    return tuple(name for name, flag in PROPERTY_FLAGS if flags & flag)


def _text(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        # Keep the text with escapes that can be sent on.
        return part.decode(errors="backslashreplace")


def _too_short_error(raw: bytes, start: int, end: int) -> IndexError:
    return IndexError(f"{end - start} bytes expected, {len(raw) - start} left")


def _short_string(raw: bytes, offset: int) -> tuple[str, int]:
    start = offset + 1
    end = start + raw[offset]
    if end > len(raw):
        raise _too_short_error(raw, start, end)
    return _text(raw[start:end]), end


def _table(raw: bytes, offset: int, depth: int) -> tuple[dict[str, Any], int]:
    # A delayed message has two dozen headers, most of them text. Decoding names and text inline, without a call for
    # each, makes receiving it a third faster.
    (size,) = _LONG.unpack_from(raw, offset)
    offset += 4
    end = offset + size
    items: dict[str, Any] = {}
    while offset < end:
        start = offset + 1
        offset = start + raw[offset]
        try:
            name = raw[start:offset].decode()
        except UnicodeDecodeError:
            name = _text(raw[start:offset])
        kind = raw[offset]
        if kind == _LONG_STRING_TYPE:
            start = offset + 5
            offset = start + _LONG.unpack_from(raw, offset + 1)[0]
            try:
                items[name] = raw[start:offset].decode()
            except UnicodeDecodeError:
                items[name] = raw[start:offset]
            if offset > len(raw):
                raise _too_short_error(raw, start, offset)
        elif kind == _INT64_TYPE:
            items[name] = _SIGNED_LONGLONG.unpack_from(raw, offset + 1)[0]
            offset += 9
        else:
            items[name], offset = _value(raw, offset, depth)
    return items, end


def _array(raw: bytes, offset: int, depth: int) -> tuple[list[Any], int]:
    (size,) = _LONG.unpack_from(raw, offset)
    offset += 4
    end = offset + size
    items = []
    while offset < end:
        item, offset = _value(raw, offset, depth)
        items.append(item)
    return items, end


def _value(raw: bytes, offset: int, depth: int) -> tuple[Any, int]:
    kind = raw[offset]
    number = _NUMBER_FORMATS.get(kind)
    if number is not None:
        return number.unpack_from(raw, offset + 1)[0], offset + 1 + number.size
    decode = _DECODERS.get(kind)
    if decode is not None:
        return decode(raw, offset + 1)
    nested = _NESTED_DECODERS.get(kind)
    if nested is None:
        raise ValueError(f"the content header holds a value of the unknown type {bytes((kind,))!r}")
    return nested(raw, offset + 1, depth + 1) if depth < _MAX_DEPTH else _bytes(raw, offset + 1)


def _bytes(raw: bytes, offset: int) -> tuple[bytes, int]:
    start = offset + 4
    end = start + _LONG.unpack_from(raw, offset)[0]
    if end > len(raw):
        raise _too_short_error(raw, start, end)
    return raw[start:end], end


def _long_string(raw: bytes, offset: int) -> tuple[str | bytes, int]:
    part, offset = _bytes(raw, offset)
    try:
        return part.decode(), offset
    except UnicodeDecodeError:
        return part, offset


def _boolean(raw: bytes, offset: int) -> tuple[bool, int]:
    return raw[offset] != 0, offset + 1


def _void(raw: bytes, offset: int) -> tuple[None, int]:
    return None, offset


def _decimal(raw: bytes, offset: int) -> tuple[Decimal, int]:
    scale, unscaled = _DECIMAL.unpack_from(raw, offset)
    return Decimal(unscaled).scaleb(-scale, _DECIMAL_CONTEXT), offset + _DECIMAL.size


def _timestamp(raw: bytes, offset: int) -> tuple[datetime | int, int]:
    """A time; a timestamp out of the range of datetime stays a number."""
    (seconds,) = _LONGLONG.unpack_from(raw, offset)
    try:
        return _moment(seconds), offset + 8
    except OverflowError:
        return seconds, offset + 8


@lru_cache(maxsize=256)
def _moment(seconds: int) -> datetime:
    """The time of a timestamp. Cached, because many messages are dead-lettered in the same second."""
    return EPOCH + (timedelta(seconds=seconds) if seconds <= _MAX_TIMESTAMP else timedelta(milliseconds=seconds))


_DECODERS: Final[Mapping[int, Callable[[bytes, int], tuple[Any, int]]]] = {
    ord("S"): _long_string,
    ord("x"): _bytes,
    ord("t"): _boolean,
    ord("V"): _void,
    ord("D"): _decimal,
    ord("T"): _timestamp,
}
_NESTED_DECODERS: Final[Mapping[int, Callable[[bytes, int, int], tuple[Any, int]]]] = {
    ord("F"): _table,
    ord("A"): _array,
}


def method(frame: bytes) -> Frame:
    """The method in a frame.

    Raises:
        ValueError: the frame does not hold a method.
    """
    try:
        _, _, found = pamqp.frame.unmarshal(frame)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Frame):
        raise ValueError("a frame without a method")
    return found
