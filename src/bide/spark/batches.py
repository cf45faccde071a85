"""Messages of streams as record batches of Arrow."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from bide.delay.infrastructure import HEADER_DUE, HEADER_SENT
from bide.errors import UndecodableMessageError
from bide.stream.amqp10 import Sections, decode, identity, sections
from bide.stream.chunk import COMPRESSIONS, Chunk, unpack_gzip

MOST_ROWS: Final = 10_000
MOST_BYTES: Final = 8 << 20
"""Bounds of a batch; a batch has at least the part of one chunk that is wanted, up to the number of rows."""

_MOST_CACHED: Final = 10_000
_LATEST: Final = 253_402_300_800_000
"""Milliseconds from 1970 to the year 10000, where Spark's calendar ends for Python."""

_BY_ARROW: Final = frozenset({"lz4", "zstd"})
_OWN_ANNOTATIONS: Final = ("x-exchange", "x-routing-key")
_BROKER_PREFIXES: Final = ("x-opt-", "x-basic-", "x-stream-")

Entry = tuple[str | None, str | None, dict[str, Any]]
"""From the annotations: exchange, routing key, and what RabbitMQ 4 keeps there of the headers."""


def unpack(compression: int, data: bytes, length: int) -> bytes:
    """Unpack a batch of messages.

    Raises:
        UndecodableMessageError: it is packed in a way that is not read (snappy), or is not what its header says.
    """
    name = COMPRESSIONS[compression] if compression < len(COMPRESSIONS) else ""
    if name not in _BY_ARROW:
        return unpack_gzip(compression, data, length)
    try:
        unpacked: bytes = pa.decompress(data, decompressed_size=length, codec=name, asbytes=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UndecodableMessageError(f"a batch of messages packed by {name} cannot be unpacked: {error}") from error
    return unpacked


class Batches:
    """Turns the chunks of one stream into record batches with the columns of a schema."""

    def __init__(self, schema: pa.Schema, stream: str, *, raw: bool) -> None:
        self._schema = schema
        self._stream = stream
        self._raw = raw
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.names}
        self._bytes = 0
        self._rows = 0
        wanted = set(schema.names)
        self._headers = "headers" in wanted
        self._routing = bool(wanted & {"exchange", "routing_key", "headers"})
        self._identity = bool(wanted & {"message_id", "correlation_id", "content_type"})
        self._times = bool(wanted & {"due", "scheduled"})
        self._entries: dict[bytes, Entry] = {}

    def add(self, chunk: Chunk, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Take in the messages between two indexes of a chunk; yields the batches that are full.

        Raises:
            UndecodableMessageError: a message is not one of AMQP 1.0, and it is not wanted as it is.
        """
        offset = chunk.first + first
        stamp = chunk.timestamp * 1000
        columns = self._columns
        for data in islice(chunk.messages(unpack), first, last):
            try:
                row = self._row(data)
            except UndecodableMessageError as error:
                if not self._raw:
                    raise UndecodableMessageError(
                        f"the message at offset {offset:,} of stream {self._stream!r} cannot be read: {error}. "
                        "The option undecodable=raw takes such messages as they are"
                    ) from error
                row = {"value": data}
            row["offset"] = offset
            row["timestamp"] = stamp
            row["stream"] = self._stream
            for name, values in columns.items():
                values.append(row.get(name))
            offset += 1
            self._rows += 1
            self._bytes += len(data)
            if self._rows >= MOST_ROWS or self._bytes >= MOST_BYTES:
                yield self.take()

    @property
    def rows(self) -> int:
        """How many rows wait to be taken."""
        return self._rows

    def take(self) -> pa.RecordBatch:
        """The rows so far."""
        arrays = [pa.array(self._columns[field.name], type=field.type) for field in self._schema]
        for values in self._columns.values():
            values.clear()
        self._rows = self._bytes = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _row(self, data: bytes) -> dict[str, Any]:
        cut = sections(data)
        row: dict[str, Any] = {"value": cut.body if cut.body is not None else _body(cut)}
        annotated: dict[str, Any] = {}
        if self._routing and cut.annotations:
            row["exchange"], row["routing_key"], annotated = self._annotations(cut.annotations)
        if self._identity and cut.properties:
            message_id, correlation_id, content_type = identity(cut.properties)
            row["message_id"] = text_of(message_id)
            row["correlation_id"] = text_of(correlation_id)
            row["content_type"] = text_of(content_type)
        if cut.application and (self._headers or (self._times and b"bide-" in cut.application)):
            headers = decode(cut.application)
            if not isinstance(headers, dict):
                raise UndecodableMessageError("its application properties are no map")
            row["due"] = _time(headers.get(HEADER_DUE))
            row["scheduled"] = _time(headers.get(HEADER_SENT))
            annotated = {**annotated, **headers}
        if self._headers and annotated:
            row["headers"] = [(str(name), text_of(value)) for name, value in annotated.items()]
        return row

    def _annotations(self, data: bytes) -> Entry:
        """They are the same for most messages of a stream: read them once."""
        if (known := self._entries.get(data)) is None:
            found = decode(data)
            if not isinstance(found, dict):
                raise UndecodableMessageError("its annotations are no map")
            if len(self._entries) >= _MOST_CACHED:
                self._entries.clear()
            exchange, routing_key = (found.get(name) for name in _OWN_ANNOTATIONS)
            known = self._entries[data] = (
                text_of(exchange),
                text_of(routing_key),
                {
                    name: value
                    for name, value in found.items()
                    if str(name).startswith("x-")
                    and name not in _OWN_ANNOTATIONS
                    and not str(name).startswith(_BROKER_PREFIXES)
                },
            )
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


def _time(value: Any) -> int | None:
    """Microseconds from the milliseconds in a header, or None where that is no time."""
    return value * 1000 if type(value) is int and 0 <= value < _LATEST else None


def text_of(value: Any) -> str | None:
    """A value of AMQP as text: bytes are read as UTF-8, or else as Base64; lists and maps are JSON."""
    match value:
        case None:
            return None
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
        case UUID():
            return str(value)
        case list() | tuple():
            return [_plain(one) for one in value]
        case dict():
            return {text_of(name) or "": _plain(one) for name, one in value.items()}
        case _:
            return value
