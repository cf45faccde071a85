"""``x-death`` of a message in the retry queue of an event bus."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.recoverability.x_death import QueueDeaths

SECOND = timedelta(seconds=1)
T0 = datetime(2026, 11, 21, 6, 30, 16, tzinfo=UTC)

REJECTED = {
    "count": 1,
    "reason": "rejected",
    "queue": "orders",
    "time": T0,
    "exchange": "shop",
    "routing-keys": ["order.created"],
    "original-expiration": "30000",
}
BY_A_WORKER = {
    "count": 1,
    "reason": "rejected",
    "queue": "orders.retry",
    "time": T0,
    "exchange": "shop.retry",
    "routing-keys": ["orders.retry"],
}


def read(*deaths: object) -> QueueDeaths | None:
    return QueueDeaths.read({"x-death": list(deaths)}, "orders")


def test_a_rejected_message_is_read_with_its_first_address() -> None:
    assert read(REJECTED) == QueueDeaths(
        reason="rejected", count=1, exchange="shop", routing_key="order.created", expiration=30 * SECOND
    )


def test_a_second_death_is_counted_with_the_first_address() -> None:
    """As RabbitMQ 3.10.8, 4.0.5 and 4.3.6 sent it, alike, after a worker rejected in the retry queue too."""
    found = read({**REJECTED, "count": 2}, BY_A_WORKER)
    assert found is not None
    assert (found.count, found.exchange, found.routing_key) == (2, "shop", "order.created")


def test_deaths_of_two_reasons_are_added_up_under_the_latest() -> None:
    """First rejected, sent back by a worker, given up, sent back, rejected: the first address is the one to keep."""
    given_up = {**REJECTED, "reason": "delivery_limit", "time": T0 + SECOND, "routing-keys": ["orders"]}
    for deaths, reason in (
        ([{**REJECTED, "count": 2}, given_up], "rejected"),
        ([given_up, {**REJECTED, "count": 2}], "delivery_limit"),
    ):
        found = read(*deaths)
        assert found is not None
        assert (found.reason, found.count, found.routing_key) == (reason, 3, "order.created")


@pytest.mark.parametrize("first", ["rejected", "delivery_limit"])
def test_x_first_death_decides_between_deaths_of_one_second(first: str) -> None:
    deaths = [{**REJECTED, "routing-keys": ["a"]}, {**REJECTED, "reason": "delivery_limit", "routing-keys": ["b"]}]
    for order in (deaths, deaths[::-1]):
        named = {"x-death": order, "x-first-death-queue": "orders", "x-first-death-reason": first}
        found = QueueDeaths.read(named, "orders")
        assert found is not None
        assert found.routing_key == ("a" if first == "rejected" else "b")


def test_x_first_death_of_another_queue_is_ignored() -> None:
    given_up = {**REJECTED, "reason": "delivery_limit", "time": T0 + SECOND, "routing-keys": ["orders"]}
    elsewhere = {"x-first-death-queue": "before", "x-first-death-reason": "delivery_limit"}
    found = QueueDeaths.read({"x-death": [given_up, REJECTED], **elsewhere}, "orders")
    assert found is not None
    assert found.routing_key == "order.created"


def test_deaths_in_other_queues_are_ignored() -> None:
    assert read(BY_A_WORKER) is None
    assert QueueDeaths.read({}, "orders") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "yesterday"},
        {"time": datetime(2026, 1, 1)},  # noqa: DTZ001 (what a publisher may write)
        {"count": "many"},
        {"count": -5},
        {"count": True},
        {"original-expiration": 1000},
        {"original-expiration": "soon"},
        {"exchange": 5},
        {"routing-keys": []},
        {"routing-keys": [7]},
        {"routing-keys": "key"},
        {"reason": None},
    ],
)
def test_malformed_death_fields_are_ignored(wrong: dict[str, Any]) -> None:
    found = read("x", {**REJECTED, **wrong})
    assert found is not None
    assert found.count == 1
    assert found.exchange == ("" if "exchange" in wrong else "shop")
    assert found.routing_key == (None if "routing-keys" in wrong else "order.created")
    assert found.expiration == (None if "original-expiration" in wrong else 30 * SECOND)


@pytest.mark.parametrize("header", ["x", 5, None, {"queue": "orders"}])
def test_an_x_death_that_is_not_a_list_of_deaths_is_ignored(header: object) -> None:
    assert QueueDeaths.read({"x-death": header}, "orders") is None
