"""A message on its way out, and back as it was sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.delay.arrival import restore
from bide.delay.clock import Clock
from bide.errors import (
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    ReservedHeaderError,
)
from bide.outgoing import Outgoing, new_message_id

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def wire(message: Outgoing) -> dict[str, Any]:
    message = message.starting(NOW)
    return message.wire_values(message.route(Clock(), NOW))


def test_a_delayed_message() -> None:
    message = Outgoing.make(b"x", to="orders", delay="90s", headers={"mine": 1}, message_id="m", priority=3)
    values = wire(message)
    assert values == {
        "message_id": "m",
        "delivery_mode": 2,
        "headers": {
            "mine": 1,
            "CC": ["~m1", "~s30", "~c0", "~q:orders"],
            "bide-to": "q:orders",
            "bide-due": int(NOW.timestamp() * 1000) + 90_000,
            "bide-priority": 3,
        },
    }


def test_expiration_and_priority_do_not_act_on_the_delay_queues_and_come_back() -> None:
    values = wire(Outgoing.make(b"", to="q", delay="1s", expiration="5s", priority=9))
    assert "expiration" not in values
    assert "priority" not in values
    arrival = restore("bide.v1.released", "q", values)
    assert (arrival.values["expiration"], arrival.values["priority"]) == ("5000", 9)
    assert arrival.values["headers"] == {}
    undelayed = wire(Outgoing.make(b"", to="q", expiration="1500", priority=9))
    assert (undelayed["expiration"], undelayed["priority"]) == ("1500", 9)


def test_an_undelayed_message_is_left_alone() -> None:
    assert wire(Outgoing.make("text", to="q", message_id="m")) == {
        "message_id": "m",
        "delivery_mode": 2,
        "headers": None,
    }


def test_what_the_broker_wrote_is_not_sent_on() -> None:
    copied = {
        "x-death": [{}],
        "x-first-death-queue": "a",
        "x-last-death-reason": "b",
        "x-delivery-count": 3,
        "x-own": 1,
    }
    assert wire(Outgoing.make(b"", to="q", headers=copied))["headers"] == {"x-own": 1}
    assert len(copied) == 5


def test_a_due_time_in_the_past_is_delivered_at_once() -> None:
    message = Outgoing.make(b"", to="q", deliver_at=NOW - timedelta(days=1))
    route = message.route(Clock(), NOW)
    assert route is not None
    assert (route.exchange, route.routing_key, route.hops) == ("", "q", 0)
    assert message.wire_values(route)["headers"] == {"bide-due": int(NOW.timestamp() * 1000) - 86_400_000}


def test_bodies() -> None:
    assert Outgoing.make("ü", to="q").body == "ü".encode()
    assert Outgoing.make(bytearray(b"x"), to="q").body == b"x"  # type: ignore[arg-type]
    assert Outgoing.make(None, to="q").body == b""
    message = Outgoing.make(None, json={"ü": [1]}, to="q")
    assert message.body == '{"ü":[1]}'.encode()
    assert message.values["content_type"] == "application/json"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, InvalidInputError, "either to="),
        ({"to": "q", "exchange": "x"}, InvalidInputError, "either to="),
        ({"to": "q", "routing_key": "k"}, InvalidInputError, "goes with exchange="),
        ({"to": ""}, InvalidNameError, "empty"),
        ({"exchange": ""}, InvalidNameError, "empty"),
        ({"to": "q" * 256}, InvalidNameError, "256 bytes, the limit is 255"),
        ({"to": "ü" * 128}, InvalidNameError, "256 bytes"),
        ({"to": "\ud800"}, InvalidNameError, "UTF-8"),
        ({"exchange": "x", "routing_key": "k" * 256}, InvalidNameError, "routing key"),
        ({"to": "q", "delay": "1s", "deliver_at": NOW}, InvalidDueTimeError, "give one"),
        ({"to": "q", "headers": {"bide-due": 1}}, ReservedHeaderError, "bide-due"),
        ({"to": "q", "headers": {"CC": ["a"]}, "delay": "1s"}, ReservedHeaderError, "CC"),
        ({"to": "q", "headers": {5: "a"}}, InvalidInputError, "5"),
        ({"to": "q", "priority": 256}, InvalidInputError, "from 0 to 255"),
        ({"to": "q", "priority": True}, InvalidInputError, "True"),
        ({"to": "q", "message_id": "m" * 256}, InvalidNameError, "limit is 255"),
        ({"to": "q", "json": object()}, InvalidInputError, "serialised"),
        ({"to": "q", "colour": "red"}, InvalidInputError, "no property"),
        ({"to": "q", "timestamp": datetime(2026, 1, 1)}, InvalidInputError, "time zone"),  # noqa: DTZ001
    ],
)
def test_what_cannot_be_sent(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Outgoing.make(None, **options)
    with pytest.raises(InvalidInputError):
        Outgoing.make(b"x", json=1, to="q")


def test_the_callers_own_cc_is_kept_on_an_undelayed_message() -> None:
    values = wire(Outgoing.make(b"", exchange="x", routing_key="a", headers={"CC": ["b"]}))
    assert values["headers"] == {"CC": ["b"]}
    assert restore("x", "a", values).values["headers"] == {"CC": ["b"]}


def test_message_ids_differ() -> None:
    assert len({new_message_id() for _ in range(1000)}) == 1000


def test_restoring_keeps_the_deaths_that_are_not_ours() -> None:
    ours = {"queue": "bide.v1.m1", "exchange": "bide.v1.in.m", "count": 1}
    theirs = {"queue": "orders", "exchange": "", "count": 2}
    arrival = restore(
        "dead",
        "k",
        {
            "headers": {
                "x-death": [theirs, ours],
                "x-first-death-queue": "bide.v1.m1",
                "x-first-death-exchange": "bide.v1.in.m",
                "x-first-death-reason": "expired",
                "x-last-death-queue": "orders",
                "x-last-death-exchange": "",
                "x-last-death-reason": "rejected",
            }
        },
    )
    assert arrival.values["headers"] == {
        "x-death": [theirs],
        "x-last-death-queue": "orders",
        "x-last-death-exchange": "",
        "x-last-death-reason": "rejected",
    }


def test_restoring_a_key_of_a_cascade() -> None:
    key = "0." * 27 + "1."
    headers = {"NServiceBus.Transport.RabbitMQ.DelayInSeconds": 1, "NServiceBus.MessageId": "m"}
    arrival = restore("nsb.v2.delay-delivery", key + "Sales", {"headers": headers})
    assert (arrival.routing_key, arrival.values["headers"]) == ("Sales", {"NServiceBus.MessageId": "m"})
