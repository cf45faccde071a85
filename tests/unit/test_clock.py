"""The layout of ``Clock``, compared with literal expectations."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import pytest

from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS, MAX_DELAY
from bide.delay.clock_keys import is_transport_key
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target, address_of
from bide.errors import InvalidDelayError, InvalidNameError, UnsupportedTargetError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.validation import problems

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
STEP = timedelta(milliseconds=10)
ORDERS = QueueTarget("orders")

TABLE = {
    "e": (100 * DAY, 31),
    "d": (DAY, 99),
    "h": (timedelta(hours=1), 23),
    "m": (timedelta(minutes=1), 59),
    "s": (SECOND, 59),
    "c": (STEP, 99),
}
"""Level -> its unit, and its highest digit."""

FOLLOWING = {"e": "d", "d": "h", "h": "m", "m": "s", "s": "c", "c": "released"}


def keys_of(clock: Clock, delay: timedelta, target: Target, **options: Any) -> list[str]:
    keys = clock.route(delay, target, **options).headers[clock.carrier or "CC"]
    assert isinstance(keys, list)
    return keys


# -- levels


def test_the_units_of_a_level_add_up_to_one_of_the_level_above() -> None:
    assert {level.letter: (level.unit, level.highest) for level in LEVELS} == TABLE
    assert [level.letter for level in LEVELS] == list(TABLE)
    for above, below in pairwise(LEVELS):
        assert below.unit * (below.highest + 1) == above.unit


def test_every_level_has_two_exchanges() -> None:
    undeliverable = {"alternate-exchange": "bide.v1.undeliverable"}
    assert set(Clock().topology().exchanges) == {
        *(Exchange(f"bide.v1.{letter}", "direct", arguments=undeliverable) for letter in TABLE),
        *(Exchange(f"bide.v1.in.{letter}", "fanout") for letter in TABLE),
        Exchange("bide.v1.released", "fanout"),
        Exchange("bide.v1.delivery", "direct", arguments=undeliverable),
        Exchange("bide.v1.undeliverable", "fanout"),
    }


def test_every_digit_has_one_queue() -> None:
    queues = {queue.name: queue for queue in Clock().topology().queues}
    assert len(queues) == 370 + 1
    for letter, (unit, highest) in TABLE.items():
        for digit in range(1, highest + 1):
            assert queues.pop(f"bide.v1.{letter}{digit}") == Queue(
                f"bide.v1.{letter}{digit}",
                arguments={
                    "x-queue-type": "quorum",
                    "x-message-ttl": digit * int(unit.total_seconds() * 1000),
                    "x-dead-letter-exchange": f"bide.v1.{FOLLOWING[letter]}",
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                    "x-queue-leader-locator": "balanced",
                },
            )
    assert queues == {
        "bide.v1.undeliverable": Queue(
            "bide.v1.undeliverable",
            arguments={
                "x-queue-type": "quorum",
                "x-overflow": "reject-publish",
                "x-queue-leader-locator": "balanced",
            },
        )
    }


@pytest.mark.parametrize(
    ("name", "ttl"),
    [
        ("bide.v1.e31", 267_840_000_000),
        ("bide.v1.e1", 8_640_000_000),
        ("bide.v1.d99", 8_553_600_000),
        ("bide.v1.h5", 18_000_000),
        ("bide.v1.m1", 60_000),
        ("bide.v1.s59", 59_000),
        ("bide.v1.c1", 10),
    ],
)
def test_a_digit_queue_waits_digit_times_unit(name: str, ttl: int) -> None:
    queue = Clock().topology().queue(name)
    assert queue is not None
    assert queue.arguments["x-message-ttl"] == ttl


def test_digit_keys_of_up_to_four_words_are_bound() -> None:
    expected = {
        Binding("bide.v1.undeliverable", "bide.v1.undeliverable"),
        Binding("bide.v1.released", "bide.v1.delivery", destination_type="exchange"),
        *(Binding(f"bide.v1.in.{letter}", f"bide.v1.{letter}", destination_type="exchange") for letter in TABLE),
    }
    for padding in ("", "~.", "~.~.", "~.~.~."):
        for letter, (_, highest) in TABLE.items():
            source = f"bide.v1.{letter}"
            expected.add(Binding(source, f"bide.v1.{FOLLOWING[letter]}", f"{padding}~{letter}0", "exchange"))
            expected |= {
                Binding(source, f"bide.v1.{letter}{digit}", f"{padding}~{letter}{digit}")
                for digit in range(1, highest + 1)
            }
    assert set(Clock().topology().bindings) == expected
    assert len(Clock().topology().bindings) == 4 * (370 + 6) + 8


@pytest.mark.parametrize(
    "clock",
    [
        Clock(),
        Clock(max_delay=DAY, resolution=SECOND),
        Clock(prefix="p" * 100, lanes=8, max_delay=timedelta(minutes=1), resolution=SECOND),
        Clock(prefix="ü.~ *#", resolution=timedelta(minutes=1)),
    ],
    ids=["all", "pruned", "many lanes, long names", "odd names"],
)
@pytest.mark.parametrize("release", [(3, 10, 8), (4, 0, 5), (4, 3, 6)])
def test_every_release_accepts_the_topology(clock: Clock, release: tuple[int, int, int]) -> None:
    assert problems(clock.topology(), release=release) == []
    for target in (ORDERS, QueueTarget("q" * 255, isolated=True), ExchangeTarget("amq.topic", "a.b.c.d.e.f")):
        exists = {"orders", "q" * 255, "amq.topic"}
        required = clock.topology() | clock.route(SECOND * 60, target).requires
        assert problems(required, external=exists, release=release) == []


# -- routes


@pytest.mark.parametrize(
    ("delay", "entry", "keys", "hops"),
    [
        (timedelta(minutes=5), "bide.v1.in.m", ["~m5", "~s0", "~c0"], 1),
        (timedelta(hours=1), "bide.v1.in.h", ["~h1", "~m0", "~s0", "~c0"], 1),
        (3 * DAY, "bide.v1.in.d", ["~d3", "~h0", "~m0", "~s0", "~c0"], 1),
        (timedelta(seconds=90), "bide.v1.in.m", ["~m1", "~s30", "~c0"], 2),
        (STEP, "bide.v1.in.c", ["~c1"], 1),
        (timedelta(microseconds=1), "bide.v1.in.c", ["~c1"], 1),
        (timedelta(microseconds=10_001), "bide.v1.in.c", ["~c2"], 1),
        (timedelta(microseconds=999_999), "bide.v1.in.s", ["~s1", "~c0"], 1),
        (timedelta(seconds=1, microseconds=1), "bide.v1.in.s", ["~s1", "~c1"], 2),
        (99 * DAY, "bide.v1.in.d", ["~d99", "~h0", "~m0", "~s0", "~c0"], 1),
        (100 * DAY, "bide.v1.in.e", ["~e1", "~d0", "~h0", "~m0", "~s0", "~c0"], 1),
        (365 * DAY, "bide.v1.in.e", ["~e3", "~d65", "~h0", "~m0", "~s0", "~c0"], 2),
        (MAX_DELAY, "bide.v1.in.e", ["~e31", "~d99", "~h23", "~m59", "~s59", "~c99"], 6),
        (MAX_DELAY - timedelta(microseconds=1), "bide.v1.in.e", ["~e31", "~d99", "~h23", "~m59", "~s59", "~c99"], 6),
    ],
)
@pytest.mark.parametrize("carrier", ["CC", "BCC"])
def test_a_route_to_a_queue_carries_digits_and_target_in_its_keys(
    delay: timedelta, entry: str, keys: list[str], hops: int, carrier: Literal["CC", "BCC"]
) -> None:
    route = Clock(carrier=carrier).route(delay, ORDERS)
    assert (route.exchange, route.routing_key, route.hops) == (entry, "orders", hops)
    assert route.headers == {carrier: [*keys, "~q:orders"], "bide-to": "q:orders"}
    assert route.requires == Topology(bindings=[Binding("bide.v1.delivery", "orders", "~q:orders")])
    assert route.expects == Topology(queues=[Queue("orders")])


def test_delays_out_of_range_are_refused() -> None:
    assert timedelta(days=3199, hours=23, minutes=59, seconds=59, milliseconds=990) == MAX_DELAY == Clock().max_delay
    with pytest.raises(InvalidDelayError) as caught:
        Clock().route(MAX_DELAY + timedelta(microseconds=1), ORDERS)
    assert str(caught.value) == (
        "the delay 3199 d 23:59:59.990001 is longer than this infrastructure can hold (3199 d 23:59:59.99): "
        "give a shorter delay"
    )
    with pytest.raises(InvalidDelayError, match="the delay -0:00:01 is negative: give zero or more"):
        Clock().route(-SECOND, ORDERS)


def test_a_delay_of_zero_is_published_to_the_target() -> None:
    route = Clock().route(timedelta(0), QueueTarget("orders", isolated=True))
    assert (route.exchange, route.routing_key, route.headers, route.hops) == ("", "orders", {}, 0)
    assert route.requires == Topology()
    route = Clock().route(timedelta(0), ExchangeTarget("shop", "a.b"))
    assert (route.exchange, route.routing_key, route.headers, route.hops) == ("shop", "a.b", {}, 0)
    assert (route.requires, route.expects) == (Topology(), Topology([Exchange("shop")]))


def test_required_declarations_do_not_depend_on_the_delay() -> None:
    for target in (ORDERS, QueueTarget("orders", isolated=True), ExchangeTarget("shop", "a.b")):
        required = {
            Clock(lanes=8).route(delay, target, message_id=str(delay)).requires for delay in (STEP, DAY, 9 * DAY)
        }
        assert len(required) == 1
    shop = [Clock().route(SECOND, ExchangeTarget("shop", key)).requires for key in ("a.b", "c.d", "..", "a.b.c")]
    assert shop[0] == shop[1]
    assert shop[0] != shop[2]
    assert shop[2] == shop[3]


# -- targets


def test_a_route_to_an_exchange_has_padded_keys_and_a_release_queue() -> None:
    route = Clock().route(timedelta(hours=5), ExchangeTarget("sh.op", "order.created"))
    assert route.headers == {"CC": ["~.~h5", "~.~m0", "~.~s0", "~.~c0", "~.~x:sh%2Eop"], "bide-to": "x:sh.op"}
    assert (route.exchange, route.routing_key, route.hops) == ("bide.v1.in.h", "order.created", 2)
    assert route.requires == Topology(
        queues=[
            Queue.quorum(
                "bide.v1.release.x:sh.op",
                {
                    "x-message-ttl": 0,
                    "x-dead-letter-exchange": "sh.op",
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                    "x-queue-leader-locator": "balanced",
                },
            )
        ],
        bindings=[Binding("bide.v1.delivery", "bide.v1.release.x:sh.op", "~.~x:sh%2Eop")],
    )
    assert route.expects == Topology([Exchange("sh.op")])


@pytest.mark.parametrize(
    ("routing_key", "key"),
    [
        ("", "~s1"),
        ("a", "~s1"),
        ("a.b", "~.~s1"),
        (".", "~.~s1"),
        ("a..b", "~.~.~s1"),
        ("a.b.c.d.e.f", "~.~.~.~.~.~s1"),
    ],
)
def test_keys_have_as_many_words_as_the_routing_key(routing_key: str, key: str) -> None:
    assert keys_of(Clock(), SECOND, ExchangeTarget("x", routing_key))[0] == key


def test_keys_of_more_than_four_words_need_their_own_bindings() -> None:
    clock = Clock()
    four = clock.digit_topology(clock.route(5 * HOUR, ExchangeTarget("x", "a.b.c.d")).digits)
    assert four.bindings == (Binding("bide.v1.h", "bide.v1.h5", "~.~.~.~h5"),)
    five = clock.digit_topology(clock.route(5 * HOUR, ExchangeTarget("x", "a.b.c.d.e")).digits)
    assert set(five.bindings) == {
        Binding("bide.v1.h", "bide.v1.h5", "~.~.~.~.~h5"),
        Binding("bide.v1.m", "bide.v1.s", "~.~.~.~.~m0", "exchange"),
        Binding("bide.v1.s", "bide.v1.c", "~.~.~.~.~s0", "exchange"),
        Binding("bide.v1.c", "bide.v1.released", "~.~.~.~.~c0", "exchange"),
    }
    assert not set(five.bindings) & set(clock.topology().bindings)


def test_a_message_needs_only_the_queues_it_waits_in() -> None:
    clock = Clock(lanes=3)
    route = clock.route(5 * HOUR + 7 * SECOND, ORDERS, message_id="m")
    lane = clock.lane_of("m")
    assert lane > 0
    needed = clock.digit_topology(route.digits)
    assert [one.name for one in needed.queues] == [f"bide.v1.h5/{lane}", f"bide.v1.s7/{lane}"]
    assert set(needed.queues) <= set(clock.topology().queues)
    assert set(needed.bindings) <= set(clock.topology().bindings)
    assert clock.route(timedelta(0), ORDERS).digits == ()


def test_the_core_topology_has_every_exchange_and_no_digit_queue() -> None:
    clock = Clock()
    core = clock.core_topology()
    assert [one.name for one in core.queues] == ["bide.v1.undeliverable"]
    assert core.exchanges == clock.topology().exchanges
    assert {one.destination_type for one in core.bindings if one.source != "bide.v1.undeliverable"} == {"exchange"}


def test_the_mark_of_a_complete_clock_is_not_declared_with_the_exchanges() -> None:
    """They are declared first, and the mark may be there only when the queues are."""
    clock = Clock()
    assert clock.complete_mark.name == "bide.v1.complete"
    assert clock.complete_mark not in clock.topology().exchanges
    assert clock.owns(clock.complete_mark.name)


def test_an_isolated_queue_has_its_own_release_queue_and_key() -> None:
    route = Clock().route(SECOND, QueueTarget("or.ders", isolated=True))
    assert route.headers == {"CC": ["~s1", "~c0", "~r:or.ders"], "bide-to": "q:or.ders"}
    assert route.hops == 2
    (queue,) = route.requires.queues
    assert (queue.name, queue.arguments["x-dead-letter-exchange"]) == ("bide.v1.release.q:or.ders", "")
    assert queue.arguments["x-dead-letter-routing-key"] == "or.ders", "or the CC list reaches the queue"
    assert route.requires.bindings == (Binding("bide.v1.delivery", queue.name, "~r:or.ders"),)
    assert route.expects == Topology(queues=[Queue("or.ders")])


@pytest.mark.parametrize(
    ("target", "key", "name"),
    [
        (QueueTarget("or.ders"), "~r:or.ders", "q:or.ders"),
        (QueueTarget("or.ders", isolated=True), "~r:or.ders", "q:or.ders"),
        (ExchangeTarget("shop", "a.b.c.d.e"), "~k:shop~a/b/c/d/e", "k:shop~a/b/c/d/e"),
        (ExchangeTarget("Shop:OrderPlaced"), "~k:Shop:OrderPlaced~", "k:Shop:OrderPlaced~"),
    ],
)
def test_a_clock_that_hides_its_keys_has_a_release_queue_for_each_target_and_key(
    target: Target, key: str, name: str
) -> None:
    route = Clock(hides_keys=True).route(SECOND, target)
    assert route.headers["CC"] == ["~s1", "~c0", key], "not padded: no exchange of others sees them"
    assert is_transport_key(key)
    assert route.hops == 2
    (queue,) = route.requires.queues
    assert queue.name == f"bide.v1.release.{name}"
    assert (queue.arguments["x-dead-letter-exchange"], queue.arguments["x-dead-letter-routing-key"]) == (
        address_of(target)
    )
    assert route.requires.bindings == (Binding("bide.v1.delivery", queue.name, key),)


@pytest.mark.parametrize(
    ("exchange", "word"),
    [
        ("shop", "~x:shop"),
        ("sh.op", "~x:sh%2Eop"),
        ("sh%2Eop", "~x:sh%252Eop"),
        ("sh%op", "~x:sh%25op"),
        ("*", "~x:*"),
        ("店.注文", "~x:店%2E注文"),
        ("Shop:OrderPlaced", "~x:Shop:OrderPlaced"),
    ],
)
def test_the_name_of_an_exchange_is_encoded_as_one_word(exchange: str, word: str) -> None:
    assert keys_of(Clock(), SECOND, ExchangeTarget(exchange, "a"))[-1] == word
    assert keys_of(Clock(), SECOND, ExchangeTarget(exchange, "a.b"))[-1] == f"~.{word}"


def test_names_that_are_too_long_for_a_key_are_hashed() -> None:
    fits, long, other = "q" * 252, "q" * 253, "p" * 255
    assert keys_of(Clock(), SECOND, QueueTarget(fits))[-1] == f"~q:{fits}"
    for target in (QueueTarget(long), QueueTarget(long, isolated=True), ExchangeTarget(long, "a")):
        key = keys_of(Clock(), SECOND, target)[-1]
        assert len(key) == 35
        assert key[:3] in ("~q#", "~r#", "~x#")
        assert Clock().route(SECOND, target).headers["bide-to"] == str(target)
    assert keys_of(Clock(), SECOND, QueueTarget(long))[-1] != keys_of(Clock(), SECOND, QueueTarget(other))[-1]
    assert len(keys_of(Clock(), SECOND, QueueTarget("ü" * 127))[-1]) == 35


def test_names_that_are_too_long_for_a_release_queue_are_hashed() -> None:
    clock = Clock(prefix="p" * 100)
    names = set()
    for target in (
        ExchangeTarget("x" * 255, "a"),
        ExchangeTarget("y" * 255, "a"),
        QueueTarget("x" * 255, isolated=True),
        ExchangeTarget("ü" * 127, "a"),
    ):
        (queue,) = clock.route(SECOND, target).requires.queues
        assert len(queue.name.encode()) <= 255
        assert queue.name.startswith("p" * 100 + ".v1.release.")
        names.add(queue.name)
    assert len(names) == 4
    assert clock.release_queue(ExchangeTarget("x", "a")) == "p" * 100 + ".v1.release.x:x"


def test_names_and_keys_over_255_bytes_are_refused() -> None:
    with pytest.raises(InvalidNameError, match="takes 256 bytes, the limit is 255: use a shorter one"):
        Clock().route(SECOND, QueueTarget("q" * 256))
    with pytest.raises(InvalidNameError, match="takes 256 bytes, the limit is 255"):
        Clock().route(SECOND, ExchangeTarget("x", "k" * 256))
    with pytest.raises(InvalidNameError, match="the queue name is empty"):
        Clock().route(SECOND, QueueTarget(""))
    with pytest.raises(InvalidNameError, match="UTF-8"):
        Clock().route(SECOND, QueueTarget("\ud800"))


def test_routing_keys_have_at_most_111_words() -> None:
    """Padding and the shortest target key fill a short string of AMQP."""
    keys = keys_of(Clock(), MAX_DELAY, ExchangeTarget("x" * 200, "." * 110))
    assert max(map(len, keys)) == 255
    assert keys[-1].startswith("~." * 110 + "~x#")
    assert max(map(len, keys_of(Clock(), MAX_DELAY, ExchangeTarget("x", "." * 125)))) == 254
    with pytest.raises(InvalidNameError) as caught:
        Clock().route(SECOND, ExchangeTarget("x" * 200, "." * 111))
    assert str(caught.value) == ("the routing key has 112 words, the limit is 111 when delayed: use fewer dots")


@pytest.mark.parametrize(
    "key", ["~h5", "~.~h5", "~q:orders", "~.~.~x:shop", "~c99", "~s1/3", "~x#00", "~r:a\nb", "~e0"]
)
def test_transport_keys_are_refused_as_routing_keys_and_queue_names(key: str) -> None:
    assert is_transport_key(key)
    for target in (ExchangeTarget("shop", key), QueueTarget(key)):
        for delay in (timedelta(0), SECOND):
            with pytest.raises(
                InvalidNameError, match="has the form of a key that bide uses between its exchanges: choose another"
            ):
                Clock().route(delay, target)


@pytest.mark.parametrize("key", ["", "h5", "~", "~h", "~h5.a", "a.~h5", "~z5", "~orders", "~h555", "~.~", "~q", "~h٣"])
def test_keys_similar_to_transport_keys_are_accepted(key: str) -> None:
    assert not is_transport_key(key)
    assert Clock().route(SECOND, ExchangeTarget("shop", key)).routing_key == key


@pytest.mark.parametrize("delay", [timedelta(0), SECOND])
def test_the_default_exchange_and_empty_topic_keys_are_refused(delay: timedelta) -> None:
    with pytest.raises(
        UnsupportedTargetError, match=r"cannot go to the default exchange: name the queue as the target"
    ):
        Clock().route(delay, ExchangeTarget("", "orders"))
    with pytest.raises(UnsupportedTargetError, match=r"topic exchange 'shop' is empty: .* at least one word"):
        Clock().route(delay, ExchangeTarget("shop", "", type="topic"))
    for kind in (None, "fanout", "direct", "headers"):
        assert Clock().route(delay, ExchangeTarget("shop", "", type=kind)).routing_key == ""
