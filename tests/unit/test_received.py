"""Received messages, restored as they were sent. Headers are from RabbitMQ 3.10.8 and 4.3.6."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.delay.received import restore
from bide.delay.routes import DelayRoute
from bide.durations import parse_delay

DUE = datetime(2026, 11, 21, 1, 47, 34, 756_000, tzinfo=UTC)
DUE_STAMP = 1_795_225_654_756


def death(exchange: str, queue: str, *keys: str, reason: str = "expired") -> dict[str, Any]:
    when = datetime(2026, 11, 21, 1, 47, 34, tzinfo=UTC)
    keys = keys or ("q",)
    return {
        "count": 1,
        "exchange": exchange,
        "queue": queue,
        "reason": reason,
        "routing-keys": list(keys),
        "time": when,
    }


def ends(which: str, exchange: str, queue: str, reason: str = "expired") -> dict[str, str]:
    return {
        f"x-{which}-death-exchange": exchange,
        f"x-{which}-death-queue": queue,
        f"x-{which}-death-reason": reason,
    }


def cleaned(headers: dict[str, Any]) -> dict[str, Any]:
    return dict(restore("e", "k", {"headers": headers}).values["headers"])


REJECTED = death("shop", "orders", "order.created", reason="rejected")


def test_a_message_delayed_to_a_queue_on_3_10_is_restored() -> None:
    arrival = restore(
        "bide.v1.released",
        "q",
        {
            "headers": {
                "CC": ["~s1", "~c3", "~q:q"],
                "bide-due": DUE_STAMP,
                "bide-priority": 3,
                "bide-expiration": "5000",
                "bide-to": "q:q",
                "own": 1,
                "x-death": [
                    death("bide.v1.c", "bide.v1.c3", "q", "~s1", "~c3", "~q:q"),
                    death("bide.v1.in.s", "bide.v1.s1", "q", "~s1", "~c3", "~q:q"),
                ],
                **ends("first", "bide.v1.in.s", "bide.v1.s1"),
            },
            "delivery_mode": 2,
            "message_id": "m",
        },
    )
    assert (arrival.exchange, arrival.routing_key, arrival.due) == ("", "q", DUE)
    assert arrival.values == {
        "headers": {"own": 1},
        "delivery_mode": 2,
        "message_id": "m",
        "priority": 3,
        "expiration": "5000",
    }


def test_a_message_delayed_to_an_exchange_on_4_3_is_restored() -> None:
    arrival = restore(
        "sh.op",
        "a.b",
        {
            "headers": {
                "bide-due": DUE_STAMP,
                "bide-to": "x:sh.op",
                "x-death": [
                    death("bide.v1.released", "bide.v1.release.x:sh.op", "a.b"),
                    death("bide.v1.c", "bide.v1.c3", "a.b"),
                    death("bide.v1.in.s", "bide.v1.s1", "a.b"),
                ],
                **ends("first", "bide.v1.in.s", "bide.v1.s1"),
                **ends("last", "bide.v1.released", "bide.v1.release.x:sh.op"),
            }
        },
    )
    assert (arrival.exchange, arrival.routing_key, arrival.due) == ("sh.op", "a.b", DUE)
    assert arrival.values == {"headers": {}}


def test_a_message_without_headers_is_unchanged() -> None:
    given_values: list[dict[str, Any]] = [{}, {"headers": {}}, {"headers": None, "priority": 3}]
    for values in given_values:
        arrival = restore("shop", "order.created", values)
        assert (arrival.exchange, arrival.routing_key, arrival.due) == ("shop", "order.created", None)
        assert arrival.values == values


def test_an_undelayed_message_keeps_the_headers_of_its_sender() -> None:
    headers = {
        "own": {"nested": [1, None]},
        "CC": ["b", "c"],
        "x-own": 1,
        "x-death": [REJECTED],
        **ends("first", "shop", "orders", "rejected"),
        **ends("last", "shop", "orders", "rejected"),
    }
    arrival = restore("shop", "a", {"headers": headers | {"x-delivery-count": 2, "x-acquired-count": 2}})
    assert (arrival.exchange, arrival.routing_key, arrival.due) == ("shop", "a", None)
    assert arrival.values["headers"] == headers


# -- keys


@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize(
    ("keys", "left"),
    [
        (["~h5", "~m0", "~q:orders"], None),
        (["~.~.~h5", "~.~.~c99", "~.~.~x:shop"], None),
        (["~s1/3", "~r:orders", "~x#0123"], None),
        (["~h5", "mine"], ["mine"]),
        (["mine", "~h5.mine", "h5", "~"], ["mine", "~h5.mine", "h5", "~"]),
        ([1, b"~h5", None], [1, b"~h5", None]),
        ([], None),
        ("~h5", "~h5"),
    ],
)
def test_transport_keys_are_removed_and_other_keys_kept(name: str, keys: Any, left: Any) -> None:
    assert cleaned({name: keys, "own": 1}) == ({"own": 1} if left is None else {name: left, "own": 1})


ZEROS = "0." * 27


@pytest.mark.parametrize(
    ("key", "restored"),
    [
        (f"{ZEROS}1.Sales", "Sales"),
        (f"{ZEROS}1.billing.orders", "billing.orders"),
        (f"{ZEROS}1.", ""),
        (f"{ZEROS}1.~q:billing%2Eorders", "billing.orders"),
        (f"{ZEROS}1.~q:100%25", "100%"),
        (f"{ZEROS}1.~r:sh/op~order/created", "order.created"),
        (f"{ZEROS}1.~r:shop~", ""),
        ("0." * 26 + "1.Sales", "0." * 26 + "1.Sales"),
        ("0.1.0", "0.1.0"),
        ("Sales", "Sales"),
    ],
)
def test_the_digits_of_a_cascade_are_removed_from_the_routing_key(key: str, restored: str) -> None:
    assert restore("e", key, {"headers": {"some": "header"}}).routing_key == restored


@pytest.mark.parametrize(
    ("route", "exchange", "routing_key"),
    [
        (NServiceBus().route(parse_delay("10s"), QueueTarget("billing.orders")), "", "billing.orders"),
        (Celery().route(parse_delay("10s"), QueueTarget("billing.orders")), "", "billing.orders"),
        (Celery().route(parse_delay("10s"), ExchangeTarget("sh.op", "order.created")), "sh.op", "order.created"),
        (Clock().route(parse_delay("10s"), ExchangeTarget("sh.op", "order.created")), "sh.op", "order.created"),
        (Clock().route(parse_delay("10s"), QueueTarget("q" * 255, isolated=True)), "", "q" * 255),
    ],
)
def test_messages_of_each_infrastructure_are_restored_to_their_target(
    route: DelayRoute, exchange: str, routing_key: str
) -> None:
    headers = {**route.headers, "bide-due": DUE_STAMP, "own": 1}
    arrival = restore("on the way", route.routing_key, {"headers": headers})
    assert (arrival.exchange, arrival.routing_key, arrival.due) == (exchange, routing_key, DUE)
    assert arrival.values["headers"] == {"own": 1}


# -- deaths


def test_deaths_after_the_delay_are_kept() -> None:
    """Delayed, delivered, rejected by its consumer, and received from the queue of what was rejected."""
    headers = {
        "x-death": [REJECTED, death("bide.v1.in.h", "bide.v1.h5")],
        **ends("first", "bide.v1.in.h", "bide.v1.h5"),
        **ends("last", "shop", "orders", "rejected"),
    }
    assert cleaned(headers) == {"x-death": [REJECTED], **ends("last", "shop", "orders", "rejected")}


@pytest.mark.parametrize(
    ("exchange", "queue"),
    [
        ("nsb.v2.delay-level-03", "nsb.v2.delay-level-03"),
        ("nsb.delay-level-27", "nsb.delay-level-00"),
        ("celery_delayed_27", "celery_delayed_3"),
        ("my.prefix_celery_delayed_27", "my.prefix_celery_delayed_3"),
        ("bide.v1.in.e", "bide.v1.e31"),
        ("bide.v1.m", "bide.v1.s59/7"),
        ("bide.v1.released", "bide.v1.release.q#00112233445566778899aabbccddeeff"),
        ("a.v1.b.v1.in.h", "a.v1.b.v1.h5"),
        ("a\nb.v1.in.h", "a\nb.v1.h5"),
        ("a.v1.released", "a.v1.release.x:b.v1.h5"),
    ],
)
def test_deaths_in_delay_queues_are_removed(exchange: str, queue: str) -> None:
    assert cleaned({"x-death": [death(exchange, queue)], **ends("first", exchange, queue)}) == {}


@pytest.mark.parametrize(
    ("exchange", "queue"),
    [
        ("orders", "orders.v1.h5"),
        ("", "orders.v1.release.eu"),
        ("other.v1.in.h", "orders.v1.h5"),
        ("orders.v1.in.h", "orders.v1.h555"),
        ("orders.v1.in.h", "orders.v1.hours"),
        ("orders.v1.x", "orders.v1.h5"),
        ("bide.v1.in.h", "bide.v1.undeliverable"),
        # targets of delayed messages, in which these then died
        ("bide.v1.released", "orders"),
        ("bide.v1.released", "h5"),
        ("bide.v1.released", "release.eu"),
        ("nsb", "nsb.v2.delay-levels"),
        ("shop", "celery"),
    ],
)
def test_deaths_in_queues_with_similar_names_are_kept(exchange: str, queue: str) -> None:
    headers = {"x-death": [death(exchange, queue)], **ends("first", exchange, queue), **ends("last", exchange, queue)}
    assert cleaned(headers) == headers


@pytest.mark.parametrize(
    "headers",
    [
        {"x-death": "none"},
        {"x-death": ["none", 5, None, {}, {"queue": 5, "exchange": "e"}, {"queue": "bide.v1.h5"}]},
        {"x-first-death-queue": 5, "x-first-death-exchange": "bide.v1.in.h"},
        {"x-first-death-queue": "bide.v1.h5"},
        {"CC": {"a": 1}},
    ],
)
def test_malformed_death_headers_are_kept(headers: dict[str, Any]) -> None:
    assert cleaned(headers) == headers


@pytest.mark.parametrize(
    ("headers", "due", "exchange"),
    [
        ({"bide-due": "soon"}, None, "e"),
        ({"bide-due": 10**18}, None, "e"),
        ({"bide-due": -1}, datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), "e"),
        ({"bide-to": 5}, None, "e"),
        ({"bide-to": "nowhere"}, None, "e"),
        ({"bide-to": "q:"}, None, ""),
        ({"bide-to": "x:"}, None, ""),
        ({"bide-priority": "high", "bide-expiration": 5}, None, "e"),
    ],
)
def test_malformed_due_stamps_are_removed_and_ignored(
    headers: dict[str, Any], due: datetime | None, exchange: str
) -> None:
    arrival = restore("e", "k", {"headers": headers})
    assert (arrival.due, arrival.exchange) == (due, exchange)
    assert arrival.values == {"headers": {}}


def test_restoring_does_not_change_the_received_values() -> None:
    values = {
        "headers": {
            "CC": ["~h5", "mine"],
            "bide-due": 1,
            "x-death": [REJECTED, death("bide.v1.in.h", "bide.v1.h5")],
            **ends("first", "bide.v1.in.h", "bide.v1.h5"),
        },
        "message_id": "m",
    }
    before = copy.deepcopy(values)
    arrival = restore("e", "k", values)
    assert arrival.values["headers"] == {"CC": ["mine"], "x-death": [REJECTED]}
    assert values == before


prefixes = st.text(alphabet="ab.v1/~é\n", min_size=1, max_size=20)


@given(
    prefix=prefixes,
    level=st.sampled_from(LEVELS),
    lane=st.integers(0, 63),
    name=st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=60),
    data=st.data(),
)
def test_deaths_of_the_clock_are_removed_for_any_names(
    prefix: str, level: Any, lane: int, name: str, data: st.DataObject
) -> None:
    clock = Clock(prefix=prefix, lanes=64)
    digit = data.draw(st.integers(1, level.highest))
    targets: list[Target] = [QueueTarget(name, isolated=True), ExchangeTarget(name, "k")]
    target = data.draw(st.sampled_from(targets))
    entered = data.draw(st.sampled_from([clock.entry_exchange(level), clock.level_exchange(level)]))
    digit_queue = clock.digit_queue(level, digit, lane)
    deaths = [
        death(clock.released_exchange, clock.release_queue(target)),
        death(entered, digit_queue),
        REJECTED,
    ]
    assert cleaned({"x-death": deaths, **ends("first", entered, digit_queue)}) == {"x-death": [REJECTED]}
