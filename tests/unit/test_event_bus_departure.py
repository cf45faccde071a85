"""What ``x-death`` tells of a message in the retry queue of an event bus."""

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


def test_rejected_once() -> None:
    assert read(REJECTED) == QueueDeaths(
        reason="rejected", count=1, exchange="shop", routing_key="order.created", expiration=30 * SECOND
    )


def test_round_twice_the_newest_entry_stands_first_and_tells_of_the_first_time() -> None:
    """As RabbitMQ 3.10.8, 4.0.5 and 4.3.6 sent it, alike, after a worker rejected in the retry queue too."""
    found = read({**REJECTED, "count": 2}, BY_A_WORKER)
    assert found is not None
    assert (found.count, found.exchange, found.routing_key) == (2, "shop", "order.created")


def test_two_reasons_count_together_and_the_last_one_stands() -> None:
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
def test_of_two_entries_of_one_second_the_first_death_is_known(first: str) -> None:
    deaths = [{**REJECTED, "routing-keys": ["a"]}, {**REJECTED, "reason": "delivery_limit", "routing-keys": ["b"]}]
    for order in (deaths, deaths[::-1]):
        named = {"x-death": order, "x-first-death-queue": "orders", "x-first-death-reason": first}
        found = QueueDeaths.read(named, "orders")
        assert found is not None
        assert found.routing_key == ("a" if first == "rejected" else "b")


def test_a_first_death_elsewhere_says_nothing_about_this_queue() -> None:
    given_up = {**REJECTED, "reason": "delivery_limit", "time": T0 + SECOND, "routing-keys": ["orders"]}
    elsewhere = {"x-first-death-queue": "before", "x-first-death-reason": "delivery_limit"}
    found = QueueDeaths.read({"x-death": [given_up, REJECTED], **elsewhere}, "orders")
    assert found is not None
    assert found.routing_key == "order.created"


def test_other_queues_tell_nothing() -> None:
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
def test_anything_may_stand_there(wrong: dict[str, Any]) -> None:
    found = read("x", {**REJECTED, **wrong})
    assert found is not None
    assert found.count == 1
    assert found.exchange == ("" if "exchange" in wrong else "shop")
    assert found.routing_key == (None if "routing-keys" in wrong else "order.created")
    assert found.expiration == (None if "original-expiration" in wrong else 30 * SECOND)


@pytest.mark.parametrize("header", ["x", 5, None, {"queue": "orders"}])
def test_no_list_at_all(header: object) -> None:
    assert QueueDeaths.read({"x-death": header}, "orders") is None
