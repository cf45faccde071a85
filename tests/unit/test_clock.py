"""The layout of ``Clock``, against literal expectations."""

from __future__ import annotations

from datetime import timedelta

import pytest

from bide.delay.clock import Clock, carrier_for
from bide.delay.clock_keys import is_transport_key
from bide.delay.infrastructure import ExchangeTarget, QueueTarget
from bide.delay.units import MAX_DELAY
from bide.errors import InvalidDelayError, InvalidNameError, InvalidTopologyError, UnsupportedTargetError
from bide.topology import Binding, Topology
from bide.validation import problems

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
ORDERS = QueueTarget("orders")


def cc(clock: Clock, delay: timedelta, target: QueueTarget | ExchangeTarget) -> list[str]:
    keys = clock.route(delay, target).headers["CC"]
    assert isinstance(keys, list)
    return keys


def test_names_and_counts() -> None:
    topology = Clock().topology()
    assert sorted(exchange.name for exchange in topology.exchanges) == sorted(
        [
            *(f"bide.v1.{letter}" for letter in "edhmsc"),
            *(f"bide.v1.in.{letter}" for letter in "edhmsc"),
            "bide.v1.released",
            "bide.v1.delivery",
            "bide.v1.undeliverable",
        ]
    )
    assert len(topology.queues) == 31 + 99 + 23 + 59 + 59 + 99 + 1
    # Four word counts: a key per digit queue and a zero key per level; the entries, the delivery, the undeliverable.
    assert len(topology.bindings) == 4 * (370 + 6) + 6 + 1 + 1
    assert problems(topology) == []


@pytest.mark.parametrize(
    ("name", "ttl", "following"),
    [
        ("bide.v1.e31", 267_840_000_000, "bide.v1.d"),
        ("bide.v1.d99", 99 * 86_400_000, "bide.v1.h"),
        ("bide.v1.h5", 18_000_000, "bide.v1.m"),
        ("bide.v1.m1", 60_000, "bide.v1.s"),
        ("bide.v1.s59", 59_000, "bide.v1.c"),
        ("bide.v1.c1", 10, "bide.v1.released"),
    ],
)
def test_a_digit_queue(name: str, ttl: int, following: str) -> None:
    queue = Clock().topology().queue(name)
    assert queue is not None
    assert dict(queue.arguments) == {
        "x-queue-type": "quorum",
        "x-message-ttl": ttl,
        "x-dead-letter-exchange": following,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-queue-leader-locator": "balanced",
    }


def test_exchanges_that_decide_are_direct_and_have_an_alternate() -> None:
    for exchange in Clock().topology().exchanges:
        decides = exchange.name in {f"bide.v1.{letter}" for letter in "edhmsc"} | {"bide.v1.delivery"}
        assert exchange.type == ("direct" if decides else "fanout")
        assert dict(exchange.arguments) == ({"alternate-exchange": "bide.v1.undeliverable"} if decides else {})


@pytest.mark.parametrize(
    ("delay", "entry", "keys", "hops"),
    [
        (timedelta(minutes=5), "bide.v1.in.m", ["~m5", "~s0", "~c0"], 1),
        (timedelta(hours=1), "bide.v1.in.h", ["~h1", "~m0", "~s0", "~c0"], 1),
        (3 * DAY, "bide.v1.in.d", ["~d3", "~h0", "~m0", "~s0", "~c0"], 1),
        (timedelta(seconds=90), "bide.v1.in.m", ["~m1", "~s30", "~c0"], 2),
        (timedelta(milliseconds=10), "bide.v1.in.c", ["~c1"], 1),
        (timedelta(microseconds=1), "bide.v1.in.c", ["~c1"], 1),
        (timedelta(seconds=1, microseconds=1), "bide.v1.in.s", ["~s1", "~c1"], 2),
        (100 * DAY, "bide.v1.in.e", ["~e1", "~d0", "~h0", "~m0", "~s0", "~c0"], 1),
        (MAX_DELAY, "bide.v1.in.e", ["~e31", "~d99", "~h23", "~m59", "~s59", "~c99"], 6),
    ],
)
def test_routes_to_a_queue(delay: timedelta, entry: str, keys: list[str], hops: int) -> None:
    route = Clock().route(delay, ORDERS)
    assert (route.exchange, route.routing_key, route.hops) == (entry, "orders", hops)
    assert route.headers == {"CC": [*keys, "~q:orders"], "bide-to": "q:orders"}
    assert route.requires == Topology(bindings=[Binding("bide.v1.delivery", "orders", "~q:orders")])


def test_the_longest_delay() -> None:
    assert timedelta(days=3199, hours=23, minutes=59, seconds=59, milliseconds=990) == MAX_DELAY
    with pytest.raises(InvalidDelayError, match=r"3199 d 23:59:59.990001 is longer .* \(3199 d 23:59:59\.99\)"):
        Clock().route(MAX_DELAY + timedelta(microseconds=1), ORDERS)
    with pytest.raises(InvalidDelayError, match="-0:00:01 is negative"):
        Clock().route(-SECOND, ORDERS)


def test_no_delay_goes_straight_to_the_target() -> None:
    route = Clock().route(timedelta(0), ORDERS)
    assert (route.exchange, route.routing_key, route.headers, route.hops) == ("", "orders", {}, 0)
    route = Clock().route(timedelta(0), ExchangeTarget("shop", "a.b"))
    assert (route.exchange, route.routing_key, route.headers, route.hops) == ("shop", "a.b", {}, 0)


def test_an_exchange_has_keys_of_as_many_words_and_a_release_queue() -> None:
    target = ExchangeTarget("sh.op", "order.created")
    route = Clock().route(timedelta(hours=5), target)
    assert route.headers["CC"] == ["~.~h5", "~.~m0", "~.~s0", "~.~c0", "~.~x:sh%2Eop"]
    assert (route.routing_key, route.hops) == ("order.created", 2)
    (queue,) = route.requires.queues
    assert queue.name == "bide.v1.release.x:sh.op"
    assert queue.arguments["x-message-ttl"] == 0
    assert queue.arguments["x-dead-letter-exchange"] == "sh.op"
    assert queue.arguments["x-dead-letter-strategy"] == "at-least-once"
    assert route.requires.bindings == (Binding("bide.v1.delivery", queue.name, "~.~x:sh%2Eop"),)


def test_more_than_four_words_need_bindings_of_their_own() -> None:
    clock = Clock()
    assert len(clock.route(SECOND, ExchangeTarget("x", "a.b.c.d")).requires.bindings) == 1
    assert len(clock.route(SECOND, ExchangeTarget("x", "a.b.c.d.e")).requires.bindings) == 370 + 6 + 1


def test_an_isolated_queue_has_a_release_queue_and_a_key_of_its_own() -> None:
    route = Clock().route(SECOND, QueueTarget("orders", isolated=True))
    assert route.headers["CC"] == ["~s1", "~c0", "~r:orders"]
    (queue,) = route.requires.queues
    assert (queue.name, queue.arguments["x-dead-letter-exchange"]) == ("bide.v1.release.q:orders", "")


def test_names_that_are_too_long_are_hashed() -> None:
    clock = Clock()
    long = "q" * 255
    (key,) = cc(clock, SECOND, QueueTarget(long))[2:]
    assert key.startswith("~q#")
    assert len(key) == 35
    assert key != cc(clock, SECOND, QueueTarget("p" * 255))[2]
    (queue,) = clock.route(SECOND, ExchangeTarget(long, "a")).requires.queues
    assert queue.name.startswith("bide.v1.release.x#")
    with pytest.raises(InvalidNameError, match="256 bytes, the limit is 255"):
        clock.route(SECOND, QueueTarget("q" * 256))
    with pytest.raises(InvalidNameError, match="has 120 words, a delayed message can have 111"):
        clock.route(SECOND, ExchangeTarget("x" * 200, ".".join("w" * 120)))


@pytest.mark.parametrize("key", ["~h5", "~.~h5", "~q:orders", "~.~.~x:shop", "~c99", "~s1/3", "~x#00"])
def test_keys_of_ours_are_refused_as_the_callers(key: str) -> None:
    assert is_transport_key(key)
    with pytest.raises(InvalidNameError, match="between its own exchanges"):
        Clock().route(SECOND, ExchangeTarget("shop", key))


@pytest.mark.parametrize("key", ["", "h5", "~", "~h", "~h5.a", "a.~h5", "~z5", "~orders", "~h555"])
def test_other_keys_are_the_callers_own(key: str) -> None:
    assert not is_transport_key(key)
    assert Clock().route(SECOND, ExchangeTarget("shop", key)).routing_key == key


def test_targets_that_cannot_be() -> None:
    with pytest.raises(UnsupportedTargetError, match="default exchange"):
        Clock().route(SECOND, ExchangeTarget("", "orders"))
    with pytest.raises(UnsupportedTargetError, match="empty"):
        Clock().route(SECOND, ExchangeTarget("shop", "", type="topic"))


def test_pruning_keeps_the_exchanges_and_the_zero_keys() -> None:
    small = Clock(max_delay=timedelta(hours=23, minutes=59, seconds=59), resolution=SECOND)
    topology = small.topology()
    assert len(topology.queues) == 23 + 59 + 59 + 1
    assert topology.exchanges == Clock().topology().exchanges
    assert Binding("bide.v1.c", "bide.v1.released", "~c0", "exchange") in topology.bindings
    assert not Topology().diff(Clock().topology() | topology).changed
    assert small.route(timedelta(milliseconds=1), ORDERS).delay == SECOND
    assert cc(small, SECOND, ORDERS) == ["~s1", "~c0", "~q:orders"]


def test_lanes() -> None:
    clock = Clock(lanes=3, max_delay=2 * SECOND, resolution=SECOND)
    names = [queue.name for queue in clock.topology().queues]
    assert names[1:] == ["bide.v1.s1", "bide.v1.s1/1", "bide.v1.s1/2", "bide.v1.s2", "bide.v1.s2/1", "bide.v1.s2/2"]
    used = {clock.route(SECOND, ORDERS, message_id=str(number)).headers["CC"][0] for number in range(100)}
    assert used == {"~s1", "~s1/1", "~s1/2"}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_delay": timedelta(0)},
        {"max_delay": MAX_DELAY + SECOND},
        {"resolution": timedelta(milliseconds=15)},
        {"resolution": timedelta(milliseconds=5)},
        {"resolution": timedelta(seconds=7)},
        {"resolution": timedelta(minutes=1), "max_delay": timedelta(seconds=90)},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, timedelta]) -> None:
    with pytest.raises(InvalidDelayError):
        Clock(**settings)  # type: ignore[arg-type]


def test_prefixes_and_lanes_that_cannot_be() -> None:
    for prefix in ("", "amq.x", "p" * 101):
        with pytest.raises(InvalidNameError):
            Clock(prefix=prefix)
    for lanes in (0, 65):
        with pytest.raises(InvalidTopologyError):
            Clock(lanes=lanes)


def test_the_carrier_by_release() -> None:
    assert [carrier_for(release) for release in ((3, 10, 8), (3, 13, 7), (4, 0, 5), (4, 3, 6))] == [
        "CC",
        "CC",
        "BCC",
        "BCC",
    ]
