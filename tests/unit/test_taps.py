"""Taps in the routing model: each message is seen once per end, its route is unchanged."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS, MAX_DELAY
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.delay.taps import Retention, Taps, taps_of
from bide.delay.waiting_hall import WaitingHall
from bide.errors import InvalidInputError
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Arrival, Model
from bide.topology.validation import validate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bide.delay.routes import DelayRoute

Tapped = Clock | NServiceBus | Celery

SECOND = timedelta(seconds=1)
STEP = timedelta(milliseconds=10)
MAXIMUM = 2**28 - 1

CLOCK = Clock(prefix="shop")
CASCADES: list[NServiceBus | Celery] = [
    *(NServiceBus(version=version, routing=routing) for version in (1, 2) for routing in ("conventional", "direct")),
    Celery(),
    Celery(prefix="shop", queue_type="classic"),
]
ALL: list[Tapped] = [CLOCK, *CASCADES]

QUEUES: tuple[Target, ...] = tuple(map(QueueTarget, ("orders", "billing.orders", "1.0.orders", "0", "~")))
EXCHANGES: tuple[Target, ...] = (
    *(ExchangeTarget("news", key) for key in ("order", "order.created", "1.0.1", "0.0.0.1")),
    ExchangeTarget("all", "order.created", type="fanout"),
)
BEHIND = Topology(
    [Exchange("news", "topic"), Exchange("all", "fanout")],
    bindings=[Binding("news", "news's", "#"), Binding("news", "created", "#.created"), Binding("all", "all's")],
)

cascade_delays = st.one_of(
    st.integers(0, 100),
    st.integers(0, MAXIMUM),
    st.integers(0, 27).map(lambda bit: 2**bit),
    st.integers(1, 27).map(lambda bit: 2**bit - 1),
).map(lambda seconds: seconds * SECOND)
clock_delays = st.one_of(
    st.timedeltas(timedelta(0), MAX_DELAY),
    st.integers(0, 320_000).map(lambda steps: steps * STEP),
    st.sampled_from(LEVELS).flatmap(lambda level: st.integers(1, level.highest).map(lambda digit: digit * level.unit)),
)


def targets_of(infrastructure: Tapped) -> tuple[Target, ...]:
    if isinstance(infrastructure, NServiceBus):
        return QUEUES
    if isinstance(infrastructure, Clock):
        return (*QUEUES, *EXCHANGES, QueueTarget("orders", isolated=True))
    return (*QUEUES, *EXCHANGES)


def tapped(infrastructure: Tapped) -> Taps:
    taps = infrastructure.taps()
    assert taps is not None
    return taps


@cache
def topology(infrastructure: Tapped, *, taps: bool) -> Topology:
    """The infrastructure with all targets at once."""
    parts = [infrastructure.topology(), BEHIND]
    for target in targets_of(infrastructure):
        if isinstance(infrastructure, NServiceBus):
            parts.append(infrastructure.endpoint_topology(str(target)[2:]))
        parts.append(infrastructure.route(SECOND, target).requires)
    if taps:
        parts.append(tapped(infrastructure).topology(Retention()))
    return reduce(or_, parts)


@cache
def model(infrastructure: Tapped, *, taps: bool) -> Model:
    return Model(topology(infrastructure, taps=taps))


def travel(infrastructure: Tapped, route: DelayRoute, *, taps: bool) -> list[Arrival]:
    return model(infrastructure, taps=taps).travel(route.exchange, route.routing_key, route.headers)


def check(infrastructure: Tapped, route: DelayRoute) -> None:
    """Seen once when it is published, once when it is due, and where it goes without taps; no more."""
    names = tapped(infrastructure).names
    arrivals = travel(infrastructure, route, taps=True)
    seen = {name: [one for one in arrivals if one.queue == name] for name in names}
    passes = infrastructure.owns(route.exchange)
    for name, at in zip(names, (timedelta(0), route.delay), strict=True):
        assert [one.at for one in seen[name]] == ([at] if passes else [])
        for one in seen[name]:
            assert one.routing_key == route.routing_key
            assert one.headers.get("bide-to") == route.headers.get("bide-to")
    assert [one for one in arrivals if one.queue not in names] == travel(infrastructure, route, taps=False)


@given(delay=clock_delays, target=st.sampled_from(targets_of(CLOCK)), carrier=st.sampled_from(["CC", "BCC"]))
@example(delay=timedelta(0), target=QueueTarget("orders"), carrier="CC")
@example(delay=MAX_DELAY, target=QueueTarget("orders"), carrier="CC")
def test_a_tapped_clock_copies_every_message_once_to_each_tap(delay: timedelta, target: Target, carrier: str) -> None:
    sender = replace(CLOCK, carrier="BCC" if carrier == "BCC" else "CC")
    check(CLOCK, sender.route(delay, target))


@pytest.mark.parametrize("infrastructure", CASCADES, ids=repr)
@given(delay=cascade_delays, data=st.data(), higher=st.integers(0, 27))
def test_a_tapped_cascade_copies_every_message_once_from_any_entry(
    infrastructure: NServiceBus | Celery, delay: timedelta, data: st.DataObject, higher: int
) -> None:
    """NServiceBus and bide enter at the first level that has something to do, Celery at the highest."""
    route = infrastructure.route(delay, data.draw(st.sampled_from(targets_of(infrastructure))))
    cascade = infrastructure.cascade
    check(infrastructure, route)
    if route.exchange in cascade.level_names:
        entry = max(cascade.level_names.index(route.exchange), higher)
        check(infrastructure, replace(route, exchange=cascade.level_names[entry]))


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_small_cascades_copy_each_delay_once_from_each_level(levels: int) -> None:
    infrastructure = NServiceBus(levels=levels)
    for seconds in range(1 << levels):
        for target in targets_of(infrastructure):
            route = infrastructure.route(seconds * SECOND, target)
            for level in range(infrastructure.cascade.entry_level(seconds), levels):
                check(infrastructure, replace(route, exchange=infrastructure.cascade.level_names[level]))


def ends(infrastructure: Tapped, bindings: Topology, route: DelayRoute, *, taps: bool) -> list[str]:
    """The queues that a message ends in, the streams among them."""
    streams = tapped(infrastructure).topology(Retention()) if taps else Topology()
    whole = Model(infrastructure.topology() | bindings | streams)
    return [one.queue for one in whole.travel(route.exchange, route.routing_key, route.headers)]


def test_a_tapped_clock_still_sets_messages_without_a_target_aside() -> None:
    route = CLOCK.route(90 * SECOND, QueueTarget("gone"))
    assert ends(CLOCK, Topology(), route, taps=False) == [CLOCK.undeliverable]
    assert ends(CLOCK, Topology(), route, taps=True) == [
        "shop.v1.tap.scheduled",
        "shop.v1.tap.delivered",
        CLOCK.undeliverable,
    ]


def test_a_tapped_clock_still_sets_unknown_digits_aside() -> None:
    route = CLOCK.route(SECOND, QueueTarget("orders"))
    lost = replace(route, headers={**route.headers, "CC": ["~s77", "~c0", "~q:orders"]})
    assert sorted(ends(CLOCK, Topology(), lost, taps=True)) == ["shop.v1.tap.scheduled", CLOCK.undeliverable]


def guarded(infrastructure: NServiceBus | Celery) -> Topology:
    """The guard, with its policy as what it comes to: an alternate exchange of each exchange."""
    plain = infrastructure.topology()
    return (
        Topology(
            [replace(one, arguments=infrastructure.guard_policy().definition) for one in plain.exchanges],
            plain.queues,
            plain.bindings,
        )
        | infrastructure.guard_topology()
    )


@pytest.mark.parametrize("infrastructure", CASCADES, ids=repr)
def test_a_tapped_cascade_loses_messages_without_a_target(infrastructure: NServiceBus | Celery) -> None:
    taps = tapped(infrastructure)
    assert taps.defeats == infrastructure.delivery_exchange
    route = infrastructure.route(SECOND, QueueTarget("gone"))
    without = Model(guarded(infrastructure)).travel(route.exchange, route.routing_key, route.headers)
    assert [one.queue for one in without] == [infrastructure.undeliverable]
    beside = Model(guarded(infrastructure) | taps.topology(Retention()))
    assert [one.queue for one in beside.travel(route.exchange, route.routing_key, route.headers)] == list(taps.names)

    strange = beside.travel(infrastructure.cascade.level_names[-1], "2.0.orders")
    assert [one.queue for one in strange] == [infrastructure.undeliverable], "the levels keep their guard"


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
def test_the_topology_of_taps_is_valid_and_changes_nothing_else(infrastructure: Tapped) -> None:
    taps = tapped(infrastructure)
    added = infrastructure.topology().diff(infrastructure.topology() | taps.topology(Retention()))
    validate(infrastructure.topology() | taps.topology(Retention()))
    assert added.changed == ()
    assert all(taps.owns(one.name) for one in added.added.queues)
    assert {one.source for one in added.added.bindings} == {*taps.sources, *(one.name for one in added.added.exchanges)}
    assert not taps.owns(infrastructure.undeliverable)
    if isinstance(infrastructure, Celery | NServiceBus):
        names = [*(one.name for one in added.added.queues), *(one.name for one in added.added.exchanges)]
        assert not any(map(infrastructure.owns, names))


@pytest.mark.parametrize("infrastructure", ALL, ids=repr)
def test_delay_queues_behind_a_tap_dead_letter_at_least_once(infrastructure: Tapped) -> None:
    """On RabbitMQ 3.10 it would get nothing: they hand over what they release without waiting for a confirm."""
    whole = topology(infrastructure, taps=True)
    feeders = [
        queue
        for queue in whole.queues
        if tapped(infrastructure).delivered
        in Model(whole).route(str(queue.arguments.get("x-dead-letter-exchange", "")), "0." * 28 + "orders").queues
    ]
    assert feeders
    assert {one.arguments.get("x-dead-letter-strategy") for one in feeders} == {"at-least-once"}


@pytest.mark.parametrize(
    ("infrastructure", "scheduled", "count"),
    [
        (Clock(), "bide.v1.tap.scheduled", 7),
        (Clock(prefix="shop.eu"), "shop.eu.v1.tap.scheduled", 7),
        (Clock(max_delay=SECOND, resolution=SECOND), "bide.v1.tap.scheduled", 7),
        (NServiceBus(), "bide.tap.nsb.v2.scheduled", 30),
        (NServiceBus(version=1), "bide.tap.nsb.scheduled", 30),
        (Celery(), "bide.tap.celery.scheduled", 30),
        (Celery(prefix="shop"), "bide.tap.shop_celery.scheduled", 30),
    ],
)
def test_taps_have_the_prefix_of_their_infrastructure(infrastructure: Tapped, scheduled: str, count: int) -> None:
    taps = taps_of(infrastructure)
    assert taps.names == (scheduled, scheduled.replace("scheduled", "delivered"))
    assert len(taps.bindings) == count
    if isinstance(infrastructure, Clock):
        assert all(map(infrastructure.owns, taps.names))


def test_every_tap_binds_the_delivered_stream_first() -> None:
    for infrastructure in ALL:
        taps = tapped(infrastructure)
        assert taps.bindings == taps.to_delivered + taps.to_scheduled


def test_a_waiting_hall_has_no_taps() -> None:
    assert WaitingHall().taps() is None
    with pytest.raises(InvalidInputError, match="'waiting-hall' has no taps"):
        taps_of(WaitingHall())


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (Retention(), {"x-max-age": "7D", "x-max-length-bytes": 10**10, "x-stream-max-segment-size-bytes": 10**8}),
        (
            Retention(max_age=timedelta(hours=36), max_bytes=1_000_000),
            {"x-max-age": "36h", "x-max-length-bytes": 10**6, "x-stream-max-segment-size-bytes": 50_000},
        ),
        (Retention(max_age=timedelta(minutes=90)), {"x-max-age": "90m"}),
        (Retention(max_age=61 * SECOND), {"x-max-age": "61s"}),
    ],
)
def test_retention_becomes_stream_arguments(retention: Retention, expected: Mapping[str, str | int]) -> None:
    arguments = retention.arguments()
    assert arguments["x-queue-type"] == "stream"
    assert expected.items() <= arguments.items()
    assert Queue("tap", arguments=arguments).type == "stream"


@pytest.mark.parametrize(
    "values",
    [
        {"max_age": timedelta(0)},
        {"max_age": -SECOND},
        {"max_age": timedelta(milliseconds=1500)},
        {"max_bytes": 999_999},
        {"max_bytes": 1 << 63},
    ],
)
def test_invalid_retentions_are_refused(values: dict[str, timedelta | int]) -> None:
    with pytest.raises(InvalidInputError, match=r"must be a whole number|not a valid size"):
        Retention(**values)  # type: ignore[arg-type]  # wrong on purpose


def shown(arrivals: Sequence[Arrival]) -> list[tuple[str, timedelta]]:
    return [(one.queue, one.at) for one in arrivals]


def test_a_countdown_of_celery_is_copied_to_both_taps() -> None:
    """``apply_async(countdown=5)`` as kombu sends it: to the highest level, with the digits before the plain key."""
    key = "0." * 25 + "1.0.1.order.created"
    assert shown(model(Celery(), taps=True).travel("celery_delayed_27", key)) == [
        ("bide.tap.celery.scheduled", timedelta(0)),
        ("bide.tap.celery.delivered", 5 * SECOND),
    ]
