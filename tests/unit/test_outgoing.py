"""Outgoing messages: checks, encoding, and the way back to equal values."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bide
from bide.amqp import codec, decoding
from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, QueueTarget
from bide.delay.received import restore
from bide.errors import (
    InvalidDelayError,
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    MessageTooLargeError,
    ReservedHeaderError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message, new_message_id
from tests.timeouts import TIMEOUT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOW_STAMP = 1_795_262_400_000


def wire(message: PreparedMessage, infrastructure: DelayInfrastructure | None = None) -> dict[str, Any]:
    message = message.starting(NOW)
    return message.wire_values(message.route(infrastructure or Clock(), NOW), NOW)


# -- on the wire


def test_a_delayed_message_carries_keys_due_time_and_target_in_its_headers() -> None:
    message = check_message(
        OutgoingMessage(b"x", to="orders", delay="90s", headers={"mine": 1}, message_id="m", priority=3)
    )
    assert wire(message) == {
        "message_id": "m",
        "delivery_mode": 2,
        "headers": {
            "bide-sent": NOW_STAMP,
            "mine": 1,
            "CC": ["~m1", "~s30", "~c0", "~q:orders"],
            "bide-to": "q:orders",
            "bide-due": NOW_STAMP + 90_000,
            "bide-priority": 3,
        },
    }


@pytest.mark.parametrize("kind", [bide.Client, bide.SyncClient])
def test_publishing_with_a_key_leads_to_schedule(kind: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"key='order-7' is for messages .*: send one with client\.schedule\("):
        kind.publish(object(), b"", to="orders", key="order-7")
    with pytest.raises(TypeError, match="'keys'"):
        kind.publish(object(), b"", to="orders", keys="order-7")


def test_an_undelayed_message_has_no_route() -> None:
    message = check_message(OutgoingMessage("text", to="q", message_id="m"))
    assert message.starting(NOW) is message
    assert message.route(Clock(), NOW) is None
    assert wire(message) == {"message_id": "m", "delivery_mode": 2, "headers": {"bide-sent": NOW_STAMP}}


def test_every_property_is_sent() -> None:
    stamped = datetime(2026, 1, 1, tzinfo=UTC)
    options: dict[str, Any] = {
        "message_id": "m",
        "correlation_id": "c",
        "reply_to": "r",
        "content_type": "text/plain",
        "content_encoding": "gzip",
        "type": "t",
        "user_id": "u",
        "app_id": "a",
    }
    message = check_message(
        OutgoingMessage(
            b"",
            to="q",
            **options,
            timestamp=stamped,
            priority=0,
            persistent=False,
            expiration="2s",
            headers={"a": None},
        )
    )
    assert wire(message) == {
        **options,
        "timestamp": stamped,
        "priority": 0,
        "delivery_mode": 1,
        "expiration": "2000",
        "headers": {"bide-sent": NOW_STAMP, "a": None},
    }


def test_properties_that_are_none_are_left_out() -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("correlation_id", "reply_to", "type", "user_id", "app_id", "timestamp", "priority")
    )
    message = check_message(OutgoingMessage(b"", to="q", **nothing))
    assert set(wire(message)) == {"message_id", "delivery_mode", "headers"}


@pytest.mark.parametrize("infrastructure", [Clock(), Celery(), NServiceBus()], ids=lambda one: one.name)
def test_expiration_and_priority_are_held_in_headers_during_the_delay(
    infrastructure: DelayInfrastructure,
) -> None:
    values = wire(check_message(OutgoingMessage(b"", to="q", delay="1s", expiration="5s", priority=9)), infrastructure)
    assert "expiration" not in values
    assert "priority" not in values
    arrival = restore("bide.v1.released", "q", values)
    assert (arrival.values["expiration"], arrival.values["priority"]) == ("5000", 9)
    assert not {name for name in arrival.values["headers"] if name.startswith("bide-")}


def test_without_a_delay_expiration_and_priority_are_sent_as_properties() -> None:
    waits: list[dict[str, Any]] = [{}, {"delay": timedelta(0)}, {"deliver_at": NOW - timedelta(hours=1)}]
    for options in waits:
        values = wire(check_message(OutgoingMessage(b"", to="q", expiration="1500ms", priority=9, **options)))
        assert (values["expiration"], values["priority"]) == ("1500", 9)


@pytest.mark.parametrize(
    ("expiration", "text"),
    [
        ("5s", "5000"),
        ("0s", "0"),
        ("1500ms", "1500"),
        ("007ms", "7"),
        (timedelta(microseconds=1), "1"),
        (timedelta(milliseconds=1, microseconds=1), "2"),
        (timedelta(days=3650), "315360000000"),
        ("315360000000ms", "315360000000"),
    ],
)
def test_the_expiration_is_milliseconds_rounded_up(expiration: Any, text: str) -> None:
    assert wire(check_message(OutgoingMessage(b"", to="q", expiration=expiration)))["expiration"] == text


def test_sender_headers_are_added_and_headers_of_the_caller_take_precedence() -> None:
    message = check_message(OutgoingMessage(b"", to="q", headers={"mine": 1, "both": "mine"}))
    values = message.wire_values(None, NOW, {"both": "theirs", "theirs": 2})
    assert values["headers"] == {"mine": 1, "both": "mine", "theirs": 2, "bide-sent": NOW_STAMP}


def test_headers_written_by_the_broker_are_not_sent_again() -> None:
    """A received message sent again with all its headers. A copied x-death stops it on its second hop below 4.0.1."""
    copied = {
        "x-death": [{"queue": "orders"}],
        **{f"x-{which}-death-{what}": "a" for which in ("first", "last") for what in ("queue", "exchange", "reason")},
        "x-delivery-count": 3,
        "x-acquired-count": 3,
    }
    for delay in (None, "1s"):
        values = wire(check_message(OutgoingMessage(b"", to="q", headers={**copied, "x-own": 1}, delay=delay)))
        assert not copied.keys() & values["headers"].keys()
        assert values["headers"]["x-own"] == 1


# -- when


def test_a_delay_counts_from_the_first_attempt() -> None:
    message = check_message(OutgoingMessage(b"", to="q", delay="1h"))
    assert (message.delay, message.due) == (timedelta(hours=1), None)
    started = message.starting(NOW, 1_000.0)
    assert started.due == NOW + timedelta(hours=1)
    assert message.due is None
    later = NOW + timedelta(minutes=20)
    repeated = started.starting(later, 1_000.0 + 20 * 60)
    assert repeated.due == started.due
    route = repeated.route(Clock(), later)
    assert route is not None
    assert route.delay == timedelta(minutes=40)


@pytest.mark.parametrize("step", [timedelta(hours=3), timedelta(hours=-3)])
def test_a_step_of_the_clock_does_not_change_a_delay(step: timedelta) -> None:
    later = NOW + timedelta(minutes=20) + step
    repeated = (
        check_message(OutgoingMessage(b"", to="q", delay="1h"))
        .starting(NOW, 1_000.0)
        .starting(later, 1_000.0 + 20 * 60)
    )
    assert repeated.due == later + timedelta(minutes=40)
    route = repeated.route(Clock(), later)
    assert route is not None
    assert route.delay == timedelta(minutes=40)


def test_a_message_repeated_after_its_delay_is_sent_without_delay() -> None:
    later = NOW + timedelta(hours=2)
    repeated = check_message(OutgoingMessage(b"", to="q", delay="1h")).starting(NOW, 0.0).starting(later, 2 * 3600.0)
    assert repeated.due == NOW + timedelta(hours=1)
    route = repeated.route(Clock(), later)
    assert route is not None
    assert route.hops == 0


def test_a_due_time_is_stamped_as_it_was_given() -> None:
    due = NOW + timedelta(hours=1, microseconds=1)
    message = check_message(OutgoingMessage(b"", to="q", deliver_at=due))
    route = message.route(Clock(), NOW)
    assert route is not None
    assert route.delay == timedelta(hours=1, milliseconds=10)
    assert message.wire_values(route, NOW)["headers"]["bide-due"] == NOW_STAMP + 3_600_001


def test_a_due_time_can_be_text_with_an_offset() -> None:
    message = check_message(OutgoingMessage(b"", to="q", deliver_at="2026-11-21T14:00:00+01:00"))
    assert message.due == NOW + timedelta(hours=1)


def test_a_due_time_in_the_past_is_delivered_at_once() -> None:
    message = check_message(OutgoingMessage(b"", to="q", deliver_at=NOW - timedelta(days=1)))
    route = message.route(Clock(), NOW)
    assert route is not None
    assert (route.exchange, route.routing_key, route.hops) == ("", "q", 0)
    assert message.wire_values(route, NOW)["headers"] == {"bide-due": NOW_STAMP - 86_400_000, "bide-sent": NOW_STAMP}


def test_a_delay_beyond_the_year_9999_is_refused() -> None:
    message = check_message(OutgoingMessage(b"", to="q", delay=timedelta(days=999_999_999)))
    with pytest.raises(InvalidDueTimeError, match="ends after the year 9999: give a shorter one"):
        message.starting(NOW)


def test_a_delay_longer_than_the_infrastructure_allows_is_refused() -> None:
    message = check_message(OutgoingMessage(b"", to="q", delay="4000d")).starting(NOW)
    with pytest.raises(InvalidDelayError, match=r"4000 d is longer .* \(3199 d 23:59:59.99\)"):
        message.route(Clock(), NOW)


# -- where


def test_the_target_is_a_queue_or_an_exchange() -> None:
    assert check_message(OutgoingMessage(b"", to="q")).target == QueueTarget("q")
    assert check_message(OutgoingMessage(b"", to="q", isolated=True)).target == QueueTarget("q", isolated=True)
    assert check_message(OutgoingMessage(b"", exchange="x")).target == ExchangeTarget("x", "")
    assert check_message(OutgoingMessage(b"", exchange="x", routing_key="a.b")).target == ExchangeTarget("x", "a.b")


# -- what


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, b""),
        (b"", b""),
        (b"\x00\xff", b"\x00\xff"),
        ("ü", b"\xc3\xbc"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"xyz")[1:], b"yz"),
    ],
)
def test_bodies_are_sent_as_bytes(body: Any, expected: bytes) -> None:
    message = check_message(OutgoingMessage(body, to="q"))
    assert (message.body, type(message.body)) == (expected, bytes)
    assert "content_type" not in message.values


@pytest.mark.parametrize(
    ("value", "body"),
    [
        ({"ü": [1, None, True]}, '{"ü":[1,null,true]}'),
        ([], "[]"),
        (0, "0"),
        (False, "false"),
        ("text", '"text"'),
        (1.5, "1.5"),
    ],
)
def test_json_is_serialised_with_its_content_type(value: Any, body: str) -> None:
    message = check_message(OutgoingMessage(None, json=value, to="q"))
    assert message.body == body.encode()
    assert message.values["content_type"] == "application/json"
    named = check_message(OutgoingMessage(None, json=value, to="q", content_type="application/problem+json"))
    assert named.values["content_type"] == "application/problem+json"


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "json=object cannot be serialised"),
        ({1, 2}, "json=set cannot be serialised"),
        (b"bytes", "json=bytes cannot be serialised"),
        (float("nan"), "json=float cannot be serialised: .*JSON"),
        ({"a": [float("inf")]}, "json=dict cannot be serialised"),
        ({(1, 2): 3}, "json=dict cannot be serialised"),
        (LOOP, "json=list cannot be serialised: Circular"),
        ("\ud800", "json=str cannot be serialised"),
    ],
)
def test_values_that_json_cannot_express_are_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_message(OutgoingMessage(None, json=value, to="q"))


# -- what cannot be sent


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, InvalidInputError, "either to=... (a queue) or exchange=..."),
        ({"to": "q", "exchange": "x"}, InvalidInputError, "either to=... (a queue) or exchange=..."),
        ({"to": "q", "routing_key": "k"}, InvalidInputError, "the routing key 'k' goes with exchange=..."),
        ({"to": ""}, InvalidNameError, "the queue name is empty: name the queue"),
        ({"to": 5}, InvalidNameError, "the queue 5 is not text"),
        ({"exchange": ""}, InvalidNameError, "name the queue with to=... instead of the default exchange"),
        ({"exchange": b"x"}, InvalidNameError, "the exchange b'x' is not text"),
        ({"exchange": "x", "routing_key": None}, InvalidNameError, "the routing key None is not text"),
        ({"to": "q" * 256}, InvalidNameError, "takes 256 bytes, the limit is 255: use a shorter one"),
        ({"to": "ü" * 128}, InvalidNameError, "takes 256 bytes, the limit is 255"),
        ({"to": "\ud800"}, InvalidNameError, "characters that UTF-8 cannot encode"),
        ({"exchange": "x" * 256}, InvalidNameError, "the exchange 'xxxxx"),
        ({"exchange": "x", "routing_key": "k" * 256}, InvalidNameError, "the routing key 'kkkkk"),
        ({"to": "q", "delay": "1s", "deliver_at": NOW}, InvalidDueTimeError, "both a delay (1s) and a due time (2026-"),
        ({"to": "q", "delay": "-1s"}, InvalidDelayError, "the delay '-1s' is negative: give zero or more"),
        ({"to": "q", "delay": 5}, InvalidDelayError, "the delay 5 has no unit"),
        ({"to": "q", "delay": float("nan")}, InvalidDelayError, "the delay nan has no unit"),
        ({"to": "q", "deliver_at": NOW.replace(tzinfo=None)}, InvalidDueTimeError, "2026-11-21T12:00:00 has no time"),
        (
            {"to": "q", "headers": {"bide-due": 1}},
            ReservedHeaderError,
            "'bide-due' starts with 'bide-', reserved for bide",
        ),
        ({"to": "q", "headers": {"bide-": 1}}, ReservedHeaderError, "rename it"),
        ({"to": "q", "headers": {"CC": ["a"]}, "delay": "1s"}, ReservedHeaderError, "'CC' carries the delay"),
        ({"to": "q", "headers": {"BCC": ["a"]}, "deliver_at": NOW}, ReservedHeaderError, "'BCC' carries the delay"),
        ({"to": "q", "headers": {"CC": "a"}}, InvalidInputError, "'CC' is 'a': give a list of routing keys"),
        ({"to": "q", "headers": {"BCC": [1]}}, InvalidInputError, "'BCC' is [1]: give a list of routing keys"),
        ({"to": "q", "headers": {5: "a"}}, InvalidInputError, "the header name 5 is not text"),
        ({"to": "q", "headers": {"": "a"}}, InvalidNameError, "the header name is empty"),
        ({"to": "q", "headers": {"n" * 256: "a"}}, InvalidNameError, "takes 256 bytes"),
        ({"to": "q", "priority": 256}, InvalidInputError, "the priority 256 is not a whole number from 0 to 255"),
        ({"to": "q", "priority": -1}, InvalidInputError, "from 0 to 255"),
        ({"to": "q", "priority": True}, InvalidInputError, "the priority True is not a whole number"),
        ({"to": "q", "priority": 1.0}, InvalidInputError, "the priority 1.0 is not a whole number"),
        ({"to": "q", "message_id": "m" * 256}, InvalidNameError, "the message id 'mmmmm"),
        ({"to": "q", "message_id": 5}, InvalidInputError, "the message_id 5 is not text"),
        ({"to": "q", "app_id": "\ud800"}, InvalidNameError, "the app id '\\ud800' holds characters that UTF-8"),
        ({"to": "q", "timestamp": NOW.replace(tzinfo=None)}, InvalidInputError, "2026-11-21 12:00:00 has no time zone"),
        ({"to": "q", "timestamp": "now"}, InvalidInputError, "the timestamp 'now' is not a datetime"),
        ({"to": "q", "expiration": "-1s"}, InvalidDelayError, "is negative"),
        ({"to": "q", "expiration": 5}, InvalidDelayError, "has no unit"),
        (
            {"to": "q", "expiration": "3651d"},
            InvalidDelayError,
            "the expiration 3651d is longer than the broker accepts (3650 d): give a shorter one, or none",
        ),
        ({"to": "q", "expiration": "315360000001ms"}, InvalidDelayError, "longer than the broker accepts"),
        ({"to": "q", "body": 5}, InvalidInputError, "the body is of type int: give bytes, text, or json="),
        ({"to": "q", "body": ["x"]}, InvalidInputError, "the body is of type list"),
        ({"to": "q", "body": "\ud800"}, InvalidInputError, "the body has characters that UTF-8 cannot encode"),
        ({"to": "q", "body": b"x", "json": 1}, InvalidInputError, "both a body and json were given: give one"),
        ({"to": "q", "body": b"", "json": 1}, InvalidInputError, "both a body and json were given: give one"),
    ],
)
def test_invalid_messages_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"body": None, **options}
    with pytest.raises(error, match=re.escape(message)) as caught:
        check_message(OutgoingMessage(options.pop("body"), **options))
    assert type(caught.value) is error
    assert not isinstance(caught.value, MessageTooLargeError)


def test_cc_of_the_caller_is_kept_on_an_undelayed_message() -> None:
    for name in ("CC", "BCC"):
        values = wire(check_message(OutgoingMessage(b"", exchange="x", routing_key="a", headers={name: ["b"]})))
        assert values["headers"] == {name: ["b"], "bide-sent": NOW_STAMP}
        assert restore("x", "a", values).values["headers"] == {name: ["b"]}


# -- whose data it is


def test_arguments_of_the_caller_are_neither_changed_nor_shared() -> None:
    """The message may wait for a connection while the caller goes on with his own objects."""
    headers: dict[str, Any] = {
        "x-death": [{"queue": "a"}],
        "list": [1, {"deep": [2]}],
        "table": {"a": {"b": 1}},
        "tuple": ([3],),
        "raw": bytearray(b"raw"),
    }
    body = bytearray(b"body")
    before = copy.deepcopy(headers)
    message = check_message(OutgoingMessage(body, to="q", headers=headers, delay="1s"))  # type: ignore[arg-type]  # a bytearray, which may change later
    values = wire(message)
    assert headers == before

    headers["list"][1]["deep"].append("changed")
    headers["table"]["a"]["b"] = "changed"
    headers["tuple"][0].append("changed")
    headers["raw"] += b"changed"
    headers["new"] = "changed"
    body += b"changed"
    assert message.body == b"body"
    assert wire(message) == values
    assert {name: values["headers"][name] for name in ("list", "table", "tuple", "raw")} == {
        "list": [1, {"deep": [2]}],
        "table": {"a": {"b": 1}},
        "tuple": ([3],),
        "raw": b"raw",
    }


def test_sending_a_message_does_not_change_it() -> None:
    message = check_message(OutgoingMessage(b"", to="q", headers={"a": 1}, delay="1s", priority=3))
    first = wire(message)
    first["headers"].clear()
    first.clear()
    assert wire(message)["headers"]["a"] == 1
    assert message.values["headers"] == {"a": 1}
    assert message.values["priority"] == 3


# -- message ids


def test_every_message_has_its_own_id() -> None:
    assert len({new_message_id() for _ in range(1000)}) == 1000
    message = check_message(OutgoingMessage(b"", to="q"))
    assert message.message_id == message.values["message_id"]
    assert message.message_id != check_message(OutgoingMessage(b"", to="q")).message_id
    assert check_message(OutgoingMessage(b"", to="q", message_id="mine")).message_id == "mine"


FORK = """
import os
from bide.messages.prepared import new_message_id
new_message_id()
reading, writing = os.pipe()
if os.fork():
    os.wait()
    print(new_message_id(), os.read(reading, 100).decode())
else:
    os.write(writing, new_message_id().encode())
"""


def test_a_forked_process_generates_other_ids() -> None:
    output = subprocess.run(
        [sys.executable, "-c", FORK], check=True, capture_output=True, text=True, timeout=TIMEOUT
    ).stdout
    ours, theirs = output.split()
    assert len(ours) == len(theirs) == 32
    assert ours[:20] != theirs[:20]


# -- and back

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
header_names = texts.filter(lambda name: name and not name.startswith(("bide-", "x-")) and name not in ("CC", "BCC"))
header_values = st.recursive(
    st.one_of(
        texts,
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.none(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
options = st.fixed_dictionaries(
    {"headers": st.dictionaries(header_names, header_values, max_size=4)},
    optional={
        **dict.fromkeys(("message_id", "correlation_id", "reply_to", "content_type", "type", "app_id"), texts),
        "priority": st.integers(0, 255),
        "expiration": st.integers(0, 10**9).map("{}ms".format),
        "persistent": st.booleans(),
    },
)
targets: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"to": st.sampled_from(["orders", "a.b", "ü~"]), "isolated": st.booleans()}),
    st.fixed_dictionaries({"exchange": st.just("sh.op"), "routing_key": st.sampled_from(["", "a", "a.b.c", "~.~"])}),
)


@given(
    given_options=options,
    target=targets,
    delay=st.none() | st.timedeltas(timedelta(0), timedelta(days=3000)),
    carrier=st.sampled_from(["CC", "BCC"]),
)
def test_a_message_is_restored_after_encoding_and_decoding(
    given_options: dict[str, Any], target: dict[str, Any], delay: timedelta | None, carrier: Literal["CC", "BCC"]
) -> None:
    """Through the encoding, the headers that a broker takes away, the decoding, and the restoring."""
    message = check_message(OutgoingMessage(b"", delay=delay, **target, **given_options)).starting(NOW)
    route = message.route(Clock(carrier=carrier), NOW)
    sent = message.wire_values(route, NOW)
    if sent["headers"]:
        sent["headers"].pop("BCC", None)
    frames = codec.publish(
        1,
        exchange="",
        routing_key="",
        mandatory=True,
        encoded_properties=codec.properties(sent),
        body=b"",
        frame_max=131_072,
    )
    undelayed = ("", target["to"]) if "to" in target else (target["exchange"], target["routing_key"])
    exchange = "bide.v1.released" if route is not None and route.hops else undelayed[0]
    routing_key = route.routing_key if route is not None else undelayed[1]
    arrival = restore(exchange, routing_key, decoding.properties(frames[1]))

    expected = {name: value for name, value in given_options.items() if name not in ("headers", "persistent")}
    if "expiration" in expected:
        expected["expiration"] = expected["expiration"].removesuffix("ms")
    received = dict(arrival.values)
    assert received.pop("headers", {}) == given_options["headers"]
    assert received.pop("delivery_mode") == (2 if given_options.get("persistent", True) else 1)
    assert received == {"message_id": message.message_id, **expected}
    assert (arrival.exchange, arrival.routing_key) == undelayed
    if delay is None:
        assert arrival.due is None
    else:
        assert arrival.due is not None
        assert timedelta(0) <= arrival.due - (NOW + delay) < timedelta(milliseconds=1)
