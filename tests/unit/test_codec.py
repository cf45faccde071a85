"""The AMQP codec, compared with pamqp."""

from __future__ import annotations

import math
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from decimal import Context, Decimal, Inexact, localcontext
from enum import IntEnum, StrEnum
from threading import Barrier
from typing import Any

import pamqp.frame
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import commands, decode
from pamqp.base import Frame
from pamqp.header import ContentHeader

from bide.amqp import codec, decoding
from bide.amqp.delivery import Assembly, Delivery
from bide.client.message import Message
from bide.errors import InvalidInputError
from tests.timeouts import TIMEOUT

SHORT_TEXTS = (
    *("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id"),
    *("type", "user_id", "app_id", "cluster_id"),
)
PAMQP_NAMES = {"type": "message_type"}

INT32 = 1 << 31
INT64 = 1 << 63
FRAME_MAX = 131_072

texts = st.text(max_size=20)
names = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
moments = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001 (the zone is added)
    lambda moment: moment.replace(microsecond=0)
)
decimals = st.builds(
    lambda unscaled, places: Decimal(unscaled).scaleb(-places), st.integers(-INT32, INT32 - 1), st.integers(0, 9)
)
values = st.recursive(
    st.one_of(
        texts,
        st.booleans(),
        st.integers(-INT64, INT64 - 1),
        st.integers(-5, 5).map(lambda offset: INT32 + offset),
        st.floats(allow_nan=False, allow_infinity=False),
        st.none(),
        st.binary(max_size=20).map(bytearray),
        moments,
        decimals,
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
tables = st.dictionaries(names, values, max_size=6)
short_texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=63)
property_values = st.fixed_dictionaries(
    {},
    optional={
        "headers": tables,
        "delivery_mode": st.sampled_from([1, 2]),
        "priority": st.integers(0, 255),
        "timestamp": moments,
        **dict.fromkeys(SHORT_TEXTS, short_texts),
    },
)


def published(**options: Any) -> list[bytes]:
    given_options: dict[str, Any] = {
        "exchange": "shop",
        "routing_key": "order.created",
        "mandatory": True,
        "encoded_properties": codec.properties({}),
        "body": b"",
        "frame_max": FRAME_MAX,
    }
    return codec.publish(1, **(given_options | options))


def header_of(encoded: bytes, size: int = 0) -> bytes:
    frames = published(encoded_properties=encoded, body=b"x" * size)
    return frames[1]


# -- field values


@given(table=tables)
@example(table={"n" * 255: 1, "ü" * 127: 2, "~h5": 3, "": 4})
def test_tables_are_read_as_they_were_written(table: dict[str, Any]) -> None:
    size, decoded = decode.field_table(codec.table(table))
    assert size == len(codec.table(table))
    assert decoded == table
    frame = header_of(codec.properties({"headers": table}))
    assert decoding.properties(frame)["headers"] == table


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    SEVEN = 7


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ("ü", b"S\x00\x00\x00\x02\xc3\xbc"),
        ("", b"S\x00\x00\x00\x00"),
        (Colour.RED, b"S\x00\x00\x00\x03red"),
        (True, b"t\x01"),
        (False, b"t\x00"),
        (0, b"I\x00\x00\x00\x00"),
        (10, b"I\x00\x00\x00\x0a"),
        (-1, b"I\xff\xff\xff\xff"),
        (Number.SEVEN, b"I\x00\x00\x00\x07"),
        (INT32 - 1, b"I\x7f\xff\xff\xff"),
        (-INT32, b"I\x80\x00\x00\x00"),
        (INT32, b"l\x00\x00\x00\x00\x80\x00\x00\x00"),
        (-INT32 - 1, b"l\xff\xff\xff\xff\x7f\xff\xff\xff"),
        (267_840_000_000, b"l\x00\x00\x00\x3e\x5c\x82\x10\x00"),
        (INT64 - 1, b"l\x7f" + b"\xff" * 7),
        (1.5, b"d\x3f\xf8\x00\x00\x00\x00\x00\x00"),
        (None, b"V"),
        (b"\x00\xff", b"x\x00\x00\x00\x02\x00\xff"),
        (bytearray(b"a"), b"x\x00\x00\x00\x01a"),
        (datetime(2026, 11, 21, tzinfo=UTC), b"T\x00\x00\x00\x00\x6b\x00\xdf\x00"),
        (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), b"T" + bytes(8)),
        ({}, b"F\x00\x00\x00\x00"),
        ({"a": {"b": 1}}, b"F\x00\x00\x00\x0e\x01aF\x00\x00\x00\x07\x01bI\x00\x00\x00\x01"),
        ([], b"A\x00\x00\x00\x00"),
        ((1, "a"), b"A\x00\x00\x00\x0bI\x00\x00\x00\x01S\x00\x00\x00\x01a"),
        (Decimal("1.50"), b"D\x02\x00\x00\x00\x96"),
        (Decimal("-1.5"), b"D\x01\xff\xff\xff\xf1"),
        (Decimal(0), b"D\x00\x00\x00\x00\x00"),
    ],
)
def test_values_are_encoded_byte_by_byte_as_expected(value: Any, encoded: bytes) -> None:
    assert codec.field_value(value) == encoded


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (INT64, "'name' is 9223372036854775808, which takes more than 64 bits: send it as text"),
        (math.nan, "'name' is nan, which RabbitMQ does not accept: send it as text"),
        ([{"inner": -math.inf}], "'inner' is -inf, which RabbitMQ does not accept: send it as text"),
        (-INT64 - 1, "more than 64 bits"),
        (object(), "'name' is of type object, which AMQP cannot carry"),
        ({1}, "of type set"),
        (1j, "of type complex"),
        (datetime(2026, 1, 1), "no time zone: give an aware datetime"),  # noqa: DTZ001 (on purpose)
        (datetime(1969, 12, 31, tzinfo=UTC), r"'name' is 1969-12-31T00:00:00\+00:00, .* 1970: send it as text"),
        (Decimal("NaN"), "the AMQP decimal cannot hold"),
        (Decimal("Infinity"), "the AMQP decimal cannot hold"),
        (Decimal("1E+3"), "the AMQP decimal cannot hold"),
        (Decimal(INT32), "the AMQP decimal cannot hold"),
        (Decimal("1E-256"), "the AMQP decimal cannot hold"),
        ("\ud800", "UTF-8 cannot encode"),
        ({"\ud800": 1}, "UTF-8 cannot encode"),
        ({"n" * 256: 1}, "takes 256 bytes, the limit is 255"),
        ({5: 1}, "5 is of type int, where AMQP requires text"),
        ([[{"deep": object()}]], "'deep' is of type object"),
    ],
)
def test_values_that_amqp_cannot_carry_are_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        codec.table({"name": value})


def test_none_is_encoded_as_an_empty_table() -> None:
    assert codec.table(None) == codec.table({}) == b"\x00\x00\x00\x00"


@given(st.text(max_size=300))
def test_short_strings_hold_up_to_255_bytes(text: str) -> None:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = b"?" * 256
    if len(raw) <= 255:
        assert codec.short_string(text) == bytes((len(raw),)) + raw
    else:
        with pytest.raises(InvalidInputError):
            codec.short_string(text)


def test_the_limit_of_short_strings_counts_bytes() -> None:
    assert len(codec.short_string("ü" * 127)) == 255
    with pytest.raises(InvalidInputError, match="takes 256 bytes, the limit is 255: use a shorter one"):
        codec.short_string("ü" * 128)


# -- properties


@given(given_values=property_values, size=st.integers(0, 50))
def test_properties_are_read_as_they_were_written(given_values: dict[str, Any], size: int) -> None:
    frame = header_of(codec.properties(given_values), size)
    consumed, channel, header = pamqp.frame.unmarshal(frame)
    assert (consumed, channel) == (len(frame), 1)
    assert isinstance(header, ContentHeader)
    assert header.body_size == size
    read = {name: value for name, value in header.properties if value is not None}
    absent = {"cluster_id": ""}  # which pamqp reads as empty where it is absent
    assert read == absent | {PAMQP_NAMES.get(name, name): value for name, value in given_values.items()}
    assert decoding.properties(frame) == given_values


@given(given_values=property_values)
def test_properties_that_are_none_are_left_out(given_values: dict[str, Any]) -> None:
    nothing = dict.fromkeys(name for name, _ in codec.PROPERTY_FLAGS)
    assert codec.properties({**nothing, **given_values}) == codec.properties(given_values)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("priority", 256, "the priority 256 is not a whole number from 0 to 255"),
        ("priority", -1, "from 0 to 255"),
        ("priority", "5", "the priority '5' is not a whole number"),
        ("delivery_mode", 2.0, "the delivery_mode 2.0 is not a whole number"),
        ("timestamp", datetime(2026, 1, 1), "no time zone"),  # noqa: DTZ001 (on purpose)
        ("timestamp", "now", "'timestamp' is 'now'"),
        ("timestamp", datetime(1960, 1, 1, tzinfo=UTC), "1970"),
        ("message_id", "m" * 256, "takes 256 bytes, the limit is 255"),
        ("message_id", 5, "5 is of type int, where AMQP requires text"),
        ("app_id", b"app", "of type bytes, where AMQP requires text"),
        ("headers", {"a": object()}, "'a' is of type object"),
    ],
)
def test_invalid_properties_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        codec.properties({name: value})


# -- a message in frames


def marshal(frame: Frame | ContentHeader, channel: int) -> bytes:
    return pamqp.frame.marshal(frame, channel)


@pytest.mark.parametrize(
    ("exchange", "routing_key", "mandatory", "properties"),
    [
        ("", "orders", True, {}),
        ("shop", "order.created", False, {"delivery_mode": 2, "message_id": "m"}),
        ("bide.v1.in.h", "orders", True, {"headers": {"CC": ["~h5", "~q:orders"], "bide-to": "q:orders"}}),
        (
            "e",
            "k",
            True,
            {
                "content_type": "application/json",
                "priority": 9,
                "correlation_id": "c",
                "reply_to": "r",
                "expiration": "5000",
                "timestamp": datetime(2026, 11, 21, tzinfo=UTC),
                "type": "t",
                "user_id": "u",
                "app_id": "a",
            },
        ),
    ],
)
def test_publish_frames_equal_those_of_pamqp(
    exchange: str, routing_key: str, mandatory: bool, properties: dict[str, Any]
) -> None:
    body = b"hello"
    theirs = commands.Basic.Properties(**{PAMQP_NAMES.get(name, name): value for name, value in properties.items()})
    frames = codec.publish(
        7,
        exchange=exchange,
        routing_key=routing_key,
        mandatory=mandatory,
        encoded_properties=codec.properties(properties),
        body=body,
        frame_max=FRAME_MAX,
    )
    assert frames == [
        marshal(commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory), 7),
        marshal(ContentHeader(0, len(body), theirs), 7),
        b"\x03\x00\x07\x00\x00\x00\x05hello\xce",
    ]


@pytest.mark.parametrize("name", ["n" * 128, "n" * 255, "a~b", "über", "a*#%&?", "📦" * 60])
def test_names_refused_by_pamqp_and_accepted_by_rabbitmq_are_encoded(name: str) -> None:
    with pytest.raises(ValueError, match="exchange"):
        commands.Basic.Publish(exchange=name).validate()
    _, _, method = pamqp.frame.unmarshal(published(exchange=name)[0])
    assert isinstance(method, commands.Basic.Publish)
    assert method.exchange == name


@given(body=st.binary(max_size=400), frame_max=st.integers(30, 120))
@example(body=b"", frame_max=30)
@example(body=b"x" * 44, frame_max=30)
def test_a_body_is_split_by_the_frame_size(body: bytes, frame_max: int) -> None:
    method, header, *pieces = published(body=body, frame_max=frame_max)
    assert all(len(piece) <= frame_max for piece in pieces)
    assert all(len(piece) == frame_max for piece in pieces[:-1])
    assert struct.unpack_from(">Q", header, 11) == (len(body),)
    rest = b"".join(pieces)
    read = b""
    while rest:
        consumed, channel, piece = pamqp.frame.unmarshal(rest)
        assert channel == 1
        read += piece.value  # type: ignore[union-attr]  # all are values
        rest = rest[consumed:]
    assert read == body
    assert pamqp.frame.unmarshal(method)[0] == len(method)


def test_headers_that_fit_into_no_frame_are_refused() -> None:
    """The broker would close the connection, and with it everything that is under way on it."""
    limit = FRAME_MAX - codec.FRAME_OVERHEAD
    room = limit - len(codec.properties({"headers": {"a": ""}})) - 12
    fits = published(encoded_properties=codec.properties({"headers": {"a": "x" * room}}))
    assert len(fits[1]) == FRAME_MAX
    with pytest.raises(
        InvalidInputError, match=f"take {limit + 1} bytes, the limit is {limit}: put more into the body"
    ):
        published(encoded_properties=codec.properties({"headers": {"a": "x" * (room + 1)}}))


@pytest.mark.parametrize(
    ("flags", "encoded"),
    [((), b"\0"), ((True,), b"\1"), ((False, True), b"\2"), ((True,) * 8, b"\xff"), ((False,) * 5, b"\0")],
)
def test_flags_are_packed_into_one_byte(flags: tuple[bool, ...], encoded: bytes) -> None:
    assert codec.bits(*flags) == encoded


def test_frames_without_arguments_equal_those_of_pamqp() -> None:
    assert pamqp.frame.unmarshal(codec.HEARTBEAT_FRAME)[0] == len(codec.HEARTBEAT_FRAME)
    assert codec.frame(codec.METHOD, 3, codec.method(20, 41)) == marshal(commands.Channel.CloseOk(), 3)
    assert (codec.short(1), codec.long(1), codec.long_long(1)) == (b"\0\1", b"\0\0\0\1", b"\0\0\0\0\0\0\0\1")


# -- damaged frames


@given(given_values=property_values, data=st.data())
def test_a_damaged_header_raises_nothing_but_value_error(given_values: dict[str, Any], data: st.DataObject) -> None:
    frame = header_of(codec.properties(given_values))
    place = data.draw(st.integers(19, len(frame) - 1))
    damaged = data.draw(
        st.sampled_from([frame[:place], frame[:place] + bytes((frame[place] ^ 0xFF,)) + frame[place + 1 :]])
    )
    with suppress(ValueError):
        assert isinstance(decoding.properties(damaged), dict)


@pytest.mark.parametrize("kind", [b"F", b"A"])
def test_deeply_nested_headers_are_decoded_and_encoded_again(kind: bytes) -> None:
    raw = b""
    for _ in range(10_000):
        raw = (b"\x01a" if kind == b"F" else b"") + kind + struct.pack(">I", len(raw)) + raw
    raw = b"\x01a" + kind + struct.pack(">I", len(raw)) + raw
    encoded = struct.pack(">HI", 1 << 13, len(raw)) + raw
    values = decoding.properties(header_of(encoded))
    assert len(codec.properties(values)) == len(encoded)


@pytest.mark.parametrize("kind", ["table", "list"])
def test_headers_that_contain_themselves_are_refused(kind: str) -> None:
    table: dict[str, Any] = {}
    table["itself"] = table if kind == "table" else [table]
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        codec.properties({"headers": table})


# -- properties that are decoded when they are asked for


@given(given_values=property_values)
def test_lazily_decoded_properties_equal_those_of_the_frame(given_values: dict[str, Any]) -> None:
    found = decoding.Properties(header_of(codec.properties(given_values)))
    assert found == given_values
    assert {**found} == dict(found) == given_values
    assert len(found) == len(given_values)
    assert found.get("no such property") is None
    assert found.get("no such property", 7) == 7
    assert {name: found.get(name) for name in given_values} == given_values
    assert repr(found) == repr(decoding.properties(header_of(codec.properties(given_values))))


def test_properties_are_decoded_once_on_first_access(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    whole = decoding.properties

    def counted(frame: bytes) -> dict[str, Any]:
        decoded.append(frame)
        return whole(frame)

    monkeypatch.setattr(decoding, "properties", counted)
    frame = header_of(codec.properties({"message_id": "a", "headers": {"b": 1}}))
    delivery = Delivery(exchange="", routing_key="q", redelivered=False, delivery_tag=1)
    assembly = Assembly(delivery)
    assert assembly.header(0, decoding.Properties(frame))
    message = Message(delivery, None, datetime.now(UTC))
    assert (message.body, message.redelivered, decoded) == (b"", False, [])
    assert (message.message_id, message.headers, message.exchange, message.due) == ("a", {"b": 1}, "", None)
    assert decoded == [frame]


def test_undecodable_properties_are_empty_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broken = header_of(struct.pack(">HI", 1 << 13, 3) + b"\x01a?")
    found = decoding.Properties(broken)
    assert not caplog.records
    assert [found.get("headers"), len(found), list(found)] == [None, 0, []]
    (record,) = caplog.records
    assert "cannot be decoded (the content header holds a value of the unknown type b'?')" in record.getMessage()


def test_properties_can_be_read_by_several_threads_at_once() -> None:
    frame = header_of(codec.properties({"headers": {f"h{number}": "x" * 50 for number in range(50)}}))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            for _ in range(100):
                found, start = decoding.Properties(frame), Barrier(8)

                def read(found: decoding.Properties = found, start: Barrier = start) -> int:
                    start.wait(timeout=TIMEOUT)
                    return len(found["headers"])

                assert [one.result() for one in [threads.submit(read) for _ in range(8)]] == [50] * 8
    finally:
        sys.setswitchinterval(interval)


def test_decimals_are_decoded_in_any_decimal_context() -> None:
    number = Decimal("-21474836.48")
    found = decoding.Properties(header_of(codec.properties({"headers": {"price": number}})))
    with localcontext(Context(prec=4, traps=[Inexact])):
        assert found["headers"] == {"price": number}
