"""Copies of waiting messages, for another delay infrastructure or to be set aside."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.amqp.delivery import Delivery
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidInputError
from bide.migration.copies import TakenMessage, onward_copy, set_aside_copy

NOW = datetime(2026, 7, 1, 12, 0, 0, 250_000, tzinfo=UTC)
DUE = NOW + timedelta(hours=1)
TARGET = QueueTarget("orders")


def taken(headers: dict[str, Any] | None = None, **values: Any) -> TakenMessage:
    given = values if headers is None else {**values, "headers": headers}
    delivery = Delivery(
        exchange="bide.v1.h", routing_key="a.b", redelivered=False, delivery_tag=1, values=given, body=b"body"
    )
    return TakenMessage(delivery=delivery, queue="bide.v1.h5", at=NOW)


def test_a_copy_keeps_properties_and_headers_but_not_those_of_the_wait() -> None:
    message = taken(
        {
            "CC": ["~h5", "~m0", "~q:orders"],
            "bide-to": "q:orders",
            "bide-due": 1,
            "bide-sent": 2,
            "bide-retries": 3,
            "bide-rest": 4,
            "bide-priority": 5,
            "bide-expiration": "6000",
            "NServiceBus.Transport.RabbitMQ.DelayInSeconds": 7,
            "x-death": [{"queue": "orders", "exchange": "shop"}],
            "x-first-death-queue": "orders",
            "x-delivery-count": 8,
            "own": [9, {"x": None}],
        },
        message_id="m",
        type="order",
        delivery_mode=1,
        timestamp=NOW,
    )
    copy = onward_copy(message, TARGET, DUE, user="bide")
    assert (copy.target, copy.due, copy.body, copy.message_id) == (TARGET, DUE, b"body", "m")
    assert copy.values == {
        "message_id": "m",
        "type": "order",
        "delivery_mode": 1,
        "timestamp": NOW,
        "priority": 5,
        "expiration": "6000",
        "headers": {"own": [9, {"x": None}], "bide-sent": 2, "bide-retries": 3},
    }


@pytest.mark.parametrize("values", [{}, {"message_id": ""}, {"message_id": " "}])
def test_a_copy_without_an_id_gets_one(values: dict[str, Any]) -> None:
    """NServiceBus refuses a blank one."""
    copy = onward_copy(taken(**values), TARGET, DUE, user="bide")
    assert copy.message_id.strip()
    assert copy.values == {"message_id": copy.message_id, "headers": {}}


def test_the_id_of_another_user_is_kept_in_a_header() -> None:
    """The broker closes the channel for it."""
    assert onward_copy(taken(user_id="bide"), TARGET, DUE, user="bide").values["user_id"] == "bide"
    copy = onward_copy(taken(user_id="guest"), TARGET, DUE, user="bide")
    assert "user_id" not in copy.values
    assert copy.headers["bide-user-id"] == "guest"


@pytest.mark.parametrize("headers", [{"CC": ["copy"]}, {"BCC": ["copy"]}, {"CC": "~s1;copy"}, {"bide-cc": ["copy"]}])
def test_a_message_with_more_routing_keys_is_refused(headers: dict[str, Any]) -> None:
    """The keys of a delay stand in their place."""
    with pytest.raises(InvalidInputError, match="which a delayed message cannot carry"):
        onward_copy(taken(headers), TARGET, DUE, user="bide")


def test_a_set_aside_message_is_taken_again_as_it_was() -> None:
    message = taken({"bide-to": "q:orders", "x-death": []}, message_id="m", expiration="5")
    copy = set_aside_copy(message, "aside", "no such queue", user="bide")
    assert copy.target == ExchangeTarget("aside", "a.b")
    assert copy.headers["bide-set-aside"] == "no such queue"
    assert "expiration" not in copy.values
    delivery = Delivery(
        exchange="aside", routing_key="a.b", redelivered=False, delivery_tag=2, values=copy.values, body=copy.body
    )
    again = TakenMessage.read_set_aside(delivery)
    assert again is not None
    assert (again.queue, again.at) == (message.queue, message.at)
    onward = onward_copy(again, TARGET, DUE, user="bide")
    assert onward.values == {"message_id": "m", "expiration": "5", "headers": {}}


def test_a_message_of_another_program_is_not_taken_from_the_queue() -> None:
    assert TakenMessage.read_set_aside(taken({"bide-set-aside": "by hand"}).delivery) is None
