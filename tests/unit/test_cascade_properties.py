"""Properties of binary cascades in the routing model, and delivery between them."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.delay.cascade import Policy
from bide.delay.cascade_keys import original_key, queue_word
from bide.delay.celery import Celery
from bide.delay.cross_delivery import foreign_suffix_bindings
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import ExchangeTarget, QueueTarget, address_of
from bide.topology import Binding, Exchange, Topology
from bide.topology.routing import Arrival, Model
from tests.cascade_keys import split_key
from tests.topics import topic_matches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bide.delay.protocol import Target
    from bide.delay.routes import DelayRoute

Cascaded = NServiceBus | Celery

MAXIMUM = 2**28 - 1
SECOND = timedelta(seconds=1)

NSERVICEBUS = [
    NServiceBus(version=version, routing=routing) for version in (1, 2) for routing in ("conventional", "direct")
]
ALL: list[Cascaded] = [*NSERVICEBUS, Celery(), Celery(prefix="shop", queue_type="classic")]

ADDRESSES = (
    "orders",
    "billing.orders",
    "eu.billing.orders",
    "orders.billing",
    "rders",
    "0",
    "1",
    "0.1",
    "1.orders",
    "0.0.0.0.orders",
    ".orders",
    "orders.",
    "..",
    "*a.#b",
    "~q:orders",
    "~x:shop.orders",
    "注文.orders",
    "a" * 190,
)
"""Names that end in, begin with, or look like others, or like digits of the delay."""

PATTERNS = ("#", "*", "*.*.#", "#.created", "#.order.created", "order.created", "~#", "order.#", "*.*")

delays = st.one_of(
    st.integers(0, 100).map(lambda seconds: timedelta(seconds=seconds)),
    st.integers(0, MAXIMUM).map(lambda seconds: timedelta(seconds=seconds)),
    st.integers(0, 27).map(lambda bit: timedelta(seconds=2**bit)),
    st.integers(1, 27).map(lambda bit: timedelta(seconds=2**bit - 1)),
    st.integers(0, MAXIMUM * 1_000_000).map(lambda micros: timedelta(microseconds=micros)),
)

words = st.text(alphabet="ab01.~:%é#*", min_size=1, max_size=12)
addresses = words.filter(lambda text: not {"*", "#"}.intersection(text.split(".")))


def own_topology(infrastructure: Cascaded, target: Target) -> Topology:
    """What the receiver brings along: an endpoint's exchange, or an exchange with queues behind it."""
    if isinstance(target, QueueTarget):
        if isinstance(infrastructure, NServiceBus):
            return infrastructure.endpoint_topology(target.queue)
        return Topology()
    name = target.exchange
    patterns = {"fanout": ("#",), "direct": (target.routing_key,)}.get(target.type or "", ("#", *PATTERNS))
    return Topology(
        [Exchange(name, target.type or "topic")],
        bindings=[Binding(name, f"{name}|{pattern}", pattern) for pattern in patterns],
    )


def model_of(infrastructure: Cascaded, targets: Iterable[Target]) -> Model:
    parts = [infrastructure.topology()]
    for target in targets:
        parts += [own_topology(infrastructure, target), infrastructure.route(SECOND, target).requires]
    return Model(reduce(or_, parts))


def travel(model: Model, route: DelayRoute) -> list[Arrival]:
    return model.travel(route.exchange, route.routing_key, route.headers)


def targets_of(infrastructure: Cascaded) -> list[Target]:
    # With NServiceBus, an endpoint's queue and its exchange share a name.
    exchanges = ("shop", "eu.shop", *(("orders", "~q:orders") if isinstance(infrastructure, Celery) else ()))
    return [
        *(QueueTarget(name) for name in ADDRESSES),
        *(QueueTarget(name, isolated=True) for name in ADDRESSES),
        ExchangeTarget("news", "", type="fanout"),
        ExchangeTarget("Shop:OrderPlaced", type="fanout"),
        ExchangeTarget("plain", "orders", type="direct"),
        ExchangeTarget("plain", "order.created", type="direct"),
        ExchangeTarget("plain", "", type="direct"),
        *(
            ExchangeTarget(exchange, key)
            for exchange in exchanges
            for key in (
                "order",
                "order.created",
                "eu.order.created",
                "orders",
                "a.b.c.created",
                "*.#",
                "~x:shop.orders",
            )
        ),
    ]


@cache
def crowded(infrastructure: Cascaded) -> Model:
    """All targets at once, so that each message could go astray to every other."""
    return model_of(infrastructure, targets_of(infrastructure))


def check(infrastructure: Cascaded, model: Model, delay: timedelta, target: Target) -> None:
    route = infrastructure.route(delay, target)
    arrivals = travel(model, route)

    assert {one.fate for one in arrivals} == {"arrived"}
    queues = [one.queue for one in arrivals]
    assert len(queues) == len(set(queues)), "a queue got the message twice"
    if isinstance(target, QueueTarget):
        assert queues == [target.queue]
    else:
        published = Model(own_topology(infrastructure, target)).travel(target.exchange, target.routing_key)
        assert set(queues) >= {one.queue for one in published}, "a direct publish reaches more"
        assert all(queue.startswith(f"{target.exchange}|") for queue in queues)
        assert {one.routing_key for one in arrivals} == {target.routing_key}
    for one in arrivals:
        assert one.at == route.delay
        assert delay <= one.at < delay + SECOND
        assert one.at % SECOND == timedelta(0)
        assert len(one.hops) == route.hops
        assert one.headers == dict(route.headers)


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
@given(delay=delays, data=st.data())
@example(delay=timedelta(0), data=None)
@example(delay=MAXIMUM * SECOND, data=None)
def test_a_message_waits_for_its_delay_and_reaches_only_its_target(
    infrastructure: Cascaded, delay: timedelta, data: Any
) -> None:
    targets = targets_of(infrastructure)
    for target in targets if data is None else [data.draw(st.sampled_from(targets))]:
        check(infrastructure, crowded(infrastructure), delay, target)


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
@given(delay=delays, names=st.lists(addresses, min_size=1, max_size=6, unique=True))
def test_targets_with_arbitrary_names_get_only_their_own_messages(
    infrastructure: Cascaded, delay: timedelta, names: list[str]
) -> None:
    targets = [QueueTarget(name) for name in names]
    model = model_of(infrastructure, targets)
    for target in targets:
        check(infrastructure, model, delay, target)


@given(
    delay=st.integers(1, MAXIMUM).map(lambda seconds: seconds * SECOND),
    exchanges=st.lists(words, min_size=1, max_size=4, unique=True),
    keys=st.lists(words, min_size=1, max_size=4, unique=True),
)
def test_no_message_reaches_another_exchange_or_key(delay: timedelta, exchanges: list[str], keys: list[str]) -> None:
    targets = [ExchangeTarget(exchange, key) for exchange in exchanges for key in keys]
    for infrastructure in (Celery(), NServiceBus()):
        model = model_of(infrastructure, targets)
        for target in targets:
            check(infrastructure, model, delay, target)
            assert original_key(infrastructure.route(delay, target).routing_key) == target.routing_key


@given(delay=delays.filter(bool), key=words, patterns=st.lists(st.text(alphabet="ab.*#", max_size=8), max_size=5))
def test_a_topic_exchange_routes_by_the_original_key(delay: timedelta, key: str, patterns: list[str]) -> None:
    """A queue behind the exchange gets what a direct publish would have brought."""
    route = Celery().route(delay, ExchangeTarget("shop", key))
    bindings = [Binding("shop", f"{number}", pattern) for number, pattern in enumerate(patterns)]
    behind = Topology([Exchange("shop", "topic")], bindings=[Binding("shop", "all", "#"), *bindings])
    arrived = {one.queue for one in travel(Model(Celery().topology() | behind | route.requires), route)}
    expected = {one.destination for one in bindings if topic_matches(one.routing_key, key)}
    assert arrived == {"all", *expected}


@given(seconds=st.integers(0, MAXIMUM), address=st.text(max_size=60))
def test_split_key_returns_seconds_and_address(seconds: int, address: str) -> None:
    cascade = NServiceBus().cascade
    assert split_key(cascade.key(seconds, address)) == (seconds, address)


@given(seconds=st.integers(1, MAXIMUM), name=st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()))
def test_original_key_returns_the_queue_name(seconds: int, name: str) -> None:
    word = queue_word(name)
    assert "." not in word
    assert original_key(Celery().route(seconds * SECOND, QueueTarget(name)).routing_key) == name


@pytest.mark.parametrize("infrastructure", [*ALL, NServiceBus(levels=4), NServiceBus(levels=1)], ids=repr)
@given(data=st.data())
def test_explained_steps_equal_the_modelled_path(infrastructure: Cascaded, data: Any) -> None:
    top = infrastructure.max_delay // SECOND
    delay = data.draw(st.integers(0, top).map(lambda seconds: seconds * SECOND))
    target = data.draw(st.sampled_from(targets_of(infrastructure)))
    route, steps = infrastructure.route(delay, target), infrastructure.steps(delay, target)

    assert steps[0].exchange == (route.exchange or "(default)")
    assert sum((step.delay for step in steps), timedelta(0)) == route.delay == delay
    waits = tuple(step.routed_to for step in steps if step.dead_letter_to is not None)
    if infrastructure.max_delay == MAXIMUM * SECOND:
        assert {one.hops for one in travel(crowded(infrastructure), route)} == {waits}
    for step, following in pairwise(steps):
        assert following.exchange == (step.dead_letter_to or step.routed_to)
    through_release = isinstance(target, ExchangeTarget) or target.isolated
    delivery = next((step for step in steps if step.exchange == infrastructure.delivery_exchange), steps[-1])
    assert all(step.segment == route.routing_key for step in steps[: steps.index(delivery) + 1])
    assert steps[-1].segment == (address_of(target)[1] if through_release else route.routing_key)
    assert steps[-1].routed_to in (str(target)[2:], "its bindings")


def guarded(topology: Topology, policy: Policy) -> Topology:
    """The topology as it behaves once the policy is set: a policy counts as an argument does."""
    assert policy.apply_to == "exchanges"
    exchanges = [
        replace(one, arguments={**one.arguments, **policy.definition}) if re.search(policy.pattern, one.name) else one
        for one in topology.exchanges
    ]
    return Topology(exchanges, topology.queues, topology.bindings)


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
@given(seconds=st.integers(1, MAXIMUM))
def test_the_guard_takes_messages_without_a_bound_target(infrastructure: Cascaded, seconds: int) -> None:
    delay = seconds * SECOND
    others = [QueueTarget("orders"), QueueTarget("billing.orders")]
    bare = reduce(
        or_,
        [infrastructure.topology(), *(own_topology(infrastructure, one) for one in others)]
        + [infrastructure.route(delay, one).requires for one in others],
    )
    gone = infrastructure.route(delay, QueueTarget("gone"))
    (without,) = travel(Model(bare), gone)
    quorum = all(one.type == "quorum" for one in infrastructure.topology().queues)
    assert without.fate == ("stuck" if quorum else "lost")

    model = Model(guarded(bare, infrastructure.guard_policy()) | infrastructure.guard_topology())
    (arrival,) = travel(model, gone)
    assert (arrival.queue, arrival.fate) == (infrastructure.undeliverable, "arrived")
    assert arrival.at == delay
    assert split_key(arrival.routing_key)[0] == seconds
    assert arrival.headers["bide-to"] == "q:gone"
    for target in others:
        assert [one.queue for one in travel(model, infrastructure.route(delay, target))] == [target.queue]


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
def test_the_guard_pattern_matches_its_own_exchanges_only(infrastructure: Cascaded) -> None:
    policy = infrastructure.guard_policy()
    covered = {one.name for one in infrastructure.topology().exchanges if re.search(policy.pattern, one.name)}
    assert covered == {one.name for one in infrastructure.topology().exchanges}
    for other in ALL:
        if other.delivery_exchange != infrastructure.delivery_exchange:
            assert not [one for one in other.topology().exchanges if re.search(policy.pattern, one.name)]
    for foreign in ("orders", "x" + infrastructure.delivery_exchange, infrastructure.delivery_exchange + "x"):
        assert not re.search(policy.pattern, foreign)


@pytest.mark.parametrize("prefix", ["a.b", "a|b", "(a", "a b$", "注文", "a+*?[b]"])
def test_the_guard_s_pattern_takes_a_prefix_literally(prefix: str) -> None:
    infrastructure = Celery(prefix=prefix)
    assert re.search(infrastructure.guard_policy().pattern, infrastructure.delivery_exchange)
    assert not re.search(infrastructure.guard_policy().pattern, Celery(prefix="aXb").delivery_exchange)


def test_the_guard_does_not_cover_an_exchange_without_a_queue() -> None:
    """As the docstrings say; direct routing is not subject to it, and behind a release queue the others are not."""
    endpoint = Topology([Exchange("orders", "fanout")])
    route = NServiceBus().route(SECOND, QueueTarget("orders"))
    bare = NServiceBus().topology() | endpoint | route.requires
    topology = guarded(bare, NServiceBus().guard_policy()) | NServiceBus().guard_topology()
    (arrival,) = travel(Model(topology), route)
    assert arrival.fate == "stuck"

    plain = Topology([Exchange("tasks", "topic")], bindings=[Binding("tasks", "orders", "order.created")])
    route = Celery().route(SECOND, ExchangeTarget("tasks", "order.created"))
    bare = Celery().topology() | plain | route.requires
    route = Celery().route(SECOND, ExchangeTarget("tasks", "order.deleted"))
    bare |= route.requires
    (arrival,) = travel(Model(guarded(bare, Celery().guard_policy()) | Celery().guard_topology()), route)
    assert (arrival.queue, arrival.fate) == ("bide.release.celery:tasks~order/deleted", "stuck")


def suffix(address: str, destination: str | None = None) -> Binding:
    """A binding as NServiceBus makes it."""
    return Binding("nsb.v2.delay-delivery", destination or address, f"#.{address}", "exchange")


def exact(address: str) -> Binding:
    return NServiceBus().delivery_binding(address)


@pytest.mark.parametrize(
    ("bindings", "addresses", "expected"),
    [
        ([], [], []),
        ([suffix("orders"), suffix("billing")], [], []),
        ([suffix("orders"), suffix("billing.orders")], [], [("orders", ("billing.orders",))]),
        ([suffix("orders"), exact("billing.orders")], [], [("orders", ("billing.orders",))]),
        ([exact("orders"), suffix("billing.orders")], [], []),
        ([exact("orders"), exact("billing.orders")], ["eu.orders"], []),
        ([suffix("orders")], ["billing.orders"], [("orders", ("billing.orders",))]),
        ([suffix("orders")], ["borders", "orders.billing", "orders"], []),
        (
            [suffix("orders"), suffix("b.orders"), suffix("a.b.orders")],
            [],
            [("orders", ("a.b.orders", "b.orders")), ("b.orders", ("a.b.orders",))],
        ),
        ([suffix("orders"), exact("orders")], [], []),
        ([suffix("orders", "twin"), exact("orders")], [], []),
        ([suffix("orders", "twin")], ["orders"], []),
        ([suffix("*.orders", "spy"), exact("billing.orders")], [], [("spy", ("billing.orders",))]),
        ([Binding("nsb.v2.delay-delivery", "tap", "#"), exact("orders")], [], []),
    ],
)
def test_foreign_bindings_that_cross_deliver_are_found(
    bindings: list[Binding], addresses: list[str], expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    found = foreign_suffix_bindings(bindings, addresses)
    assert [(one.binding.destination, one.addresses) for one in found] == expected
    assert all(one.binding in bindings for one in found)


def test_a_cross_delivery_names_receiver_address_and_binding() -> None:
    (found,) = foreign_suffix_bindings([suffix("orders"), suffix("billing.orders")])
    assert str(found) == (
        "the exchange 'orders' also receives the delayed messages for 'billing.orders', by its binding '#.orders' on "
        "'nsb.v2.delay-delivery'"
    )


@given(names=st.lists(st.text(alphabet="ab.", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
def test_found_bindings_are_exactly_those_that_cross_deliver_in_the_model(names: list[str]) -> None:
    """Every endpoint bound as NServiceBus binds: what the finder says is what the routing model shows."""
    infrastructure = NServiceBus(routing="direct")
    bindings = [Binding(infrastructure.delivery_exchange, name, f"#.{name}") for name in names]
    model = Model(infrastructure.topology() | Topology(bindings=bindings))
    seen = {
        (taker, name)
        for name in names
        for one in travel(model, infrastructure.route(SECOND, QueueTarget(name)))
        if (taker := one.queue) != name
    }
    found = foreign_suffix_bindings(bindings)
    assert {(one.binding.destination, address) for one in found for address in one.addresses} == seen


@given(names=st.lists(addresses, min_size=1, max_size=6, unique=True))
def test_bindings_made_by_bide_never_cross_deliver(names: list[str]) -> None:
    bindings = [NServiceBus().delivery_binding(name) for name in names]
    assert foreign_suffix_bindings(bindings, names) == []
