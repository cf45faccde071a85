"""Messages of streams as rows: body, properties and headers."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from math import isfinite
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote
from uuid import UUID

from bide.delay.protocol import HEADER_DUE, HEADER_SENT
from bide.durations import LATEST_MILLISECOND, to_microseconds
from bide.errors import UndecodableMessageError
from bide.runtime.bounded_cache import BoundedCache
from bide.spark.typed_headers import headers_to_json
from bide.streams.amqp10 import Sections, decode, escaped, first_properties, lookup, sections

_MAX_CACHED: Final = 1 << 10
"""Largest encoded annotations that are cached, in bytes. Those of most messages have about a hundred bytes."""

_DUE: Final = HEADER_DUE.encode()
_SENT: Final = HEADER_SENT.encode()
_TYPE_NAME: Final = "x-basic-type"
_TYPE: Final = _TYPE_NAME.encode()
"""The annotation in which RabbitMQ keeps the property ``type``; before 3.13 it was an application property."""

_APP_ID_NAME: Final = "x-basic-app-id"
_APP_ID: Final = _APP_ID_NAME.encode()
"""The application property in which RabbitMQ before 3.13 keeps ``app_id``. Later releases use ``group-id``."""

_QUEUE_ADDRESS: Final = "/queues/"
"""The beginning of a ``reply_to`` that RabbitMQ 4.3 has converted to an address of AMQP 1.0; 4.0 stores the name."""

_PROPERTIES: Final = {
    "message_id": 0,
    "user_id": 1,
    "reply_to": 4,
    "correlation_id": 5,
    "content_type": 6,
    "content_encoding": 7,
    "creation_time": 9,
    "app_id": 10,
}
"""Columns from the list of properties, by their place in it."""

_ALL_PROPERTIES: Final = 11
PERSISTENT: Final = 2
"""The delivery mode of persistent messages."""

_MAX_PRIORITY: Final = 255
_MAX_EXPIRATION: Final = 2**63 - 1

_DIGITS: Final = re.compile("[0-9]{1,18}")
_OWN_ANNOTATIONS: Final = ("x-exchange", "x-routing-key")
_BROKER_PREFIXES: Final = ("x-opt-", "x-basic-", "x-stream-")


class DeliveryFields(NamedTuple):
    """The columns from the header section, or from the annotations of RabbitMQ before 3.13."""

    priority: int | None = None
    expiration: int | None = None
    persistent: bool | None = None


_NO_DELIVERY_FIELDS: Final = DeliveryFields()


class Annotations(NamedTuple):
    """The columns from the annotations, and the headers that RabbitMQ 4 keeps there."""

    exchange: str | None = None
    routing_key: str | None = None
    type: str | None = None
    delivery: DeliveryFields = _NO_DELIVERY_FIELDS
    headers: Mapping[str, Any] = MappingProxyType({})


_NO_ANNOTATIONS: Final = Annotations()


class MessageRow(NamedTuple):
    """The columns of a message that come from its own contents."""

    value: bytes
    exchange: str | None = None
    routing_key: str | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    content_type: str | None = None
    due: int | None = None
    scheduled: int | None = None
    headers: list[tuple[str, str | None]] | None = None
    headers_json: str | None = None
    type: str | None = None
    content_encoding: str | None = None
    reply_to: str | None = None
    app_id: str | None = None
    user_id: str | None = None
    priority: int | None = None
    expiration: int | None = None
    persistent: bool | None = None
    creation_time: int | None = None
    undecodable: str | None = None


class RowReader:
    """Decodes the parts of messages that the columns of a read need.

    Args:
        wanted: the names of the columns.
    """

    def __init__(self, wanted: set[str]) -> None:
        self._map, self._json = "headers" in wanted, "headers_json" in wanted
        self._needs_headers = self._map or self._json
        self._delivery = bool(wanted & set(DeliveryFields._fields))
        self._annotated = self._needs_headers or self._delivery or bool(wanted & {"exchange", "routing_key", "type"})
        self._properties = max((place + 1 for name, place in _PROPERTIES.items() if name in wanted), default=0)
        self._times = bool(wanted & {"due", "scheduled"})
        self._type = "type" in wanted
        self._app_id = "app_id" in wanted
        self._only_body = not (self._annotated or self._properties or self._times)
        self._annotations_cache = BoundedCache[bytes, Annotations]()
        self._delivery_cache = BoundedCache[bytes, DeliveryFields]()

    def read(self, data: bytes) -> MessageRow:
        """Decode a message.

        Raises:
            UndecodableMessageError: the bytes are not a message of AMQP 1.0, or a section has the wrong type.
        """
        message = sections(data)
        if self._only_body:
            return MessageRow(message.body if message.body is not None else _body(message))
        annotations, delivery, due, sent = _NO_ANNOTATIONS, _NO_DELIVERY_FIELDS, None, None
        kind = old_app_id = headers = headers_json = None
        if self._annotated and message.annotations:
            annotations = self._annotations(message.annotations)
            kind, delivery = annotations.type, annotations.delivery
        if self._delivery and message.header:
            delivery = self._delivery_fields(message.header)
        found: Mapping[str, Any] = annotations.headers
        if message.application:
            if self._needs_headers:
                application = decode(message.application)
                if not isinstance(application, dict):
                    raise UndecodableMessageError("its application properties are not a map")
                due, sent = application.get(HEADER_DUE), application.get(HEADER_SENT)
                old_type, old_app_id = application.pop(_TYPE_NAME, None), application.pop(_APP_ID_NAME, None)
                kind = kind or _escaped_text(old_type)
                found = {**found, **application}
            elif self._may_have_fields(message.application):
                due, sent, old_type, old_app_id = lookup(message.application, _DUE, _SENT, _TYPE, _APP_ID)
                kind = kind or _escaped_text(old_type)
        if found:
            headers = [(str(name), text_of(value)) for name, value in found.items()] if self._map else None
            headers_json = headers_to_json(found) if self._json else None
        message_id = user_id = reply_to = correlation_id = content_type = content_encoding = created = app_id = None
        if self._properties and message.properties:
            values = first_properties(message.properties, self._properties)
            if self._properties < _ALL_PROPERTIES:
                values += [None] * (_ALL_PROPERTIES - self._properties)
            message_id, user_id, _, _, reply_to, correlation_id, content_type, content_encoding, _, created, app_id = (
                values
            )
        return MessageRow(
            message.body if message.body is not None else _body(message),
            annotations.exchange,
            annotations.routing_key,
            text_of(message_id),
            text_of(correlation_id),
            text_of(content_type),
            due if due is None else microseconds(due),
            sent if sent is None else microseconds(sent),
            headers,
            headers_json,
            kind,
            text_of(content_encoding),
            None if reply_to is None else _reply_to(text_of(reply_to) or ""),
            _escaped_text(old_app_id if app_id is None else app_id),
            _escaped_text(user_id),
            *delivery,
            None if created is None else _creation_time(created),
        )

    def _may_have_fields(self, application: bytes) -> bool:
        """Whether encoded application properties may have a value for a column other than the headers."""
        return (
            (self._times and b"bide-" in application)
            or (self._type and _TYPE in application)
            or (self._app_id and _APP_ID in application)
        )

    def _delivery_fields(self, data: bytes) -> DeliveryFields:
        """Decode a header section, through a cache."""
        if (known := self._delivery_cache.get(data)) is None:
            found = decode(data)
            if not isinstance(found, list):
                raise UndecodableMessageError("its header is not a list")
            persistent, priority, expiration = (found + [None] * 3)[:3]
            known = DeliveryFields(
                priority=_whole(priority, _MAX_PRIORITY),
                expiration=_whole(expiration, _MAX_EXPIRATION),
                persistent=persistent is True,
            )
            if len(data) <= _MAX_CACHED:
                self._delivery_cache[data] = known
        return known

    def _annotations(self, data: bytes) -> Annotations:
        """Decode annotations, through a cache: most messages of a stream have the same ones."""
        if (known := self._annotations_cache.get(data)) is None:
            found = decode(data)
            if not isinstance(found, dict):
                raise UndecodableMessageError("its annotations are not a map")
            exchange, routing_key = (found.get(name) for name in _OWN_ANNOTATIONS)
            known = Annotations(
                _escaped_text(exchange),
                _escaped_text(routing_key),
                _escaped_text(found.get(_TYPE_NAME)),
                _old_delivery_fields(found),
                {
                    name: value
                    for name, value in found.items()
                    if str(name).startswith("x-")
                    and name not in _OWN_ANNOTATIONS
                    and not str(name).startswith(_BROKER_PREFIXES)
                },
            )
            if len(data) <= _MAX_CACHED:
                self._annotations_cache[data] = known
        return known


def _old_delivery_fields(annotations: Mapping[Any, Any]) -> DeliveryFields:
    """The delivery fields that RabbitMQ before 3.13 keeps in annotations."""
    priority, mode, expiration = (
        annotations.get(f"x-basic-{name}") for name in ("priority", "delivery-mode", "expiration")
    )
    return DeliveryFields(
        priority=_whole(priority, _MAX_PRIORITY),
        expiration=expiration_of(expiration),
        persistent=None if type(mode) is not int else mode == PERSISTENT,
    )


def expiration_of(text: Any) -> int | None:
    """The milliseconds of the property ``expiration`` of AMQP 0-9-1, which is text; None if it is not a number."""
    return int(text) if isinstance(text, str) and _DIGITS.fullmatch(text) else None


def _whole(value: Any, highest: int) -> int | None:
    return value if type(value) is int and 0 <= value <= highest else None


def _reply_to(address: str) -> str:
    return unquote(address.removeprefix(_QUEUE_ADDRESS)) if address.startswith(_QUEUE_ADDRESS) else address


def _creation_time(value: Any) -> int | None:
    """A creation time as microseconds; None if the value is not a time."""
    return to_microseconds(value.astimezone(UTC)) if isinstance(value, datetime) else None


def _body(message: Sections) -> bytes:
    """A body of AMQP values or sequences: bytes unchanged, text as UTF-8, other types as JSON."""
    values = [decode(one) for one in message.value]
    value = (
        values[0]
        if len(values) == 1
        else [item for one in values for item in (one if isinstance(one, list) else [one])]
    )
    if isinstance(value, bytes):
        return value
    return (text_of(value) or "").encode()


def microseconds(value: Any) -> int | None:
    """Convert the milliseconds in a header to microseconds; None if the value is not a time."""
    return value * 1000 if type(value) is int and 0 <= value <= LATEST_MILLISECOND else None


def _escaped_text(value: Any) -> str | None:
    """A name as text; bytes that are not UTF-8 are escaped."""
    return escaped(value) if isinstance(value, bytes) else text_of(value)


def text_of(value: Any) -> str | None:
    """An AMQP value as text: bytes as UTF-8 if they are valid UTF-8, else as Base64; lists and maps as JSON."""
    # The most frequent cases first.
    if value is None or type(value) is str:
        return value
    match value:
        case str():
            return str(value)
        case bool():
            return "true" if value else "false"
        case list() | dict():
            return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))
        case _:
            return str(_plain(value))


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return b64encode(value).decode()
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case UUID() | Decimal():
            return str(value)
        case float() if not isfinite(value):
            # JSON cannot represent infinity and NaN.
            return str(value)
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {text_of(name) or "": _plain(one) for name, one in value.items()}
        case _:
            return value
