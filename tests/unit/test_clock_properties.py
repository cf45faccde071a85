"""Properties of ``Clock`` in the routing model: any delay, any target, other bindings."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS, MAX_DELAY
from bide.delay.clock_keys import is_transport_key
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.delay.received import restore
from bide.delay.routes import DelayRoute
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Arrival, Model
from tests.topics import topic_matches

Carrier = Literal["CC", "BCC"]

CLOCK = Clock()
STEP = timedelta(milliseconds=10)
SECOND = timedelta(seconds=1)
HEADERS = {"colour": "red", "number": 5, "x-mine": True}
OTHERS: tuple[Target, ...] = (
    QueueTarget("orders"),
    QueueTarget("billing.orders"),
    QueueTarget("ers"),
    QueueTarget("~"),
    QueueTarget("x:shop"),
    QueueTarget("orders", isolated=True),
    ExchangeTarget("other", "order.created"),
    ExchangeTarget("other", "order"),
    ExchangeTarget("x", ""),
)
"""Targets that are always bound beside the one that a message is for."""

delays = st.one_of(
    st.timedeltas(timedelta(0), MAX_DELAY),
    st.integers(0, 320_000).map(lambda steps: steps * STEP),
    st.sampled_from(LEVELS).flatmap(lambda level: st.integers(1, level.highest).map(lambda digit: digit * level.unit)),
    st.tuples(*(st.integers(0, level.highest) for level in LEVELS)).map(
        lambda digits: sum((digit * level.unit for digit, level in zip(digits, LEVELS, strict=True)), timedelta(0))
    ),
    st.sampled_from([timedelta(0), timedelta(microseconds=1), STEP, MAX_DELAY]),
)
carriers = st.sampled_from(["CC", "BCC"])
key_words = st.sampled_from(["order", "created", "word", "a", "~", "~#", "*", "#", "", "注文", "h5"])
routing_keys = st.lists(key_words, min_size=1, max_size=12).map(".".join).filter(lambda key: not is_transport_key(key))
# The word "~" alone is ours: a pattern that asks for it does get our keys, see below.
pattern_words = st.sampled_from(["*", "#", "*", "#", "order", "created", "word", "a", "~#", "", "h5"])
patterns = st.one_of(
    st.sampled_from(["*", "#", "*.*", "*.#", "*.*.#", "#.word", "~#", "#.*", "*.*.*.*.*", "order.#", ""]),
    st.lists(pattern_words, min_size=1, max_size=12).map(".".join),
)


def rounded_up(delay: timedelta, resolution: timedelta = STEP) -> timedelta:
    return -(-delay // resolution) * resolution


@cache
def crowd() -> Topology:
    """The clock with all the other targets bound, and what is behind them."""
    behind = Topology(
        [Exchange("other", "topic"), Exchange("x", "fanout")],
        [Queue(name) for name in ("orders", "billing.orders", "ers", "~", "x:shop", "other's", "x's")],
        [Binding("other", "other's", "#"), Binding("x", "x's")],
    )
    return reduce(or_, [CLOCK.topology(), behind, *(CLOCK.route(SECOND, target).requires for target in OTHERS)])


def needs_of(route: DelayRoute) -> Topology:
    """What a client declares for a message."""
    return route.requires | CLOCK.digit_topology(route.digits)


def travel(topology: Topology, route: DelayRoute, headers: dict[str, Any] | None = None) -> list[Arrival]:
    return Model(topology).travel(route.exchange, route.routing_key, {**(headers or {}), **route.headers})


def deaths(topology: Topology, route: DelayRoute, hops: tuple[str, ...]) -> list[dict[str, Any]]:
    """What the broker writes into ``x-death`` on this way, the latest first."""
    written: list[dict[str, Any]] = []
    exchange = route.exchange
    for name in hops:
        queue = topology.queue(name)
        assert queue is not None
        written.insert(0, {"queue": name, "exchange": exchange, "reason": "expired", "count": 1})
        exchange = str(queue.arguments["x-dead-letter-exchange"])
    return written


def check_restored(topology: Topology, route: DelayRoute, arrival: Arrival, exchange: str, routing_key: str) -> None:
    """What the receiver sees is what was sent."""
    received: dict[str, Any] = dict(arrival.headers)
    if arrival.hops:
        written = deaths(topology, route, arrival.hops)
        received["x-death"] = written
        for which, one in (("first", written[-1]), ("last", written[0])):
            received |= {f"x-{which}-death-{what}": one[what] for what in ("queue", "exchange", "reason")}
    restored = restore(arrival.exchange, arrival.routing_key, {"headers": received})
    assert restored.values["headers"] == HEADERS
    assert (restored.exchange, restored.routing_key) == (exchange, routing_key)


# -- delays


@given(delay=delays)
@example(delay=timedelta(0))
@example(delay=MAX_DELAY)
def test_the_waits_add_up_to_the_delay_rounded_up(delay: timedelta) -> None:
    route = CLOCK.route(delay, QueueTarget("orders"))
    (arrival,) = travel(crowd(), route)
    assert (arrival.queue, arrival.fate) == ("orders", "arrived")
    assert arrival.at == route.delay == rounded_up(delay)
    assert timedelta(0) <= arrival.at - delay < STEP
    assert len(arrival.hops) == route.hops <= 6
    assert list(arrival.hops) == sorted(arrival.hops, key=lambda name: "edhmsc".index(name[len("bide.v1.")]))
    waits = [crowd().queue(name) for name in arrival.hops]
    assert sum(int(one.arguments["x-message-ttl"]) for one in waits if one) * timedelta(milliseconds=1) == route.delay


@given(
    delay=delays.filter(bool), target=st.sampled_from(OTHERS), message_id=st.text(max_size=5), lanes=st.integers(1, 64)
)
def test_parsed_keys_add_up_to_the_delay_and_name_the_target(
    delay: timedelta, target: Target, message_id: str, lanes: int
) -> None:
    route = Clock(lanes=lanes).route(delay, target, message_id=message_id)
    *digits, last = (re.sub(r"^(~\.)*(?=~)", "", key) for key in route.headers["CC"])
    units = {level.letter: level.unit for level in LEVELS}
    wait, letters, used = timedelta(0), "", set()
    for key in digits:
        found = re.fullmatch(r"~([edhmsc])(\d+)(?:/(\d+))?", key)
        assert found is not None
        wait += int(found[2]) * units[found[1]]
        letters += found[1]
        if found[2] != "0":
            used.add(int(found[3] or 0))
    assert wait == route.delay
    assert "edhmsc".endswith(letters)
    assert digits[0] != f"~{letters[0]}0"
    assert len(used) == 1
    assert max(used) < lanes
    isolated = isinstance(target, QueueTarget) and target.isolated
    assert last[:3] == ("~r:" if isolated else f"~{str(target)[:2]}")
    assert last[3:].replace("%2E", ".").replace("%25", "%") == str(target)[2:]
    assert all(is_transport_key(key) for key in route.headers["CC"])


@given(delay=delays, target=st.sampled_from(OTHERS))
def test_explained_steps_equal_the_modelled_path(delay: timedelta, target: Target) -> None:
    route, steps = CLOCK.route(delay, target), CLOCK.steps(delay, target)
    assert steps[0].exchange == (route.exchange or "(default)")
    assert sum((step.delay for step in steps), timedelta(0)) == route.delay
    ways = {arrival.hops for arrival in travel(crowd(), route)}
    assert ways == {tuple(step.routed_to for step in steps if step.dead_letter_to is not None)}
    for step, following in pairwise(steps):
        assert following.exchange == (step.dead_letter_to or step.routed_to)


# -- queues


@given(
    delay=delays,
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=255),
    isolated=st.booleans(),
    carrier=carriers,
    hides_keys=st.booleans(),
)
def test_only_the_target_queue_gets_the_message(
    delay: timedelta, name: str, isolated: bool, carrier: Carrier, hides_keys: bool
) -> None:
    if is_transport_key(name) or len(name.encode()) > 255:
        return
    target = QueueTarget(name, isolated)
    route = Clock(carrier=carrier, hides_keys=hides_keys).route(delay, target)
    topology = crowd() | Topology(queues=[Queue(name)]) | needs_of(route)
    (arrival,) = travel(topology, route, HEADERS)
    assert (arrival.queue, arrival.fate) == (name, "arrived")
    assert arrival.at == route.delay == rounded_up(delay)
    assert len(arrival.hops) == route.hops <= 6 + (isolated or hides_keys)
    check_restored(topology, route, arrival, "" if route.hops else arrival.exchange, name)


# -- exchanges


@st.composite
def users_topologies(draw: st.DrawFn) -> Topology:
    """An exchange ``sh.op``, with queues bound to it directly and over a second exchange, and perhaps an alternate."""
    kind = draw(st.sampled_from(["topic", "topic", "topic", "direct", "fanout", "headers"]))
    inner = draw(st.sampled_from(["topic", "direct", "headers"]))
    bindings = [
        _users_binding(draw, source, f"u{number}", kind if source == "sh.op" else inner)
        for number, source in enumerate(draw(st.lists(st.sampled_from(["sh.op", "sh.op", "inner"]), max_size=6)))
    ]
    bindings.append(_users_binding(draw, "sh.op", "inner", kind, to_exchange=True))
    alternate = {"alternate-exchange": "rest"} if draw(st.booleans()) else {}
    return Topology(
        [Exchange("sh.op", kind, arguments=alternate), Exchange("inner", inner), Exchange("rest", "fanout")],
        [Queue(f"u{number}") for number in range(6)],
        [*bindings, Binding("rest", "the rest")],
    )


def _users_binding(draw: st.DrawFn, source: str, destination: str, kind: str, *, to_exchange: bool = False) -> Binding:
    arguments: dict[str, Any] = {}
    if kind == "headers":
        arguments = draw(
            st.dictionaries(st.sampled_from(["colour", "number"]), st.sampled_from(["red", 5]), max_size=2)
        )
        arguments["x-match"] = draw(st.sampled_from(["all", "any"]))
    key = draw(
        st.one_of(patterns, routing_keys.filter(lambda one: "~" not in one.split(".")), st.just("order.created"))
    )
    return Binding(source, destination, key, "exchange" if to_exchange else "queue", arguments)


@given(
    users=users_topologies(),
    key=routing_keys | st.sampled_from(["order.created", "order"]),
    delay=delays.filter(bool),
    carrier=carriers,
    hides_keys=st.booleans(),
)
def test_an_exchange_routes_a_delayed_message_as_it_routes_a_direct_one(
    users: Topology, key: str, delay: timedelta, carrier: Carrier, hides_keys: bool
) -> None:
    """Exactly the same queues, each once, at the due time, whatever the type, the bindings and the key."""
    shop = users.exchange("sh.op")
    assert shop is not None
    if not key and any(one.type == "topic" for one in users.exchanges):
        # An empty key has no word for a topic exchange, and the keys that carry the message have one.
        return
    direct = Model(users).route("sh.op", key, HEADERS).queues
    route = Clock(carrier=carrier, hides_keys=hides_keys).route(delay, ExchangeTarget("sh.op", key, shop.type))
    topology = crowd() | users | needs_of(route)
    arrivals = travel(topology, route, HEADERS)

    if not direct:
        # As undelivered as a direct publish; here it waits in the release queue, for that target alone.
        (arrival,) = arrivals
        (queue,) = route.requires.queues
        assert (arrival.queue, arrival.fate) == (queue.name, "stuck")
        return
    assert Counter(arrival.queue for arrival in arrivals) == Counter(direct)
    for arrival in arrivals:
        assert arrival.fate == "arrived"
        assert arrival.at == rounded_up(delay)
        assert len(arrival.hops) == route.hops <= 7
        check_restored(topology, route, arrival, "sh.op", key)


@given(key=routing_keys.filter(bool), pattern=patterns)
def test_transport_keys_match_only_patterns_that_the_routing_key_matches(key: str, pattern: str) -> None:
    """The reason why the exchange is exact, without the rest: a pattern that matches ours has no literal word."""
    for ours in CLOCK.route(MAX_DELAY, ExchangeTarget("sh.op", key)).headers["CC"]:
        assert len(ours.split(".")) == len(key.split("."))
        if topic_matches(pattern, ours):
            assert set(pattern.split(".")) <= {"*", "#"}
            assert topic_matches(pattern, key)


@pytest.mark.parametrize("pattern", ["~.*", "~.#", "#.~.*"])
def test_a_pattern_with_the_padding_word_matches_transport_keys(pattern: str) -> None:
    """The one exception, which the description of ``padding_of`` names."""
    users = Topology([Exchange("shop", "topic")], bindings=[Binding("shop", "spy", pattern), Binding("shop", "u", "#")])
    route = CLOCK.route(SECOND, ExchangeTarget("shop", "a.b"))
    assert {one.queue for one in travel(crowd() | users | needs_of(route), route)} == {"u", "spy"}


def test_with_an_empty_routing_key_a_one_word_pattern_matches_transport_keys() -> None:
    """It has no word at all, our keys have one: ``*`` matches them. Where the type is unknown, that is the price."""
    users = Topology([Exchange("shop", "topic")], bindings=[Binding("shop", "spy", "*"), Binding("shop", "u", "#")])
    route = CLOCK.route(SECOND, ExchangeTarget("shop", ""))
    assert {one.queue for one in travel(crowd() | users | needs_of(route), route)} == {"u", "spy"}


# -- what is missing


@given(delay=delays.filter(bool), target=st.sampled_from(OTHERS), carrier=carriers)
def test_without_its_binding_a_message_is_set_aside_with_its_target(
    delay: timedelta, target: Target, carrier: Carrier
) -> None:
    route = Clock(carrier=carrier).route(delay, target)
    (arrival,) = travel(CLOCK.topology(), route, HEADERS)
    assert (arrival.queue, arrival.fate) == (CLOCK.undeliverable, "arrived")
    assert arrival.at == route.delay
    assert arrival.headers["bide-to"] == str(target)


settings_of_clients = st.builds(
    lambda resolution, units, lanes, carrier: Clock(
        resolution=resolution, max_delay=min(units * resolution, timedelta(days=100)), lanes=lanes, carrier=carrier
    ),
    st.sampled_from([STEP, SECOND, timedelta(seconds=15), timedelta(minutes=1), timedelta(days=1)]),
    st.integers(1, 200),
    st.integers(1, 3),
    carriers,
)


@given(big=settings_of_clients, small=settings_of_clients, data=st.data(), message_id=st.text(max_size=8))
def test_messages_for_digits_missing_on_the_broker_are_set_aside_never_early(
    big: Clock, small: Clock, data: st.DataObject, message_id: str
) -> None:
    """A publisher with other settings than those of the layout on the broker, under one prefix."""
    target = data.draw(st.sampled_from(OTHERS))
    delay = data.draw(st.timedeltas(timedelta(microseconds=1), big.max_delay))
    route = big.route(delay, target, message_id=message_id)
    behind = Topology(
        [Exchange("other", "fanout"), Exchange("x", "fanout")], bindings=[Binding("other", "u"), Binding("x", "u")]
    )
    topology = reduce(or_, [small.topology(), behind, *(small.route(small.resolution, one).requires for one in OTHERS)])
    (arrival,) = travel(topology | route.requires, route)
    expected = target.queue if isinstance(target, QueueTarget) else "u"
    assert arrival.queue in (expected, small.undeliverable)
    if arrival.queue == expected:
        assert arrival.at == route.delay == rounded_up(delay, big.resolution)
    if set(big.topology().queues) <= set(small.topology().queues):
        assert arrival.queue == expected
    (arrival,) = travel(topology | big.topology() | route.requires | big.digit_topology(route.digits), route)
    assert (arrival.queue, arrival.at) == (expected, route.delay)
    grown = topology | big.core_topology() | big.digit_topology(route.digits) | route.requires
    (arrival,) = travel(grown, route)
    assert (arrival.queue, arrival.at) == (expected, route.delay)


@given(delay=delays.filter(bool), target=st.sampled_from(OTHERS), data=st.data())
def test_a_digit_queue_that_was_deleted_sets_messages_aside_never_early(
    delay: timedelta, target: Target, data: st.DataObject
) -> None:
    route = CLOCK.route(delay, target)
    kept = list(route.digits)
    lost = data.draw(st.sampled_from([one for one in kept if one.value]))
    kept.remove(lost)
    behind = Topology(
        [Exchange("other", "fanout"), Exchange("x", "fanout")], bindings=[Binding("other", "u"), Binding("x", "u")]
    )
    topology = CLOCK.core_topology() | CLOCK.digit_topology(kept) | behind | route.requires
    (arrival,) = travel(topology, route)
    assert (arrival.queue, arrival.fate) == (CLOCK.undeliverable, "arrived")
    assert arrival.headers["bide-to"] == str(target)
