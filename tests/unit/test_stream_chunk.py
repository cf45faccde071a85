"""Decoding of stream chunks."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import ProtocolError, UndecodableMessageError
from bide.streams import chunk as module
from bide.streams.chunk import HEADER, Chunk, Undecodable, decompress_gzip


def entry(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def batch(messages: list[bytes], compression: int = 0) -> bytes:
    raw = b"".join(entry(one) for one in messages)
    packed = gzip.compress(raw, mtime=0) if compression == 1 else raw
    return struct.pack(">BHII", 0x80 | compression << 4, len(messages), len(raw), len(packed)) + packed


def chunk(
    entries: list[bytes], *, count: int | None = None, first: int = 100, magic: int = 0x50, kind: int = 0, crc: int = 0
) -> bytes:
    data = b"".join(entries)
    numbers = (magic, kind, len(entries), len(entries) if count is None else count, 1700000000123, 7, first)
    return HEADER.pack(*numbers, zlib.crc32(data) ^ crc, len(data), 0, 0) + data


def test_a_chunk_is_read_from_its_frame() -> None:
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
def test_single_messages_and_batches_are_read_in_order(
    single: list[bytes], together: list[bytes], compression: int
) -> None:
    entries = [entry(one) for one in single] + [batch(together, compression)] + [entry(b"last")]
    read = Chunk.read(chunk(entries, count=len(single) + len(together) + 1), 0)
    assert list(read.messages()) == [*single, *together, b"last"]


def test_data_after_the_chunk_is_ignored() -> None:
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
def test_malformed_chunks_are_refused(frame: bytes, reason: str) -> None:
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
        chunk([batch([b"a", b"b"])], count=3),
    ],
)
def test_a_chunk_with_wrong_counts_is_refused(frame: bytes) -> None:
    read = Chunk.read(frame, 0)
    with pytest.raises(ProtocolError, match="the chunk at offset 100"):
        list(read.messages())


def test_unsupported_or_damaged_compression_is_undecodable() -> None:
    with pytest.raises(UndecodableMessageError, match="compressed with zstd, which is not supported"):
        decompress_gzip(4, b"", 0)
    with pytest.raises(UndecodableMessageError, match="with 7"):
        decompress_gzip(7, b"", 0)
    with pytest.raises(UndecodableMessageError, match="cannot be decompressed"):
        decompress_gzip(1, b"hello", 5)
    bomb = gzip.compress(bytes(1_000_000))
    with pytest.raises(UndecodableMessageError, match="does not have the 100 bytes"):
        decompress_gzip(1, bomb, 100)
    with pytest.raises(UndecodableMessageError, match="does not have the 5 bytes"):
        decompress_gzip(1, gzip.compress(b"hello")[:-4], 5)


def lying(records: int, inner: bytes, *, compression: int = 0, unpacked: int | None = None) -> bytes:
    """A batch with an arbitrary header."""
    length = len(inner) if unpacked is None else unpacked
    packed = gzip.compress(inner, mtime=0) if compression == 1 else inner
    return struct.pack(">BHII", 0x80 | compression << 4, records, length, len(packed)) + packed


TWO = entry(b"a") + entry(b"b")
CANNOT_BE_READ = [
    (lying(1, TWO), "does not consist of the 1"),
    (lying(3, TWO), "does not consist of the 3"),
    (lying(2, TWO[:-1]), "does not consist of the 2"),
    (lying(2, TWO + b"\0"), "does not consist of the 2"),
    (lying(2, b""), "does not consist of the 2"),
    (lying(2, entry(b"a") + b"\xff\xff\xff\xff"), "does not consist of the 2"),
    (lying(2, TWO, compression=1, unpacked=0), "does not have the 0 bytes"),
    (lying(2, TWO, compression=1, unpacked=len(TWO) - 1), "does not have the 9 bytes"),
    (lying(2, TWO, compression=1, unpacked=len(TWO) + 1), "does not have the 11 bytes"),
    (
        lying(2, TWO, compression=1, unpacked=0xFFFFFFFF),
        "decompresses to 4,294,967,295 bytes, over the limit of 67,108,864",
    ),
    (lying(2, TWO, compression=2), "compressed with snappy, which is not supported"),
    (lying(2, TWO, compression=6), "compressed with 6, which is not supported"),
]


@pytest.mark.parametrize(("batch_data", "reason"), CANNOT_BE_READ)
def test_an_undecodable_batch_keeps_the_offsets_of_the_others(batch_data: bytes, reason: str) -> None:
    """It has the offsets that the broker gave it, and its bytes are kept."""
    records = int.from_bytes(batch_data[1:3])
    data = chunk([entry(b"before"), batch_data, batch([b"x", b"y"]), entry(b"after")], count=records + 4)
    before, found, *others = Chunk.read(data, 0).messages()
    assert isinstance(found, Undecodable)
    assert (before, found.data) == (b"before", batch_data)
    assert reason in found.reason
    assert others == [None] * (records - 1) + [b"x", b"y", b"after"]


def test_an_empty_batch_takes_no_offset() -> None:
    read = Chunk.read(chunk([entry(b"a"), lying(0, TWO), entry(b"b")], count=2), 0)
    assert list(read.messages()) == [b"a", b"b"]


@pytest.mark.parametrize("unpacked", [0, 1, 1_000_000])
def test_a_compressed_batch_larger_than_it_says_does_not_fill_the_memory(unpacked: int) -> None:
    """300 KB that unpack to 300 MB, although the header gives another size."""
    packed = gzip.compress(bytes(30_000_000), mtime=0) * 10
    bomb = struct.pack(">BHII", 0x90, 1, unpacked, len(packed)) + packed
    read = Chunk.read(chunk([bomb, entry(b"after")], count=2), 0)
    tracemalloc.start()
    try:
        found, after = read.messages()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, Undecodable)
    assert after == b"after"
    assert peak < 5_000_000 + 3 * unpacked


def test_the_batches_of_a_chunk_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNK_SIZE", 25)
    read = Chunk.read(chunk([batch([b"a", b"b"], 1)] * 3 + [batch([b"a", b"b"])], count=8), 0)
    *four, found, nothing, fifth, sixth = read.messages()
    assert (four, nothing, fifth, sixth) == ([b"a", b"b"] * 2, None, b"a", b"b")
    assert isinstance(found, Undecodable)
    assert "over the limit of 25 bytes for all batches" in found.reason


def test_a_custom_decompressor_is_used() -> None:
    read = Chunk.read(chunk([batch([b"a", b"b"], 3)], count=2), 0)
    assert list(read.messages(lambda compression, data, length: data if compression == 3 else b"")) == [b"a", b"b"]
