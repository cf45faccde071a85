"""Decoder of messages in AMQP 1.0, the encoding that streams store.

Decoding is the hot path of the Spark source. A message is first split into its sections, which is cheap; a section is
decoded only when it is used.
"""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from bide.errors import UndecodableMessageError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_DEPTH: Final = 32
"""Limit on nested lists and maps; bide and RabbitMQ write at most three levels."""

MAX_VALUES: Final = 1 << 20
"""Limit on the values of a section, needed because elements of an array can take no bytes at all."""

_HEADER: Final = 0x70
_ANNOTATIONS: Final = 0x72
_PROPERTIES: Final = 0x73
_APPLICATION: Final = 0x74
_DATA: Final = 0x75
_SEQUENCE: Final = 0x76
_VALUE: Final = 0x77

_FIXED: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
"""Size in bytes of a fixed-width value, by the upper half of its type code."""

_NUMBERS: Final = {
    0x50: struct.Struct(">B"),
    0x51: struct.Struct(">b"),
    0x52: struct.Struct(">B"),
    0x53: struct.Struct(">B"),
    0x54: struct.Struct(">b"),
    0x55: struct.Struct(">b"),
    0x60: struct.Struct(">H"),
    0x61: struct.Struct(">h"),
    0x70: struct.Struct(">I"),
    0x71: struct.Struct(">i"),
    0x72: struct.Struct(">f"),
    0x80: struct.Struct(">Q"),
    0x81: struct.Struct(">q"),
    0x82: struct.Struct(">d"),
}
_CONSTANTS: Final = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}

_LENGTH: Final = struct.Struct(">I")
_SHORT: Final = frozenset({0xA0, 0xA1, 0xA3, 0xC0, 0xC1})
_LONG: Final = frozenset({0xB0, 0xB1, 0xB3, 0xD0, 0xD1})
"""Type codes of binary, string, symbol, list and map, with a length of one byte and of four bytes."""

_TEXTS: Final = frozenset({0xA1, 0xA3, 0xB1, 0xB3})


class Symbol(str):
    """ASCII text of the AMQP 1.0 type ``symbol``."""

    __slots__ = ()


_NAMES: Final = frozenset({str, Symbol})


class Sections(NamedTuple):
    """The sections of a message. A named tuple, because a dataclass takes longer to create.

    Attributes:
        annotations: the encoded map of message annotations; empty if the message has none.
        properties: the encoded list of properties; empty if the message has none.
        application: the encoded map of application properties; empty if the message has none.
        body: the bytes of the data sections; None if the body is an ``amqp-value`` or ``amqp-sequence``.
        value: the encoded ``amqp-value`` or ``amqp-sequence`` sections.
        header: the encoded list of the header section (durability, priority, TTL); empty if the message has none.
    """

    annotations: bytes
    properties: bytes
    application: bytes
    body: bytes | None
    value: tuple[bytes, ...] = ()
    header: bytes = b""


def sections(data: bytes) -> Sections:
    """Split a message into its sections.

    Raises:
        UndecodableMessageError: the bytes are not a message of AMQP 1.0.
    """
    annotations = properties = application = header = b""
    parts: list[bytes] = []
    values: list[bytes] = []
    at, end = 0, len(data)
    unpack_length = _LENGTH.unpack_from
    try:
        while at < end:
            if data[at]:
                raise UndecodableMessageError(f"byte {data[at]:#04x} at {at} does not begin a section")
            if data[at + 1] == 0x53:
                kind, at = data[at + 2], at + 3
            elif data[at + 1] == 0x80:
                kind, at = int.from_bytes(data[at + 2 : at + 10]), at + 10
            else:
                raise UndecodableMessageError(f"a section has the unknown kind {data[at + 1]:#04x}")
            start, form = at, data[at]
            # Nearly all sections have one of these types; the general case is slower.
            if form in _SHORT:
                at += 2 + data[at + 1]
            elif form in _LONG:
                at += 5 + unpack_length(data, at + 1)[0]
            else:
                at = _end_of_value(data, at)
            if at > end:
                raise IndexError
            if kind == _DATA:
                content = start + (2 if form == 0xA0 else 5)
                if form not in (0xA0, 0xB0):
                    raise UndecodableMessageError(f"its data are of type {form:#04x}, not binary")
                parts.append(data[content:at])
            elif kind == _ANNOTATIONS:
                annotations = data[start:at]
            elif kind == _PROPERTIES:
                properties = data[start:at]
            elif kind == _APPLICATION:
                application = data[start:at]
            elif kind == _HEADER:
                header = data[start:at]
            elif kind in (_VALUE, _SEQUENCE):
                values.append(data[start:at])
    except (IndexError, struct.error):
        raise UndecodableMessageError("it ends too early") from None
    if not parts and not values:
        raise UndecodableMessageError("it has no body")
    body = b"".join(parts) if parts else None
    return Sections(annotations, properties, application, body, tuple(values), header)


def _end_of_value(data: bytes, at: int) -> int:
    """The index after the value that begins at *at*."""
    left = 1
    while left:
        kind = data[at] >> 4
        if data[at] == 0:
            # A descriptor and a value follow; each of the two may be a described value as well.
            left += 1
            at += 1
            continue
        left -= 1
        if (size := _FIXED.get(kind)) is not None:
            at += 1 + size
        elif kind in (0xA, 0xC, 0xE):
            at += 2 + data[at + 1]
        elif kind in (0xB, 0xD, 0xF):
            at += 5 + int(_LENGTH.unpack_from(data, at + 1)[0])
        else:
            raise UndecodableMessageError(f"a value has the unknown type {data[at]:#04x}")
    return at


def decode(data: bytes) -> Any:
    """Decode one value.

    Numbers, strings, binary, booleans and null become the Python type of the same meaning, a symbol becomes a
    :class:`Symbol`. A timestamp becomes a datetime, or an int of milliseconds if ``datetime`` cannot represent it. A
    decimal becomes its raw bytes. Of a described value, the descriptor is dropped. A string that is not UTF-8 becomes
    bytes; as the key of a map it becomes a str with escapes.

    Raises:
        UndecodableMessageError: the data are not a value, are too short or too long, or hold too many values.
    """
    try:
        value, at = _Reader(data).value(0, 0)
    except (IndexError, struct.error):
        raise UndecodableMessageError("it ends too early") from None
    if at != len(data):
        raise UndecodableMessageError("a value is longer or shorter than its size field states")
    return value


def escaped(raw: bytes) -> str:
    """Decode a name or an id. Bytes that are not UTF-8 are escaped, in the same way as over AMQP 0-9-1."""
    return raw.decode(errors="backslashreplace")


def first_properties(properties: bytes, count: int) -> list[Any]:
    """The first *count* values of an encoded list of properties; None for each that is not set.

    Raises:
        UndecodableMessageError: the properties are not a list, or end too early.
    """
    try:
        match properties[0]:
            case 0xC0:
                length, at = properties[2], 3
            case 0xD0:
                length, at = _LENGTH.unpack_from(properties, 5)[0], 9
            case 0x45:
                return [None] * count
            case _:
                raise UndecodableMessageError("its properties are not a list")
        found: list[Any] = []
        for _ in range(min(length, count)):
            kind = properties[at]
            if kind == 0x40:
                found.append(None)
                at += 1
            elif kind == 0xA1 or kind == 0xA3:
                end = at + 2 + properties[at + 1]
                raw = properties[at + 2 : end]
                try:
                    found.append(raw.decode())
                except UnicodeDecodeError:
                    found.append(escaped(raw))
                at = end
            else:
                value, at = _Reader(properties).value(at, 1)
                found.append(escaped(value) if kind in _TEXTS and isinstance(value, bytes) else value)
        if at > len(properties):
            raise IndexError
    except (IndexError, struct.error):
        raise UndecodableMessageError("its properties end too early") from None
    return found + [None] * (count - len(found))


def lookup(application: bytes, *names: bytes) -> list[Any]:
    """The values of the given names in an encoded map of application properties; None for a name not in the map.

    This is faster than decoding the whole map.

    Raises:
        UndecodableMessageError: the application properties are not a map, or end too early.
    """
    found: list[Any] = [None] * len(names)
    reader: _Reader | None = None
    try:
        if application[0] == 0xC1:
            count, at = application[2], 3
        elif application[0] == 0xD1:
            count, at = _LENGTH.unpack_from(application, 5)[0], 9
        else:
            raise UndecodableMessageError("its application properties are not a map")
        for _ in range(count // 2):
            start = at
            at = _end_of_value(application, at)
            name = application[start + (2 if application[start] in _SHORT else 5) : at]
            if name in names:
                # One reader for all names: its limit on values has to hold even if a name is repeated.
                reader = reader or _Reader(application)
                found[names.index(name)], at = reader.value(at, 1)
            else:
                at = _end_of_value(application, at)
    except (IndexError, struct.error):
        raise UndecodableMessageError("its application properties end too early") from None
    if at != len(application):
        raise UndecodableMessageError("its application properties are longer or shorter than their size field states")
    return found


class _Reader:
    """Decodes values: at most as many as there are bytes, and at most :data:`MAX_VALUES`."""

    __slots__ = ("_data", "_remaining")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._remaining = min(len(data), MAX_VALUES)

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at *at*, and the index after it."""
        return self._of_kind(self._data[at], at + 1, depth)

    def _of_kind(self, kind: int, at: int, depth: int) -> tuple[Any, int]:
        data = self._data
        if kind in (0xA1, 0xA3, 0xA0):
            end = at + 1 + data[at]
            return _text(kind & 0xF, data[at + 1 : end], end - at - 1), end
        if (number := _NUMBERS.get(kind)) is not None:
            return number.unpack_from(data, at)[0], at + number.size
        if kind in _CONSTANTS:
            return _CONSTANTS[kind], at
        if kind in (0xB1, 0xB3, 0xB0):
            (size,) = _LENGTH.unpack_from(data, at)
            return _text(kind & 0xF, data[at + 4 : at + 4 + size], size), at + 4 + size
        if depth >= _MAX_DEPTH:
            raise UndecodableMessageError(f"its values are nested more than {_MAX_DEPTH} deep")
        if kind == 0x45:
            return [], at
        if kind in (0xC0, 0xD0, 0xC1, 0xD1):
            return self._compound(kind, at, depth)
        if kind in (0xE0, 0xF0):
            return self._array(kind, at, depth)
        if kind == 0x00:
            _, at = self.value(at, depth + 1)
            return self.value(at, depth + 1)
        return _decode_rare(data, kind, at)

    def _take(self, count: int) -> None:
        """Check the limit on values before *count* more are created."""
        self._remaining -= count
        if self._remaining < 0:
            raise UndecodableMessageError(
                f"it has more than {min(len(self._data), MAX_VALUES):,} values in {len(self._data):,} bytes"
            )

    def _compound(self, kind: int, at: int, depth: int) -> tuple[Any, int]:
        data = self._data
        if kind < 0xD0:
            end, count, at = at + 1 + data[at], data[at + 1], at + 2
        else:
            size, count = struct.unpack_from(">II", data, at)
            end, at = at + 4 + size, at + 8
        self._take(count)
        values = []
        for _ in range(count):
            value, at = self._of_kind(data[at], at + 1, depth + 1)
            values.append(value)
        if at != end:
            raise UndecodableMessageError("a list or map is longer or shorter than its size field states")
        if not kind & 1:
            return values, at
        if count % 2:
            raise UndecodableMessageError("a map has a key without a value")
        keys = values[::2]
        if not _NAMES.issuperset(map(type, keys)):
            keys = list(map(_key, keys))
        try:
            return dict(zip(keys, values[1::2], strict=True)), at
        except TypeError:
            raise UndecodableMessageError("a map has a list or map as key") from None

    def _array(self, kind: int, at: int, depth: int) -> tuple[Any, int]:
        data = self._data
        if kind == 0xE0:
            end, count, at = at + 1 + data[at], data[at + 1], at + 2
        else:
            size, count = struct.unpack_from(">II", data, at)
            end, at = at + 4 + size, at + 8
        # The type is written once, before all elements; it may have a descriptor.
        if data[at] == 0:
            at = _end_of_value(data, at + 1)
        element, at = data[at], at + 1
        self._take(count)
        values = []
        for _ in range(count):
            value, at = self._of_kind(element, at, depth + 1)
            values.append(value)
        if at != end:
            raise UndecodableMessageError("an array is longer or shorter than its size field states")
        return values, at


def _key(value: Any) -> Any:
    """A key of a map as a key of a Python dict."""
    if isinstance(value, bytes):
        return escaped(value)
    # A list cannot be hashed, and a malicious writer can choose UUIDs that all have the same hash.
    return str(value) if isinstance(value, list | uuid.UUID) else value


def _text(kind: int, raw: bytes, size: int) -> Any:
    if len(raw) != size:
        raise IndexError
    if kind == 0:
        return raw
    try:
        return raw.decode() if kind == 1 else Symbol(raw.decode("ascii"))
    except UnicodeDecodeError:
        return raw


def _decode_rare(data: bytes, kind: int, at: int) -> tuple[Any, int]:
    size = _FIXED.get(kind >> 4)
    if size is None:
        raise UndecodableMessageError(f"a value has the unknown type {kind:#04x}")
    raw = data[at : at + size]
    if len(raw) != size:
        raise IndexError
    if kind == 0x56:
        return raw != b"\0", at + size
    if kind == 0x83:
        milliseconds = int.from_bytes(raw, signed=True)
        try:
            return _EPOCH + timedelta(milliseconds=milliseconds), at + size
        except OverflowError:
            return milliseconds, at + size
    if kind == 0x73:
        try:
            return raw.decode("utf-32-be"), at + size
        except UnicodeDecodeError:
            raise UndecodableMessageError("a character is not a Unicode code point") from None
    if kind == 0x98:
        return uuid.UUID(bytes=raw), at + size
    if kind in (0x74, 0x84, 0x94):
        return raw, at + size
    raise UndecodableMessageError(f"a value has the unknown type {kind:#04x}")
