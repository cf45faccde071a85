"""Chunks of a stream."""

from __future__ import annotations

import gzip
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import ProtocolError, UndecodableMessageError
from bide.stream.chunk import HEADER, Chunk, unpack_gzip


def entry(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def batch(messages: list[bytes], compression: int = 0) -> bytes:
    raw = b"".join(entry(one) for one in messages)
    packed = gzip.compress(raw) if compression == 1 else raw
    return struct.pack(">BHII", 0x80 | compression << 4, len(messages), len(raw), len(packed)) + packed


def chunk(
    entries: list[bytes], *, count: int | None = None, first: int = 100, magic: int = 0x50, kind: int = 0, crc: int = 0
) -> bytes:
    data = b"".join(entries)
    numbers = (magic, kind, len(entries), len(entries) if count is None else count, 1700000000123, 7, first)
    return HEADER.pack(*numbers, zlib.crc32(data) ^ crc, len(data), 0, 0) + data


def test_a_chunk_in_a_frame() -> None:
    frame = b"\0\x08\0\x01\x05" + chunk([entry(b"one"), entry(b"")])
    read = Chunk.read(frame, 5)
    assert (read.first, read.count, read.end, read.timestamp) == (100, 2, 102, 1700000000123)
    assert list(read.messages()) == [b"one", b""]
    assert HEADER.size == 48


@given(
    st.lists(st.binary(max_size=50), max_size=20),
    st.lists(st.binary(max_size=50), max_size=20),
    st.sampled_from([0, 1]),
)
def test_single_messages_and_batches(single: list[bytes], together: list[bytes], compression: int) -> None:
    entries = [entry(one) for one in single] + [batch(together, compression)] + [entry(b"last")]
    read = Chunk.read(chunk(entries, count=len(single) + len(together) + 1), 0)
    assert list(read.messages()) == [*single, *together, b"last"]


def test_data_after_the_chunk_do_not_matter() -> None:
    assert list(Chunk.read(chunk([entry(b"a")]) + b"filter or trailer", 0).messages()) == [b"a"]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (chunk([entry(b"a")])[:47], "within its header"),
        (chunk([entry(b"abcdef")])[:-1], "has 9 bytes of 10"),
        (chunk([entry(b"a")], crc=1), "wrong checksum"),
        (chunk([entry(b"a")], magic=0x60), "begins with 0x60"),
        (chunk([entry(b"a")], kind=2), "begins with 0x50 0x02"),
    ],
)
def test_what_is_no_chunk(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Chunk.read(frame, 0)


@pytest.mark.parametrize(
    "frame",
    [
        chunk([entry(b"a")], count=2),
        chunk([entry(b"a"), entry(b"b")], count=1),
        chunk([entry(b"a"), b"\0\0\0\x09b"]),
        chunk([entry(b"a"), b"\0\0"]),
        chunk([batch([b"a", b"b"])[:-1]], count=2),
    ],
)
def test_a_chunk_that_holds_something_else_than_it_says(frame: bytes) -> None:
    read = Chunk.read(frame, 0)
    with pytest.raises(ProtocolError, match="the chunk at offset 100"):
        list(read.messages())


def test_compressions_that_cannot_be_unpacked() -> None:
    with pytest.raises(UndecodableMessageError, match="packed by zstd, which is not read"):
        list(Chunk.read(chunk([batch([b"a"], 4)]), 0).messages())
    with pytest.raises(UndecodableMessageError, match="by 7"):
        unpack_gzip(7, b"", 0)
    with pytest.raises(UndecodableMessageError, match="cannot be unpacked"):
        unpack_gzip(1, b"hello", 5)
    bomb = gzip.compress(bytes(1_000_000))
    with pytest.raises(UndecodableMessageError, match="is not 100 bytes"):
        unpack_gzip(1, bomb, 100)


def test_a_packer_of_ones_own() -> None:
    read = Chunk.read(chunk([batch([b"a", b"b"], 3)], count=2), 0)
    assert list(read.messages(lambda compression, data, length: data if compression == 3 else b"")) == [b"a", b"b"]
