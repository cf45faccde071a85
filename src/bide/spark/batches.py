"""Messages of streams as Arrow record batches."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from itertools import islice
from math import isfinite
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa

from bide.delay.protocol import HEADER_DUE, HEADER_SENT
from bide.errors import UndecodableMessageError
from bide.runtime.bounded_cache import BoundedCache
from bide.streams.amqp10 import Sections, decode, escaped, identity, lookup, sections
from bide.streams.chunk import COMPRESSIONS, Chunk, Undecodable, decompress_gzip

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 8 << 20
"""Limits of a batch, which has at least one row."""

_MAX_CACHED: Final = 1 << 10
"""Largest encoded annotations that are cached, in bytes. Those of most messages have about a hundred bytes."""

_LATEST: Final = 253_402_300_800_000
"""Milliseconds from 1970 to the year 10000, the end of the range that Spark and Python share."""

_BY_ARROW: Final = frozenset({"lz4", "zstd"})
_DUE: Final = HEADER_DUE.encode()
_SENT: Final = HEADER_SENT.encode()
_TYPE_NAME: Final = "x-basic-type"
_TYPE: Final = _TYPE_NAME.encode()
"""The annotation in which RabbitMQ keeps the property ``type``; before 3.13 it was an application property."""

_OWN_ANNOTATIONS: Final = ("x-exchange", "x-routing-key")
_BROKER_PREFIXES: Final = ("x-opt-", "x-basic-", "x-stream-")

Annotations = tuple[str | None, str | None, str | None, dict[str, Any]]
"""Exchange, routing key and type from the annotations, and the headers that RabbitMQ 4 keeps there."""


def decompress(compression: int, data: bytes, length: int) -> bytes:
    """Decompress a batch of messages.

    Raises:
        UndecodableMessageError: an unsupported compression (snappy), or data that do not match the header of the batch.
    """
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else ""
    if name not in _BY_ARROW:
        return decompress_gzip(compression, data, length)
    try:
        # pa.decompress is unsafe here: it pads a result shorter than announced with uninitialized memory.
        with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
            raw: bytes = stream.read(length + 1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UndecodableMessageError(
            f"a batch of messages compressed by {name} cannot be decompressed: {error}"
        ) from error
    if len(raw) != length:
        raise UndecodableMessageError(
            f"a batch of messages compressed by {name} is not {length:,} bytes long, as its header says"
        )
    return raw


class Row(NamedTuple):
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
    type: str | None = None
    undecodable: str | None = None


class Batches:
    """Converts the chunks of one stream into record batches with the columns of a schema.

    Args:
        raw: whether undecodable messages become rows, rather than an error.
    """

    def __init__(self, schema: pa.Schema, stream: str, *, raw: bool) -> None:
        self._schema = schema
        self._stream = stream
        self._raw = raw
        wanted = set(schema.names)
        self._headers = "headers" in wanted
        self._routing = bool(wanted & {"exchange", "routing_key", "headers", "type"})
        self._identity = bool(wanted & {"message_id", "correlation_id", "content_type"})
        self._times = bool(wanted & {"due", "scheduled"})
        self._type = "type" in wanted
        self._annotations_cache = BoundedCache[bytes, Annotations]()
        self._rows: list[Row] = []
        self._offsets: list[int] = []
        self._timestamps: list[int] = []
        self._bytes = 0

    def add(self, chunk: Chunk, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Add the messages between two indexes of a chunk; yields a batch whenever one is full.

        Raises:
            UndecodableMessageError: a message cannot be decoded, and ``raw`` is false.
        """
        timestamp = chunk.timestamp * 1000
        rows, read = self._rows, self._row
        for offset, data in enumerate(islice(chunk.messages(decompress), first, last), chunk.first + first):
            if data is None:
                # Part of an undecodable batch, which is an earlier row.
                continue
            try:
                if isinstance(data, Undecodable):
                    raise UndecodableMessageError(data.reason)
                row = read(data)
            except UndecodableMessageError as error:
                row = self._undecodable(data, offset, error)
            rows.append(row)
            self._offsets.append(offset)
            self._timestamps.append(timestamp)
            self._bytes += len(data) if row.undecodable is None else len(row.value)
            if self._bytes >= MAX_BYTES or len(rows) >= MAX_ROWS:
                yield self.take()
                rows = self._rows

    def _undecodable(self, data: bytes | Undecodable, offset: int, error: UndecodableMessageError) -> Row:
        if not self._raw:
            raise UndecodableMessageError(
                f"the message at offset {offset:,} of stream {self._stream!r} cannot be decoded: {error}. To read such "
                "messages as raw bytes, set the option undecodable=raw"
            ) from error
        return Row(data.data if isinstance(data, Undecodable) else data, undecodable=str(error))

    @property
    def rows(self) -> int:
        """The number of rows in the batch so far."""
        return len(self._rows)

    def take(self) -> pa.RecordBatch:
        """Return the rows so far as a batch, and start a new one."""
        columns: dict[str, Any] = dict(zip(Row._fields, zip(*self._rows, strict=True), strict=False))
        columns["offset"] = self._offsets
        columns["timestamp"] = self._timestamps
        columns["stream"] = pa.repeat(self._stream, len(self._rows))
        arrays = [pa.array(columns[field.name], type=field.type) for field in self._schema]
        self._rows, self._offsets, self._timestamps, self._bytes = [], [], [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _row(self, data: bytes) -> Row:
        message = sections(data)
        exchange = routing_key = message_id = correlation_id = content_type = headers = due = sent = kind = None
        annotated: dict[str, Any] = {}
        if self._routing and message.annotations:
            exchange, routing_key, kind, annotated = self._annotations(message.annotations)
        if self._identity and message.properties:
            message_id, correlation_id, content_type = map(text_of, identity(message.properties))
        if message.application:
            if self._headers:
                application = decode(message.application)
                if not isinstance(application, dict):
                    raise UndecodableMessageError("its application properties are not a map")
                due, sent = application.get(HEADER_DUE), application.get(HEADER_SENT)
                kind = kind or _name(application.pop(_TYPE_NAME, None))
                annotated = {**annotated, **application}
            elif (self._times and b"bide-" in message.application) or (self._type and _TYPE in message.application):
                due, sent, found = lookup(message.application, _DUE, _SENT, _TYPE)
                kind = kind or _name(found)
        if self._headers and annotated:
            headers = [(str(name), text_of(value)) for name, value in annotated.items()]
        return Row(
            message.body if message.body is not None else _body(message),
            exchange,
            routing_key,
            message_id,
            correlation_id,
            content_type,
            due if due is None else microseconds(due),
            sent if sent is None else microseconds(sent),
            headers,
            kind,
        )

    def _annotations(self, data: bytes) -> Annotations:
        """Decode annotations, through a cache: most messages of a stream have the same ones."""
        if (known := self._annotations_cache.get(data)) is None:
            found = decode(data)
            if not isinstance(found, dict):
                raise UndecodableMessageError("its annotations are not a map")
            exchange, routing_key = (found.get(name) for name in _OWN_ANNOTATIONS)
            known = (
                _name(exchange),
                _name(routing_key),
                _name(found.get(_TYPE_NAME)),
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
    return value * 1000 if type(value) is int and 0 <= value < _LATEST else None


def _name(value: Any) -> str | None:
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
