"""Decoding of AMQP 1.0 messages."""

from __future__ import annotations

import struct
import tracemalloc
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import UndecodableMessageError
from bide.streams.amqp10 import MAX_VALUES, Symbol, decode, first_properties, lookup, sections

# What RabbitMQ 3.10.8 and 4.3.6 stored of the same message, published over AMQP 0-9-1.
FROM_3_10 = (
    b"\x00Sr\xc1w\n\xa3\rx-routing-key\xa1\rorder.created\xa3\nx-exchange\xa1\x02ex\xa3\x10x-basic-priorityP\x03\xa3"
    b"\x15x-basic-delivery-modeP\x02\xa3\x12x-basic-expiration\xa1\x0560000\x00Ss\xc0-\r\xa1\x02m0\xa0\x04bide@@\xa1"
    b"\x01r\xa1\x01c\xa3\ntext/plain@@\x83\x00\x00\x01\x8b\xcf\xe5h\x00@@@\x00St\xc1~\x16\xa1\x0cx-basic-type\xa1\x01T"
    b"\xa1\x0ex-basic-app-id\xa1\x01a\xa1\x08bide-due\x81\x00\x00\x01\x8b\xcf\xe5h{\xa1\x01s\xa1\x04text\xa1\x05x-foo"
    b"\xa1\x03bar\xa1\x01bV\x01\xa1\x01n@\xa1\x03bin\xa0\x02\xff\x00\xa1\x05bytes\xa0\x03abc\xa1\x03negT\xfb\xa1\x01d"
    b"\x83\x00\x00\x01\x9bv\xda\xa8\x00\x00Su\xa0\x06hello0"
)
FROM_4_3 = (
    b"\x00Sp\xc0\x0b\x05AP\x03p\x00\x00\xea`AC\x00Sr\xc1[\n\xa3\rx-routing-key\xa1\rorder.created\xa3\nx-exchange\xa1"
    b"\x02ex\xa3\x0cx-basic-type\xa1\x01T\xa3\x05x-foo\xa1\x03bar\xa3\x04x-cc\xc0\x07\x01\xa1\x04zz.1\x00Ss\xc05\x0b\xa1"
    b"\x02m0\xa0\x04bide@@\xa1\t/queues/r\xa1\x01c\xa3\ntext/plain@@\x83\x00\x00\x01\x8b\xcf\xe5h\x00\xa1\x01a\x00St\xc1"
    b"N\x10\xa1\x08bide-due\x81\x00\x00\x01\x8b\xcf\xe5h{\xa1\x01s\xa1\x04text\xa1\x01bV\x01\xa1\x01n@\xa1\x03bin\xa0"
    b"\x02\xff\x00\xa1\x05bytes\xa0\x03abc\xa1\x03negT\xfb\xa1\x01d\x83\x00\x00\x01\x9bv\xda\xa8\x00\x00Su\xa0\x06hello0"
)
HEADERS = {
    "bide-due": 1700000000123,
    "s": "text",
    "b": True,
    "n": None,
    "bin": b"\xff\x00",
    "bytes": b"abc",
    "neg": -5,
    "d": datetime(2026, 1, 1, tzinfo=UTC),
}


def test_messages_stored_by_rabbitmq_3_10_are_decoded() -> None:
    cut = sections(FROM_3_10)
    assert cut.body == b"hello0"
    assert decode(cut.annotations) == {
        "x-routing-key": "order.created",
        "x-exchange": "ex",
        "x-basic-priority": 3,
        "x-basic-delivery-mode": 2,
        "x-basic-expiration": "60000",
    }
    assert decode(cut.properties)[:7] == ["m0", b"bide", None, None, "r", "c", "text/plain"]
    assert decode(cut.application) == {**HEADERS, "x-basic-type": "T", "x-basic-app-id": "a", "x-foo": "bar"}


def test_messages_stored_by_rabbitmq_4_3_are_decoded() -> None:
    cut = sections(FROM_4_3)
    assert cut.body == b"hello0"
    annotations = decode(cut.annotations)
    assert annotations["x-cc"] == ["zz.1"]
    assert annotations["x-exchange"] == "ex"
    assert all(type(name) is Symbol for name in annotations)
    assert decode(cut.properties)[9] == datetime.fromtimestamp(1700000000, UTC)
    assert decode(cut.application) == HEADERS


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("40", None),
        ("41", True),
        ("42", False),
        ("5601", True),
        ("5600", False),
        ("50ff", 255),
        ("60ffff", 65535),
        ("70ffffffff", 4294967295),
        ("5207", 7),
        ("43", 0),
        ("80ffffffffffffffff", 18446744073709551615),
        ("5307", 7),
        ("44", 0),
        ("51ff", -1),
        ("61ffff", -1),
        ("71ffffffff", -1),
        ("54ff", -1),
        ("81ffffffffffffffff", -1),
        ("55ff", -1),
        ("723fc00000", 1.5),
        ("823ff8000000000000", 1.5),
        ("7400000001", b"\0\0\0\1"),
        ("730001f600", "\U0001f600"),
        ("830000000000000001", datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)),
        ("837fffffffffffffff", 0x7FFFFFFFFFFFFFFF),
        ("98000102030405060708090a0b0c0d0e0f", uuid.UUID("00010203-0405-0607-0809-0a0b0c0d0e0f")),
        ("a002ff00", b"\xff\0"),
        ("b000000002ff00", b"\xff\0"),
        ("a103e282ac", "€"),
        ("b100000003e282ac", "€"),
        ("a30161", "a"),
        ("b30000000161", "a"),
        ("45", []),
        ("c003024041", [None, True]),
        ("d0000000070000000240a100", [None, ""]),
        ("c10602a101615207", {"a": 7}),
        ("d10000000900000002a101615207", {"a": 7}),
        ("e00602a301610162", ["a", "b"]),
        ("f00000000d0000000271" + "00000001" + "00000002", [1, 2]),
        ("e0020341", [True, True, True]),
        ("0053245207", 7),
        ("e007020053075001" + "02", [1, 2]),
    ],
)
def test_each_amqp_type_is_decoded(data: str, value: Any) -> None:
    assert decode(bytes.fromhex(data)) == value


def section(code: int, value: bytes, *, wide: bool = False) -> bytes:
    return (b"\0\x80" + code.to_bytes(8) if wide else b"\0S" + bytes([code])) + value


def test_several_data_sections_make_one_body() -> None:
    assert sections(section(0x75, b"\xa0\x01a") + section(0x75, b"\xb0\0\0\0\2bc", wide=True)).body == b"abc"


def test_a_value_or_sequence_body_is_decoded() -> None:
    cut = sections(section(0x77, b"\xa1\x03abc"))
    assert (cut.body, [decode(one) for one in cut.value]) == (None, ["abc"])
    cut = sections(section(0x76, b"\xc0\x02\x01A") + section(0x76, b"\x45"))
    assert [decode(one) for one in cut.value] == [[True], []]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no body"),
        (b"hello", "0x68 at 0 does not begin"),
        (b"\0", "ends too early"),
        (b"\0Su", "ends too early"),
        (b"\0Su\xa0\x05abc", "ends too early"),
        (b"\0Su\xa1\x03abc", "of type 0xa1, not binary"),
        (b"\0\xa3\x01a\x40", "unknown kind 0xa3"),
        (b"\0Sr\x10", "unknown type 0x10"),
        (section(0x73, b"\x45"), "no body"),
    ],
)
def test_data_that_is_not_a_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UndecodableMessageError, match=reason):
        sections(data)


@pytest.mark.parametrize(
    "data",
    [
        "",
        "c00502",
        "a1ff61",
        "c003014041",
        "c10201 40",
        "c10402c0010040",
        "41 41",
        "5f00",
        "73ffffffff",
    ],
)
def test_a_malformed_value_is_refused(data: str) -> None:
    with pytest.raises(UndecodableMessageError):
        decode(bytes.fromhex(data))


def test_values_nested_more_than_32_deep_are_refused() -> None:
    data = b"\x40"
    for _ in range(60):
        data = b"\xd0" + struct.pack(">II", len(data) + 4, 1) + data
    with pytest.raises(UndecodableMessageError, match="nested more than 32"):
        decode(data)


def test_an_array_with_more_elements_than_bytes_is_refused() -> None:
    with pytest.raises(UndecodableMessageError, match="more than 10 values in 10 bytes"):
        decode(b"\xf0" + struct.pack(">II", 5, 0xFFFFFFFF) + b"\x41")


def test_text_that_is_not_utf_8_does_not_make_a_message_undecodable() -> None:
    """RabbitMQ stores whatever bytes an AMQP 0-9-1 client calls text."""
    bad = b"\xa1\x03a\xff\xfe"
    assert decode(bad) == decode(b"\xa3\x03a\xff\xfe") == decode(b"\xb1\0\0\0\x03a\xff\xfe") == b"a\xff\xfe"
    assert decode(b"\xc1\x0b\x02" + bad + bad) == {"a\\xff\\xfe": b"a\xff\xfe"}
    everything = b"\xc0\x14\x07" + bad + b"\x40" * 4 + bad + b"\xa3\x03a\xff\xfe"
    assert first_properties(everything, 7) == ["a\\xff\\xfe", *[None] * 4, "a\\xff\\xfe", "a\\xff\\xfe"]
    wide = b"\xc0\x0a\x01\xb1\0\0\0\x03a\xff\xfe"
    assert first_properties(wide, 1)[0] == "a\\xff\\xfe"


def array(element: int, count: int, content: bytes) -> bytes:
    return b"\xf0" + struct.pack(">II", len(content) + 5, count) + bytes([element]) + content


@pytest.mark.parametrize("number", [3_000, 1_000_000])
def test_nested_described_values_do_not_exhaust_the_stack(number: int) -> None:
    """As a body, as a header, and as the type of an array."""
    nested = b"\0" * number + b"\x40" * (number + 1)
    cut = sections(section(0x77, nested))
    for data in (nested, b"\xd0" + struct.pack(">II", len(nested) + 4, 1) + nested):
        with pytest.raises(UndecodableMessageError, match="nested more than 32"):
            decode(data)
    assert cut.value == (nested,)
    assert decode(b"\xf0" + struct.pack(">II", len(nested) + 4, 1) + nested) == [None]
    header = b"\xa1\x01a" + nested
    assert lookup(b"\xd1" + struct.pack(">II", len(header) + 4, 2) + header, b"b") == [None]


def peak_of(work: Callable[[], object]) -> int:
    """The bytes that were in memory at most, of what this allocated."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1_200, 12_000, 120_000])
def test_arrays_within_an_array_do_not_take_more_than_their_bytes(size: int) -> None:
    """Each has as many elements as there are bytes, and no element has any."""
    inner = struct.pack(">II", 5, size) + b"\x41"
    data = array(0xF0, size // len(inner), inner * (size // len(inner)))

    def read() -> None:
        with pytest.raises(UndecodableMessageError, match=r"more than .* values"):
            decode(data)

    assert peak_of(read) < 100 * len(data) + 100_000


def test_more_than_a_million_empty_lists_are_refused() -> None:
    data = b"\xd0" + struct.pack(">II", MAX_VALUES + 5, MAX_VALUES + 1) + b"\x45" * (MAX_VALUES + 1)
    with pytest.raises(UndecodableMessageError, match="more than 1,048,576 values"):
        decode(data)


def test_a_body_in_many_sections_is_copied_once() -> None:
    """Counted by what is allocated: once for each piece would be 10,000 times the first."""
    first = b"\x00\x53\x75\xb0" + struct.pack(">I", 100_000) + bytes(100_000)
    data = first + section(0x75, b"\xa0\x01x") * 10_000
    assert len(sections(data).body or b"") == 110_000
    assert peak_of(lambda: sections(data)) < 20 * len(data)


def test_map_keys_with_equal_hashes_do_not_collide() -> None:
    """A dict compares each key with all others of the same hash."""
    same = [uuid.UUID(int=number * ((1 << 61) - 1)) for number in range(1, 200)]
    assert len({hash(one) for one in same}) == 1
    content = b"".join(b"\x98" + one.bytes + b"\x40" for one in same)
    found = decode(b"\xd1" + struct.pack(">II", len(content) + 4, 2 * len(same)) + content)
    assert len({hash(one) for one in found}) == len(same)


def encode(value: Any) -> bytes:
    """As widely as the format allows, which is not what RabbitMQ writes."""
    match value:
        case None:
            return b"\x40"
        case bool():
            return b"\x56" + bytes([value])
        case int():
            return b"\x81" + struct.pack(">q", value)
        case float():
            return b"\x82" + struct.pack(">d", value)
        case bytes():
            return b"\xb0" + struct.pack(">I", len(value)) + value
        case str():
            raw = value.encode()
            return b"\xb1" + struct.pack(">I", len(raw)) + raw
        case list():
            return _compound(b"\xd0", [encode(one) for one in value])
        case _:
            assert isinstance(value, dict)
            return _compound(b"\xd1", [encode(one) for pair in value.items() for one in pair])


def _compound(kind: bytes, parts: list[bytes]) -> bytes:
    raw = b"".join(parts)
    return kind + struct.pack(">II", len(raw) + 4, len(parts)) + raw


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=20),
    st.text(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


@given(values)
def test_encoding_and_decoding_a_value_gives_the_same_value(value: Any) -> None:
    assert decode(encode(value)) == value


@given(st.dictionaries(st.text(max_size=8), values, max_size=5), st.binary(max_size=300))
def test_a_message_is_split_into_its_sections(headers: dict[str, Any], body: bytes) -> None:
    cut = sections(
        section(0x70, b"\x45")
        + section(0x74, encode(headers))
        + section(0x75, encode(body))
        + section(0x78, b"\xc1\x01\x00")
    )
    assert cut.body == body
    assert decode(cut.application) == headers
    assert cut.annotations == cut.properties == b""


@given(
    st.binary(max_size=60)
    | st.builds(
        lambda at, byte: FROM_4_3[:at] + bytes([byte]) + FROM_4_3[at + 1 :],
        st.integers(0, len(FROM_4_3)),
        st.integers(0, 255),
    )
)
def test_any_bytes_are_decoded_or_refused_with_one_error(data: bytes) -> None:
    """No other error, whatever bytes a stream contains."""
    readings: list[Any] = [lambda: decode(data)]
    try:
        cut = sections(data)
    except UndecodableMessageError as error:
        refused: UndecodableMessageError | None = error
    else:
        refused = None
        readings += [lambda part=part: decode(part) for part in (cut.annotations, cut.properties, cut.application)]
    assert refused is None or str(refused)
    for reading in readings:
        try:
            reading()
        except UndecodableMessageError as error:
            refused = error
    assert refused is None or str(refused)
