"""Encoder of messages in AMQP 1.0, as RabbitMQ stores them in streams."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

from bide.errors import InvalidInputError

_SECTIONS_SINCE: Final = (3, 13)
"""The release since which RabbitMQ stores properties in the sections of AMQP 1.0 for them. Before, it stores some in
annotations and application properties of its own."""

_ADDRESSES_SINCE: Final = (4, 3)
"""The release since which RabbitMQ stores ``reply_to`` as an address of AMQP 1.0."""

_MAX_TTL: Final = 0xFFFFFFFF

_NULL: Final = b"\x40"
_LONG: Final = struct.Struct(">I")
_INT: Final = struct.Struct(">bi")
_INT64: Final = struct.Struct(">Bq")
_DOUBLE: Final = struct.Struct(">Bd")


class StreamMessageEncoder:
    """Encodes messages with the properties of AMQP 0-9-1 as RabbitMQ itself does when it stores them in a stream.

    Args:
        stream: the name of the stream, which is the routing key of the messages.
        release: the release of RabbitMQ.
    """

    def __init__(self, stream: str, release: tuple[int, ...]) -> None:
        self._has_sections = release >= _SECTIONS_SINCE
        self._has_addresses = release >= _ADDRESSES_SINCE
        self._target = _symbol("x-routing-key") + _text(stream) + _symbol("x-exchange") + _text("")

    def encode(self, values: Mapping[str, Any], body: bytes) -> bytes:
        """Encode a message.

        Args:
            values: the properties by their names in AMQP 0-9-1, with underscores.

        Raises:
            InvalidInputError: a value has no place in a message of a stream.
        """
        header, annotations, count, own, own_count = b"", self._target, 2, b"", 0
        kind, app_id = values.get("type"), values.get("app_id")
        if self._has_sections:
            header = _header(values.get("delivery_mode"), values.get("priority"), values.get("expiration"))
            if kind is not None:
                annotations, count = annotations + _symbol("x-basic-type") + _text(kind), count + 1
        else:
            for name in ("priority", "delivery_mode", "expiration"):
                if (value := values.get(name)) is not None:
                    raw = _text(value) if isinstance(value, str) else bytes((0x50, value))
                    symbol = _symbol(f"x-basic-{name.replace('_', '-')}")
                    annotations, count = annotations + symbol + raw, count + 1
            for name, text in (("x-basic-type", kind), ("x-basic-app-id", app_id)):
                if text is not None:
                    own, own_count = own + _text(name) + _text(text), own_count + 1
            app_id = None
        for name, value in (values.get("headers") or {}).items():
            raw = _value(name, value)
            if self._has_sections and name.startswith("x-"):
                annotations, count = annotations + _symbol(name) + raw, count + 1
            else:
                own, own_count = own + _text(name) + raw, own_count + 1
        return b"".join(
            (
                header,
                b"\x00\x53\x72",
                _compound(1, annotations, 2 * count),
                self._properties(values, app_id),
                b"\x00\x53\x74" + _compound(1, own, 2 * own_count) if own_count else b"",
                b"\x00\x53\x75",
                _binary(body),
            )
        )

    def _properties(self, values: Mapping[str, Any], app_id: str | None) -> bytes:
        user_id, reply_to, created = (values.get(name) for name in ("user_id", "reply_to", "timestamp"))
        if reply_to is not None and self._has_addresses:
            reply_to = f"/queues/{quote(reply_to, safe='')}"
        content_type, content_encoding = values.get("content_type"), values.get("content_encoding")
        fields = [
            _text_or_null(values.get("message_id")),
            _NULL if user_id is None else _binary(user_id.encode()),
            _NULL,
            _NULL,
            _text_or_null(reply_to),
            _text_or_null(values.get("correlation_id")),
            _NULL if content_type is None else _symbol(content_type),
            _NULL if content_encoding is None else _symbol(content_encoding),
            _NULL,
            _NULL if created is None else _time(created),
            _text_or_null(app_id),
        ]
        while fields and fields[-1] is _NULL:
            fields.pop()
        return b"\x00\x53\x73" + _compound(0, b"".join(fields), len(fields)) if fields else b""


@lru_cache(maxsize=1024)
def _header(mode: int | None, priority: int | None, expiration: str | None) -> bytes:
    """The section with durability, priority and TTL, and the values that RabbitMQ adds."""
    ttl = _NULL
    if expiration is not None:
        if int(expiration) > _MAX_TTL:
            raise InvalidInputError(
                f"the expiration is {int(expiration):,} ms, and a message of a stream holds at most {_MAX_TTL:,}: give "
                "a shorter one, or none, because messages of streams do not expire"
            )
        ttl = b"\x70" + _LONG.pack(int(expiration))
    durable = b"\x41" if mode == 2 else b"\x42"
    urgency = _NULL if priority is None else bytes((0x50, priority))
    return b"\x00\x53\x70" + _compound(0, durable + urgency + ttl + b"\x41\x43", 5)


def _value(name: str, value: Any) -> bytes:
    """A header."""
    match value:
        case str():
            return _text(value)
        case bool():
            return b"\x41" if value else b"\x42"
        case int():
            return _INT.pack(0x71, value) if -(1 << 31) <= value < 1 << 31 else _INT64.pack(0x81, value)
        case float():
            return _DOUBLE.pack(0x82, value)
        case None:
            return _NULL
        case bytes():
            return _binary(value)
        case datetime():
            return _time(value)
        case _:
            raise InvalidInputError(
                f"the header {name!r} is of type {type(value).__name__}, which a stream does not keep: send it as text"
            )


def _time(value: datetime) -> bytes:
    """A time, in whole seconds as over AMQP 0-9-1."""
    return _INT64.pack(0x83, int(value.timestamp()) * 1000)


def _compound(is_map: int, content: bytes, count: int) -> bytes:
    """A list or a map with this many values."""
    if len(content) < 255 and count < 256:
        return bytes((0xC0 | is_map, len(content) + 1, count)) + content
    return bytes((0xD0 | is_map,)) + _LONG.pack(len(content) + 4) + _LONG.pack(count) + content


def _text_or_null(text: str | None) -> bytes:
    return _NULL if text is None else _text(text)


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"\xa1" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb1" + _LONG.pack(len(raw)) + raw


@lru_cache(maxsize=1024)
def _symbol(text: str) -> bytes:
    raw = text.encode()
    return b"\xa3" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb3" + _LONG.pack(len(raw)) + raw


def _binary(raw: bytes) -> bytes:
    return b"\xa0" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb0" + _LONG.pack(len(raw)) + raw
