"""Messages of streams as record batches of Arrow."""

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
from bide.streams.chunk import COMPRESSIONS, Chunk, Undecodable, unpack_gzip

MOST_ROWS: Final = 10_000
MOST_BYTES: Final = 8 << 20
"""Bounds of a batch; it has at least one row."""

_LONGEST_CACHED: Final = 1 << 10
"""Bytes of the annotations that are kept once read. Those of most messages have a hundred."""

_LATEST: Final = 253_402_300_800_000
"""Milliseconds from 1970 to the year 10000, where Spark's calendar ends for Python."""

_BY_ARROW: Final = frozenset({"lz4", "zstd"})
_DUE: Final = HEADER_DUE.encode()
_SENT: Final = HEADER_SENT.encode()
_TYPE_NAME: Final = "x-basic-type"
_TYPE: Final = _TYPE_NAME.encode()
"""Where RabbitMQ keeps the property ``type``: in the annotations; before 3.13 among the application properties."""

_OWN_ANNOTATIONS: Final = ("x-exchange", "x-routing-key")
_BROKER_PREFIXES: Final = ("x-opt-", "x-basic-", "x-stream-")

Entry = tuple[str | None, str | None, str | None, dict[str, Any]]
"""From the annotations: exchange, routing key, type, and what RabbitMQ 4 keeps there of the headers."""


def unpack(compression: int, data: bytes, length: int) -> bytes:
    """Unpack a batch of messages.

    Raises:
        UndecodableMessageError: it is packed in a way that is not read (snappy), or is not what its header says.
    """
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else ""
    if name not in _BY_ARROW:
        return unpack_gzip(compression, data, length)
    try:
        # Not by pa.decompress, which fills up what is shorter than announced with anything in memory.
        with pa.CompressedInputStream(pa.BufferReader(data), name) as stream:
            unpacked: bytes = stream.read(length + 1)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UndecodableMessageError(f"a batch of messages packed by {name} cannot be unpacked: {error}") from error
    if len(unpacked) != length:
        raise UndecodableMessageError(f"a batch of messages packed by {name} is not {length:,} bytes, as it says")
    return unpacked


class Row(NamedTuple):
    """What a message says itself; the names are those of the columns."""

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
    """Turns the chunks of one stream into record batches with the columns of a schema."""

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
        self._entries = BoundedCache[bytes, Entry]()
        self._rows: list[Row] = []
        self._offsets: list[int] = []
        self._timestamps: list[int] = []
        self._bytes = 0

    def add(self, chunk: Chunk, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Take in the messages between two indexes of a chunk; yields the batches that are full.

        Raises:
            UndecodableMessageError: a message is not one of AMQP 1.0, or is in a batch that cannot be read, and it is
                not wanted as it is.
        """
        timestamp = chunk.timestamp * 1000
        rows, read = self._rows, self._row
        for offset, data in enumerate(islice(chunk.messages(unpack), first, last), chunk.first + first):
            if data is None:
                # It is part of the batch in an earlier row.
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
            if self._bytes >= MOST_BYTES or len(rows) >= MOST_ROWS:
                yield self.take()
                rows = self._rows

    def _undecodable(self, data: bytes | Undecodable, offset: int, error: UndecodableMessageError) -> Row:
        if not self._raw:
            raise UndecodableMessageError(
                f"the message at offset {offset:,} of stream {self._stream!r} cannot be read: {error}. The option "
                "undecodable=raw takes such messages as they are"
            ) from error
        return Row(data.data if isinstance(data, Undecodable) else data, undecodable=str(error))

    @property
    def rows(self) -> int:
        """How many rows wait to be taken."""
        return len(self._rows)

    def take(self) -> pa.RecordBatch:
        """The rows so far."""
        columns: dict[str, Any] = dict(zip(Row._fields, zip(*self._rows, strict=True), strict=False))
        columns["offset"] = self._offsets
        columns["timestamp"] = self._timestamps
        columns["stream"] = pa.repeat(self._stream, len(self._rows))
        arrays = [pa.array(columns[field.name], type=field.type) for field in self._schema]
        self._rows, self._offsets, self._timestamps, self._bytes = [], [], [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _row(self, data: bytes) -> Row:
        cut = sections(data)
        exchange = routing_key = message_id = correlation_id = content_type = headers = due = sent = kind = None
        annotated: dict[str, Any] = {}
        if self._routing and cut.annotations:
            exchange, routing_key, kind, annotated = self._annotations(cut.annotations)
        if self._identity and cut.properties:
            message_id, correlation_id, content_type = map(text_of, identity(cut.properties))
        if cut.application:
            if self._headers:
                application = decode(cut.application)
                if not isinstance(application, dict):
                    raise UndecodableMessageError("its application properties are no map")
                due, sent = application.get(HEADER_DUE), application.get(HEADER_SENT)
                kind = kind or _name(application.pop(_TYPE_NAME, None))
                annotated = {**annotated, **application}
            elif (self._times and b"bide-" in cut.application) or (self._type and _TYPE in cut.application):
                due, sent, found = lookup(cut.application, _DUE, _SENT, _TYPE)
                kind = kind or _name(found)
        if self._headers and annotated:
            headers = [(str(name), text_of(value)) for name, value in annotated.items()]
        return Row(
            cut.body if cut.body is not None else _body(cut),
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

    def _annotations(self, data: bytes) -> Entry:
        """They are the same for most messages of a stream: read them once."""
        if (known := self._entries.get(data)) is None:
            found = decode(data)
            if not isinstance(found, dict):
                raise UndecodableMessageError("its annotations are no map")
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
            if len(data) <= _LONGEST_CACHED:
                self._entries[data] = known
        return known


def _body(cut: Sections) -> bytes:
    """A body that is a value: text and bytes as they are, anything else as JSON."""
    values = [decode(one) for one in cut.value]
    value = (
        values[0]
        if len(values) == 1
        else [item for one in values for item in (one if isinstance(one, list) else [one])]
    )
    if isinstance(value, bytes):
        return value
    return (text_of(value) or "").encode()


def microseconds(value: Any) -> int | None:
    """Microseconds from the milliseconds in a header, or None where that is not a time."""
    return value * 1000 if type(value) is int and 0 <= value < _LATEST else None


def _name(value: Any) -> str | None:
    """A name as text, with escapes where it is not UTF-8."""
    return escaped(value) if isinstance(value, bytes) else text_of(value)


def text_of(value: Any) -> str | None:
    """A value of AMQP as text: bytes are read as UTF-8, or else as Base64; lists and maps are JSON."""
    # First what is most frequent.
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
            # JSON has no such numbers.
            return str(value)
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {text_of(name) or "": _plain(one) for name, one in value.items()}
        case _:
            return value
