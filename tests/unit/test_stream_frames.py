"""Frames of the stream protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import ProtocolError
from bide.streams import frames
from bide.streams.frames import Fields, StreamMetadata


def test_a_subscription_is_encoded_as_specified() -> None:
    """Field by field as the protocol's reference has it."""
    assert frames.subscribe(5, 3, "orders", frames.at_offset(258), 10) == bytes.fromhex(
        "0000002100070001000000050300066f726465727300040000000000000102000a00000000"
    )


def test_a_credit_is_encoded_as_specified() -> None:
    assert frames.credit(3, 2) == bytes.fromhex("0000000700090001030002")


def test_messages_are_published_with_consecutive_ids() -> None:
    assert frames.publish(1, 258, [b"a", b"bc"]) == bytes.fromhex(
        "00000024000200010100000002000000000000010200000001610000000000000103000000026263"
    )


def test_a_list_of_numbers_is_read_as_sent() -> None:
    data = bytes.fromhex("00000002ffffffffffffffff0000000000000102")
    assert Fields(data).int64s() == [-1, 258]
    with pytest.raises(ProtocolError, match="ends too early"):
        Fields(data[:-1]).int64s()


def test_positions_are_encoded_as_specified() -> None:
    assert (frames.FIRST, frames.LAST) == (b"\0\1", b"\0\2")
    assert frames.at_time(-1) == b"\0\5" + b"\xff" * 8


@given(
    st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=4), st.lists(st.text(max_size=10), max_size=4)
)
def test_properties_and_strings_are_read_as_written(pairs: dict[str, str], texts: list[str]) -> None:
    fields = Fields(frames.properties(pairs) + frames.strings(texts))
    assert fields.properties() == pairs
    assert fields.strings() == texts


def test_metadata_names_the_leader_and_replicas_of_each_stream() -> None:
    one, two = b"\0\1" + frames.string("a") + b"\0\0\x15\xb0", b"\0\2" + frames.string("b") + b"\0\0\x15\xb1"
    here = frames.string("s") + b"\0\1" + b"\0\2" + b"\0\0\0\2" + b"\0\1\0\7"
    gone = frames.string("t") + b"\0\2" + b"\xff\xff" + b"\0\0\0\0"
    assert frames.metadata(Fields(b"\0\0\0\2" + one + two + b"\0\0\0\2" + here + gone)) == {
        "s": StreamMetadata(code=frames.OK, leader=("b", 5553), replicas=(("a", 5552),)),
        "t": StreamMetadata(code=frames.NO_SUCH_STREAM, leader=None, replicas=()),
    }


def test_absent_texts_are_empty() -> None:
    assert Fields(b"\xff\xff").string() == ""


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\5abc"])
def test_a_truncated_frame_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="ends too early"):
        Fields(data).string()


def test_a_text_over_32_767_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match="32,768 bytes is too long"):
        frames.string("x" * 32768)
