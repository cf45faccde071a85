"""Encoding, addresses and replies of the broker."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, decode
from pamqp.header import ContentHeader

from bide.amqp import codec, reply_codes
from bide.amqp.handshake import release_of
from bide.amqp.url import BrokerUrl
from bide.errors import (
    AccessRefusedError,
    DeclarationMismatchError,
    InvalidInputError,
    InvalidUrlError,
    NotEmptyError,
    TargetNotFoundError,
)

values = st.recursive(
    st.one_of(
        st.text(max_size=20),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.none(),
        st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1), timezones=st.just(UTC)).map(  # noqa: DTZ001 (the zone is added)
            lambda moment: moment.replace(microsecond=0)
        ),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=30), values, max_size=6))
def test_tables_are_read_as_they_were_written(table: dict[str, Any]) -> None:
    _, decoded = decode.field_table(codec.table(table))
    assert decoded == table


def test_integers_have_the_width_that_peers_expect() -> None:
    assert codec.field_value(10) == b"I\x00\x00\x00\x0a"
    assert codec.field_value(1 << 31) == b"l\x00\x00\x00\x00\x80\x00\x00\x00"
    assert codec.field_value(True) == b"t\x01"
    assert codec.field_value(Decimal("-1.5")) == b"D\x01\xff\xff\xff\xf1"


@pytest.mark.parametrize("value", [1 << 63, object(), datetime(2026, 1, 1), Decimal("NaN"), {"n" * 256: 1}])  # noqa: DTZ001 (on purpose)
def test_values_that_amqp_cannot_carry_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError):
        codec.table({"header": value})


def test_publish_frames_equal_those_of_pamqp() -> None:
    frames = codec.publish(
        3,
        exchange="shop",
        routing_key="order.created",
        mandatory=True,
        encoded_properties=codec.properties({"message_id": "m", "delivery_mode": 2}),
        body=b"x" * 125,
        frame_max=58,
    )
    method = commands.Basic.Publish(exchange="shop", routing_key="order.created", mandatory=True)
    header = ContentHeader(0, 125, commands.Basic.Properties(message_id="m", delivery_mode=2))
    assert frames[:2] == [pamqp.frame.marshal(method, 3), pamqp.frame.marshal(header, 3)]
    assert [len(frame) for frame in frames[2:]] == [58, 58, 33]


def test_names_refused_by_pamqp_are_encoded() -> None:
    frames = codec.publish(
        1, exchange="ü~" * 60, routing_key="", mandatory=False, encoded_properties=b"\0\0", body=b"", frame_max=4096
    )
    _, _, method = pamqp.frame.unmarshal(frames[0])
    assert getattr(method, "exchange", None) == "ü~" * 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amqp://localhost", {"hosts": (("localhost", 5672),), "user": "guest", "vhost": "/", "tls": False}),
        ("amqps://u:p%40ss@h:1234/v%2Fw", {"hosts": (("h", 1234),), "password": "p@ss", "vhost": "v/w", "tls": True}),
        ("amqp://h1,h2:5673/", {"hosts": (("h1", 5672), ("h2", 5673))}),
        ("amqp://[::1]:5673/", {"hosts": (("::1", 5673),)}),
        ("amqp://h/?heartbeat=5&timeout=3&name=x", {"heartbeat": 5, "name": "x"}),
        ("amqps://h/?verify=false&auth=external", {"verify": False, "external": True}),
    ],
)
def test_urls_are_parsed(text: str, expected: dict[str, Any]) -> None:
    url = BrokerUrl.parse(text)
    assert {name: getattr(url, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        *["", "localhost", "http://h", "amqp://", "amqp://h:port", "amqp://h/a/b", "amqp://h/?colour=red"],
        *["amqp://h:99999", "amqp://h/?heartbeat=-1", "amqp://h/?heartbeat=70000"],
        *["amqp://user:top-secret@/", "amqp://user:top-secret@[/"],
    ],
)
def test_invalid_urls_are_refused_without_showing_the_password(text: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        BrokerUrl.parse(text)
    assert "top-secret" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_as_an_invalid_url(text: str) -> None:
    for candidate in (text, f"amqp://{text}"):
        with suppress(InvalidUrlError):
            assert BrokerUrl.parse(candidate).hosts


def test_a_password_is_never_shown() -> None:
    url = BrokerUrl.parse("amqp://user:top-secret@h/")
    assert "top-secret" not in str(url) + repr(url)
    assert str(url) == "amqp://user@h:5672/"


def test_replies_of_the_broker_become_their_exceptions() -> None:
    text = (
        "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': "
        "received the value '5' of type 'signedint' but current is the value '6' of type 'signedint'"
    )
    error = reply_codes.channel_error(406, text)
    assert isinstance(error, DeclarationMismatchError)
    assert (error.kind, error.name, error.argument, error.wanted, error.found) == (
        "queue",
        "q",
        "x-message-ttl",
        "5",
        "6",
    )
    missing = reply_codes.channel_error(404, "NOT_FOUND - no queue 'q' in vhost '/'")
    assert isinstance(missing, TargetNotFoundError)
    assert isinstance(reply_codes.channel_error(403, "ACCESS_REFUSED - no"), AccessRefusedError)
    assert isinstance(
        reply_codes.channel_error(406, "PRECONDITION_FAILED - queue 'q' in vhost '/' not empty"), NotEmptyError
    )
    assert reply_codes.subject("no exchange 'x.y' in vhost '/'") == "x.y"
    assert reply_codes.subject("access to exchange 'amq.default' in vhost '/' refused") == ""
    assert reply_codes.size_limit("message size 11 is larger than configured max size 10") == (11, 10)


@pytest.mark.parametrize(
    ("text", "release"),
    [("3.10.8", (3, 10, 8)), ("4.3.0-rc.1", (4, 3, 0)), ("4.1.0+12", (4, 1, 0)), ("", ()), ("x", ())],
)
def test_releases_are_parsed_to_numbers(text: str, release: tuple[int, ...]) -> None:
    assert release_of({"version": text}) == release
