"""Encoder of messages in AMQP 1.0, as RabbitMQ stores them in streams."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from bide.errors import InvalidInputError

_SECTIONS_SINCE: Final = (3, 13)
"""The first release that stores each property in the section that AMQP 1.0 has for it. Older releases store some
properties in annotations and application properties of their own."""

_ADDRESSES_SINCE: Final = (4, 3)
"""The first release that stores ``reply_to`` as an address of AMQP 1.0."""

_MAX_TTL: Final = 0xFFFFFFFF

_NULL: Final = b"\x40"
_LONG: Final = struct.Struct(">I")
_INT: Final = struct.Struct(">bi")
_INT64: Final = struct.Struct(">Bq")
_DOUBLE: Final = struct.Struct(">Bd")


class _Shared(NamedTuple):
    """The encoded parts of a message that many messages have in common.

    Attributes:
        start: the header section and the annotations, for a message without AMQP 0-9-1 headers in the annotations.
        header: the header section (durability, priority, TTL).
        annotations: the keys and values of the annotations that RabbitMQ adds.
        annotation_count: the number of these keys and values.
        own: the keys and values of the application properties that RabbitMQ adds.
        own_count: the number of these keys and values.
        before: the properties between message id and correlation id.
        after: the properties between correlation id and creation time.
        last: the property after the creation time.
        rest: the properties after the message id, for a message with neither a correlation id nor a creation time.
        rest_count: the number of properties in ``rest``.
    """

    start: bytes
    header: bytes
    annotations: bytes
    annotation_count: int
    own: bytes
    own_count: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    last: bytes
    rest: bytes
    rest_count: int


_SHARED: Final = (
    *("delivery_mode", "priority", "expiration", "type"),
    *("app_id", "user_id", "reply_to", "content_type", "content_encoding"),
)
"""The parameters of :meth:`StreamMessageEncoder._encode_shared`."""


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
        self._shared = lru_cache(maxsize=1024)(self._encode_shared)

    def encode(self, values: Mapping[str, Any], body: bytes) -> bytes:
        """Encode a message.

        Args:
            values: the properties by their names in AMQP 0-9-1, with underscores.

        Raises:
            InvalidInputError: a value cannot be stored in a stream.
        """
        shared = self._shared(*map(values.get, _SHARED))
        start, own, own_count = shared.start, shared.own, shared.own_count
        annotations, count = b"", 0
        for name, value in (values.get("headers") or {}).items():
            if self._has_sections and name.startswith("x-"):
                annotations += _symbol(name) + _value(name, value)
                count += 2
            else:
                own += _name(name) + _value(name, value)
                own_count += 2
        if count:
            start = shared.header + _annotations(shared.annotations + annotations, shared.annotation_count + count)
        return b"".join(
            (
                start,
                _properties(shared, *map(values.get, ("message_id", "correlation_id", "timestamp"))),
                b"\x00\x53\x74" + _compound(1, own, own_count) if own_count else b"",
                b"\x00\x53\x75",
                _binary(body),
            )
        )

    def _encode_shared(
        self,
        delivery_mode: int | None,
        priority: int | None,
        expiration: str | None,
        kind: str | None,
        app_id: str | None,
        user_id: str | None,
        reply_to: str | None,
        content_type: str | None,
        content_encoding: str | None,
    ) -> _Shared:
        header, annotations, count, own, own_count = b"", self._target, 4, b"", 0
        if self._has_sections:
            header = _header(delivery_mode, priority, expiration)
            if kind is not None:
                annotations, count = annotations + _symbol("x-basic-type") + _text(kind), count + 2
        else:
            for name, number in (("x-basic-priority", priority), ("x-basic-delivery-mode", delivery_mode)):
                if number is not None:
                    annotations, count = annotations + _symbol(name) + bytes((0x50, number)), count + 2
            if expiration is not None:
                annotations, count = annotations + _symbol("x-basic-expiration") + _text(expiration), count + 2
            for name, text in (("x-basic-type", kind), ("x-basic-app-id", app_id)):
                if text is not None:
                    own, own_count = own + _text(name) + _text(text), own_count + 2
            app_id = None
        if reply_to is not None and self._has_addresses:
            reply_to = f"/queues/{quote(reply_to, safe='')}"
        before = (
            _NULL if user_id is None else _binary(user_id.encode()),
            _NULL,
            _NULL,
            _NULL if reply_to is None else _text(reply_to),
        )
        after = (
            _NULL if content_type is None else _symbol(content_type),
            _NULL if content_encoding is None else _symbol(content_encoding),
            _NULL,
        )
        last = _NULL if app_id is None else _text(app_id)
        rest = _stripped([*before, _NULL, *after, _NULL, last])
        return _Shared(
            start=header + _annotations(annotations, count),
            header=header,
            annotations=annotations,
            annotation_count=count,
            own=own,
            own_count=own_count,
            before=before,
            after=after,
            last=last,
            rest=b"".join(rest),
            rest_count=len(rest),
        )


def _properties(shared: _Shared, message_id: str | None, correlation_id: str | None, created: datetime | None) -> bytes:
    """The section with the properties."""
    if message_id is not None and correlation_id is None and created is None:
        return b"\x00\x53\x73" + _compound(0, _text(message_id) + shared.rest, 1 + shared.rest_count)
    fields = _stripped(
        [
            _NULL if message_id is None else _text(message_id),
            *shared.before,
            _NULL if correlation_id is None else _text(correlation_id),
            *shared.after,
            _NULL if created is None else _time(created),
            shared.last,
        ]
    )
    return b"\x00\x53\x73" + _compound(0, b"".join(fields), len(fields)) if fields else b""


def _stripped(fields: list[bytes]) -> list[bytes]:
    """Remove nulls at the end, which a list of AMQP 1.0 may omit."""
    while fields and fields[-1] is _NULL:
        fields.pop()
    return fields


def _annotations(pairs: bytes, count: int) -> bytes:
    """The section with annotations."""
    return b"\x00\x53\x72" + _compound(1, pairs, count)


def _header(mode: int | None, priority: int | None, expiration: str | None) -> bytes:
    """The header section: durability, priority, TTL, and first-acquirer and delivery-count as RabbitMQ sets them."""
    ttl = _NULL
    if expiration is not None:
        if int(expiration) > _MAX_TTL:
            raise InvalidInputError(
                f"the expiration is {int(expiration):,} ms, and a message of a stream holds at most {_MAX_TTL:,}: give "
                "a shorter one, or none, because messages of streams do not expire"
            )
        ttl = b"\x70" + _LONG.pack(int(expiration))
    durable = b"\x41" if mode == 2 else b"\x42"
    encoded_priority = _NULL if priority is None else bytes((0x50, priority))
    return b"\x00\x53\x70" + _compound(0, durable + encoded_priority + ttl + b"\x41\x43", 5)


def _value(name: str, value: Any) -> bytes:
    """Encode the value of a header."""
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
    """Encode a time, in whole seconds as over AMQP 0-9-1."""
    return _INT64.pack(0x83, int(value.timestamp()) * 1000)


def _compound(is_map: int, content: bytes, count: int) -> bytes:
    """Encode a list or a map with this many values."""
    if len(content) < 255 and count < 256:
        return bytes((0xC0 | is_map, len(content) + 1, count)) + content
    return bytes((0xD0 | is_map,)) + _LONG.pack(len(content) + 4) + _LONG.pack(count) + content


@lru_cache(maxsize=1024)
def _name(text: str) -> bytes:
    return _text(text)


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"\xa1" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb1" + _LONG.pack(len(raw)) + raw


@lru_cache(maxsize=1024)
def _symbol(text: str) -> bytes:
    raw = text.encode()
    return b"\xa3" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb3" + _LONG.pack(len(raw)) + raw


def _binary(raw: bytes) -> bytes:
    return b"\xa0" + bytes((len(raw),)) + raw if len(raw) < 256 else b"\xb0" + _LONG.pack(len(raw)) + raw
