"""Messages of streams as record batches."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StringType, StructField, StructType

from bide.errors import UndecodableMessageError
from bide.spark import batches
from bide.spark.batches import RecordBatchBuilder, decompress
from bide.spark.columns import STREAM_COLUMNS, arrow_schema, table_schema
from bide.spark.stream_rows import text_of
from bide.spark.typed_headers import headers_from_json
from bide.streams.amqp10 import Symbol, first_properties, lookup
from bide.streams.chunk import HEADER, Chunk
from tests.unit.test_amqp10 import FROM_3_10, FROM_4_3, HEADERS, encode, section
from tests.unit.test_stream_chunk import batch, entry
from tests.unit.test_stream_chunk import chunk as chunk_of


def chunk(messages: list[bytes], first: int = 100) -> Chunk:
    data = b"".join(struct.pack(">I", len(one)) + one for one in messages)
    numbers = (0x50, 0, len(messages), len(messages), 1700000000123, 7, first, zlib.crc32(data), len(data), 0, 0)
    return Chunk.read(HEADER.pack(*numbers) + data, 0)


def read(*messages: bytes, headers: bool = True, raw: bool = False) -> list[dict[str, Any]]:
    columns = table_schema(STREAM_COLUMNS, include_headers=headers, undecodable=raw)
    made = RecordBatchBuilder(arrow_schema(columns, STREAM_COLUMNS), "s", raw=raw)
    assert list(made.add(chunk(list(messages)), 0, len(messages))) == []
    rows: list[dict[str, Any]] = made.take().to_pylist()
    return rows


def message(headers: dict[str, Any] | None = None, body: bytes = b"body") -> bytes:
    return section(0x74, encode(headers or {})) + section(0x75, encode(body))


@pytest.mark.parametrize("stored", [FROM_3_10, FROM_4_3])
def test_a_message_stored_by_rabbitmq_becomes_a_row(stored: bytes) -> None:
    (row,) = read(stored)
    headers = dict(row.pop("headers"))
    assert row == {
        "value": b"hello0",
        "stream": "s",
        "offset": 100,
        "timestamp": datetime.fromtimestamp(1700000000.123, UTC),
        "exchange": "ex",
        "routing_key": "order.created",
        "message_id": "m0",
        "correlation_id": "c",
        "content_type": "text/plain",
        "due": datetime.fromtimestamp(1700000000.123, UTC),
        "scheduled": None,
        "type": "T",
        "content_encoding": None,
        "reply_to": "r",
        "app_id": "a",
        "user_id": "bide",
        "priority": 3,
        "expiration": 60000,
        "persistent": True,
        "creation_time": datetime.fromtimestamp(1700000000, UTC),
    }
    # Wherever the release keeps them.
    assert headers["x-foo"] == "bar"
    assert headers["s"] == "text"
    assert headers["bin"] == "/wA="
    assert headers["bytes"] == "abc"
    assert headers["n"] is None
    assert headers["d"] == "2026-01-01T00:00:00Z"
    assert "x-exchange" not in headers
    assert not [name for name in headers if name.startswith("x-basic-")]
    assert "x-routing-key" not in headers


@pytest.mark.parametrize("stored", [FROM_3_10, FROM_4_3])
@pytest.mark.parametrize("name", [*table_schema(STREAM_COLUMNS, include_headers=True, headers_as_json=True).names])
def test_a_column_read_alone_has_the_value_that_it_has_beside_others(stored: bytes, name: str) -> None:
    schema = arrow_schema(table_schema(STREAM_COLUMNS, include_headers=True, headers_as_json=True), STREAM_COLUMNS)
    found = []
    for one in (schema, pa.schema([schema.field(name)])):
        made = RecordBatchBuilder(one, "s", raw=False)
        assert list(made.add(chunk([stored]), 0, 1)) == []
        found.append(made.take().column(name).to_pylist())
    assert found[0] == found[1]
    assert found[0] != [None] or name in ("scheduled", "content_encoding")


@pytest.mark.parametrize("stored", [FROM_3_10, FROM_4_3])
def test_headers_as_json_keep_their_types(stored: bytes) -> None:
    made = RecordBatchBuilder(pa.schema([("headers_json", pa.string())]), "s", raw=False)
    assert list(made.add(chunk([stored]), 0, 1)) == []
    (text,) = made.take().column("headers_json").to_pylist()
    found = headers_from_json(text)
    found.pop("x-cc", None)
    assert found == {**HEADERS, "x-foo": "bar"}


def test_impossible_priorities_and_expirations_are_null() -> None:
    header = section(0x70, encode([True, 2**40, -5]))
    (row,) = read(header + section(0x75, encode(b"")))
    assert (row["priority"], row["expiration"], row["persistent"]) == (None, None, True)
    annotations = {"x-basic-priority": -1, "x-basic-expiration": "soon", "x-basic-delivery-mode": 1}
    (row,) = read(section(0x72, encode(annotations)) + section(0x75, encode(b"")))
    assert (row["priority"], row["expiration"], row["persistent"]) == (None, None, False)


@pytest.mark.parametrize("stored", [FROM_3_10, FROM_4_3])
def test_the_type_is_read_without_the_headers_column(stored: bytes) -> None:
    schema = StructType([StructField("type", StringType())])
    made = RecordBatchBuilder(arrow_schema(schema, STREAM_COLUMNS), "s", raw=False)
    assert list(made.add(chunk([stored, message({"bide-due": 1})]), 0, 2)) == []
    assert made.take().to_pylist() == [{"type": "T"}, {"type": None}]


def test_times_are_read_without_the_headers_column() -> None:
    (row,) = read(message({"bide-due": 1000, "x": {"y": [1]}, "bide-sent": 2000}), headers=False)
    assert (row["due"], row["scheduled"]) == (datetime.fromtimestamp(1, UTC), datetime.fromtimestamp(2, UTC))


@pytest.mark.parametrize("value", ["1000", True, 1.5, -1, 2**62, None])
def test_an_invalid_time_header_is_null(value: Any) -> None:
    assert read(message({"bide-due": value}))[0]["due"] is None
    assert read(message({"bide-due": value}), headers=False)[0]["due"] is None


def test_nested_headers_become_json() -> None:
    (row,) = read(message({"x-death": [{"queue": "q", "count": 1}], "b": False}))
    assert dict(row["headers"]) == {"x-death": '[{"queue":"q","count":1}]', "b": "false"}


def test_value_bodies_become_bytes_or_json() -> None:
    rows = read(
        section(0x77, encode("text")),
        section(0x77, encode(b"bytes")),
        section(0x77, encode({"a": [1, None]})),
        section(0x77, encode(None)),
        section(0x76, encode([1, 2])) + section(0x76, encode([3])),
    )
    assert [row["value"] for row in rows] == [b"text", b"bytes", b'{"a":[1,null]}', b"", b"[1,2,3]"]


def test_an_undecodable_message_is_an_error_or_a_raw_row() -> None:
    with pytest.raises(UndecodableMessageError, match=r"at offset 101 of stream 's' .* undecodable=raw"):
        read(message(), b"raw bytes")
    rows = read(message(), b"raw bytes", message(), raw=True)
    assert [row["value"] for row in rows] == [b"body", b"raw bytes", b"body"]
    assert [row["offset"] for row in rows] == [100, 101, 102]
    assert rows[1]["headers"] is None


def test_sections_of_another_type_are_undecodable() -> None:
    body = section(0x75, encode(b""))
    for code in (0x72, 0x74):
        with pytest.raises(UndecodableMessageError):
            read(section(code, encode([])) + body)
    with pytest.raises(UndecodableMessageError, match="not a list"):
        read(section(0x73, encode({})) + body)
    with pytest.raises(UndecodableMessageError, match="not a map"):
        read(section(0x74, encode(["bide-due"])) + body, headers=False)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(1, 30), st.integers(1, 500))
def test_batches_are_bounded_and_complete(sizes: list[int], rows: int, most_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MAX_ROWS", rows)
        patch.setattr(batches, "MAX_BYTES", most_bytes)
        made = RecordBatchBuilder(
            arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False), STREAM_COLUMNS), "s", raw=False
        )
        found: list[pa.RecordBatch] = []
        first = 0
        for size in sizes:
            found += made.add(chunk([message(body=b"%d" % (first + index)) for index in range(size)], first), 0, size)
            first += size
        if made.rows:
            found.append(made.take())
    assert all(0 < one.num_rows <= rows for one in found)
    taken = [row for one in found for row in one.to_pylist()]
    assert [row["value"] for row in taken] == [b"%d" % number for number in range(first)]
    assert [row["offset"] for row in taken] == list(range(first))


def test_a_part_of_a_chunk_can_be_read() -> None:
    made = RecordBatchBuilder(
        arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False), STREAM_COLUMNS), "s", raw=False
    )
    assert list(made.add(chunk([message(body=b"%d" % number) for number in range(9)]), 3, 5)) == []
    assert [(row["offset"], row["value"]) for row in made.take().to_pylist()] == [(103, b"3"), (104, b"4")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ("a", "a"),
        (Symbol("a"), "a"),
        (True, "true"),
        (5, "5"),
        (1.5, "1.5"),
        (b"a", "a"),
        (b"\xff", "/w=="),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.50"),
        ([1, b"\xff", None, {"k": True}], '[1,"/w==",null,{"k":true}]'),
        ([Decimal("-1.50"), {"k": Decimal(7)}], '["-1.50",{"k":"7"}]'),
        ([float("nan"), float("-inf"), 1.5], '["nan","-inf",1.5]'),
        ([datetime(2026, 1, 1, tzinfo=UTC), 1], '["2026-01-01T00:00:00Z",1]'),
    ],
)
def test_header_values_become_text(value: Any, text: str | None) -> None:
    assert text_of(value) == text
    assert type(text_of(value)) in (str, type(None))


@pytest.mark.parametrize(("number", "codec"), [(0, None), (1, "gzip"), (3, "lz4"), (4, "zstd")])
def test_compressed_batches_are_decompressed(number: int, codec: str | None) -> None:
    raw = b"some text " * 20
    packed = raw if codec is None else pa.compress(raw, codec=codec, asbytes=True)
    assert decompress(number, packed, len(raw)) == raw
    if codec is not None:
        with pytest.raises(UndecodableMessageError, match="cannot be decompressed"):
            decompress(number, b"something else", 14)
    with pytest.raises(UndecodableMessageError, match="snappy, which is not supported"):
        decompress(2, b"", 0)


properties = st.lists(st.none() | st.text(max_size=20) | st.binary(max_size=5) | st.integers(0, 2**40), max_size=13)


@given(properties)
def test_the_first_properties_are_those_of_the_decoded_list(values: list[Any]) -> None:
    padded = [*values, *[None] * 13]
    for count in (7, 11):
        assert first_properties(encode(values), count) == padded[:count]


def test_a_truncated_property_list_is_undecodable() -> None:
    assert first_properties(b"\x45", 7) == [None] * 7
    for data in (b"\xc0\x05\x01\xa1\x03a", b"\xc0\x02\x02\x40", b"\xd0\0\0"):
        with pytest.raises(UndecodableMessageError, match="end too early"):
            first_properties(data, 7)


def short(text: str) -> bytes:
    return b"\xa1" + bytes([len(text)]) + text.encode()


@given(st.dictionaries(st.sampled_from(["a", "b", "bide-due", "c"]), st.integers(0, 100) | st.text(max_size=9)))
def test_a_lookup_finds_the_values_of_the_decoded_map(headers: dict[str, Any]) -> None:
    content = b"".join(short(name) + encode(value) for name, value in headers.items())
    data = b"\xd1" + struct.pack(">II", len(content) + 4, 2 * len(headers)) + content
    assert lookup(data, b"bide-due", b"c") == [headers.get("bide-due"), headers.get("c")]


def test_a_lookup_in_a_malformed_map_is_undecodable() -> None:
    for data in (b"\xc1\x05\x02\xa1\x01a", b"\xc1\x02\x02\x40", b"\xc1\x03\x02\x40\x40\x40", b"\xd1\0"):
        with pytest.raises(UndecodableMessageError):
            lookup(data, b"a")


def test_an_unsupported_compression_is_an_error_or_one_raw_row() -> None:
    schema = arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False, undecodable=True), STREAM_COLUMNS)
    two = batch([message(), message()], compression=2)
    packed = Chunk.read(chunk_of([entry(message()), two, entry(message(body=b"after"))], count=4), 0)
    with pytest.raises(UndecodableMessageError, match=r"at offset 101 of stream 's' .* snappy, .* undecodable=raw"):
        list(RecordBatchBuilder(schema, "s", raw=False).add(packed, 0, 4))
    made = RecordBatchBuilder(schema, "s", raw=True)
    assert list(made.add(packed, 0, 4)) == []
    rows = made.take().to_pylist()
    assert [(row["offset"], row["value"]) for row in rows] == [(100, b"body"), (101, two), (103, b"after")]
    assert "snappy" in rows[1]["undecodable"]
    assert [row["undecodable"] for row in (rows[0], rows[2])] == [None, None]
    # The row belongs to the task that reads the first offset of the batch.
    assert list(made.add(packed, 2, 4)) == []
    assert [row["offset"] for row in made.take().to_pylist()] == [103]


def test_the_undecodable_column_gives_the_reason() -> None:
    rows = read(message(), b"raw bytes", raw=True)
    assert [row["undecodable"] for row in rows] == [None, "byte 0x72 at 0 does not begin a section"]


BAD = b"\xa1\x03a\xff\xfe"


def test_text_that_is_not_utf_8_does_not_stop_reading() -> None:
    """The names are as over AMQP 0-9-1, and the value of a header is its bytes in Base64."""

    def compound(kind: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return bytes([kind, len(content) + 1, len(parts)]) + content

    annotations = compound(0xC1, short("x-routing-key"), BAD, short("x-basic-type"), BAD)
    properties = compound(0xC0, BAD, *[b"\x40"] * 4, BAD, b"\xa3\x03a\xff\xfe")
    headers = compound(0xC1, BAD, BAD)
    (row,) = read(
        section(0x72, annotations) + section(0x73, properties) + section(0x74, headers) + section(0x75, encode(b"body"))
    )
    escaped = "a\\xff\\xfe"
    assert row["value"] == b"body"
    for name in ("routing_key", "message_id", "correlation_id", "content_type", "type"):
        assert row[name] == escaped, name
    assert row["headers"] == [(escaped, "Yf/+")]


@pytest.mark.parametrize("number", [1, 3, 4])
@pytest.mark.parametrize("length", [0, 10, 199, 201, 4_000])
def test_a_compressed_batch_of_another_length_is_undecodable(number: int, length: int) -> None:
    """Arrow filled what was missing with what happened to be in memory."""
    raw = b"some text " * 20
    packed = pa.compress(raw, codec={1: "gzip", 3: "lz4", 4: "zstd"}[number], asbytes=True)
    with pytest.raises(UndecodableMessageError, match=f"does not have the {length:,} bytes"):
        decompress(number, packed, length)


@pytest.mark.parametrize("number", [3, 4])
def test_a_compressed_batch_larger_than_it_says_does_not_fill_the_memory(number: int) -> None:
    packed = pa.compress(bytes(200_000_000), codec={3: "lz4", 4: "zstd"}[number], asbytes=True)
    pool = pa.system_memory_pool()
    before = pool.max_memory()
    with pa_default(pool), pytest.raises(UndecodableMessageError):
        decompress(number, packed, 1_000)
    assert pool.max_memory() - before < 10_000_000


@contextmanager
def pa_default(pool: pa.MemoryPool) -> Iterator[None]:
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(usual)


def test_large_messages_of_one_compressed_batch_are_split_into_tables() -> None:
    """The bound of a table counts what messages have, not what their chunk has."""
    body = section(0x75, encode(bytes(100_000)))
    made = RecordBatchBuilder(
        arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False), STREAM_COLUMNS), "s", raw=False
    )
    packed = Chunk.read(chunk_of([batch([body] * 500, compression=1)], count=500), 0)
    found = list(made.add(packed, 0, 500))
    assert sum(one.num_rows for one in found) + made.rows == 500
    assert len(found) == 5
    assert all(one.nbytes < 9_000_000 for one in found)


def test_large_annotations_are_not_cached() -> None:
    """Each of them different, and large."""
    made = RecordBatchBuilder(
        arrow_schema(table_schema(STREAM_COLUMNS, include_headers=False), STREAM_COLUMNS), "s", raw=False
    )
    for number in range(50):
        annotations = section(0x72, encode({"x-a": f"{number}" + "a" * 2_000}))
        list(made.add(chunk([annotations + message()]), 0, 1))
    assert len(made._reader._annotations_cache) == 0


@given(
    st.lists(
        st.binary(max_size=60)
        | st.builds(
            lambda stored, at, byte: stored[:at] + bytes([byte]) + stored[at + 1 :],
            st.sampled_from([FROM_3_10, FROM_4_3]),
            st.integers(0, 400),
            st.integers(0, 255),
        ),
        max_size=5,
    )
)
def test_any_stored_bytes_become_a_row(stored: list[bytes]) -> None:
    rows = read(*stored, message(body=b"after"), raw=True)
    assert [row["offset"] for row in rows] == list(range(100, 101 + len(stored)))
    assert rows[-1]["value"] == b"after"
    for row, data in zip(rows, stored, strict=False):
        assert row["undecodable"] is None or row["value"] == data
