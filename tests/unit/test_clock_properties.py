"""``Clock`` in the model of the routing: any delay, any target, whatever else is bound."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from bide.delay.arrival import restore
from bide.delay.clock import Clock
from bide.delay.clock_keys import is_transport_key
from bide.delay.infrastructure import ExchangeTarget, QueueTarget
from bide.delay.units import MAX_DELAY
from bide.routing import Model
from bide.topology import Binding, Exchange, Queue, Topology

CLOCK = Clock()
STEP = timedelta(milliseconds=10)
PATTERNS = ("*", "#", "*.*", "*.#", "*.*.#", "#.word", "~#", "order.*", "#.created", "order.created", "*.*.*.*.*", "")
QUEUES = ("orders", "billing.orders", "ers", "~", "q:orders")

delays = st.one_of(
    st.timedeltas(min_value=timedelta(0), max_value=MAX_DELAY),
    st.integers(0, 320_000).map(lambda steps: steps * STEP),
    st.sampled_from([timedelta(0), STEP, timedelta(seconds=1), timedelta(days=1), MAX_DELAY]),
)
words = st.sampled_from(["order", "created", "word", "a", "~", ""])
routing_keys = st.lists(words, min_size=1, max_size=12).map(".".join).filter(lambda key: not is_transport_key(key))
carriers = st.sampled_from(["CC", "BCC"])


def rounded_up(delay: timedelta) -> timedelta:
    return -(-delay // STEP) * STEP


@given(delay=delays, queue=st.sampled_from(QUEUES), carrier=carriers, isolated=st.booleans())
def test_a_queue_gets_the_message_after_the_delay_and_nobody_else_does(
    delay: timedelta, queue: str, carrier: Literal["CC", "BCC"], isolated: bool
) -> None:
    clock = Clock(carrier=carrier)
    target = QueueTarget(queue, isolated)
    route = clock.route(delay, target)
    others = [QueueTarget(other, flag) for other in QUEUES for flag in (False, True)]
    topology = CLOCK.topology() | Topology(queues=[Queue(name) for name in QUEUES]) | route.requires
    for other in others:
        topology |= clock.route(timedelta(seconds=1), other).requires
    (arrival,) = Model(topology).travel(route.exchange, route.routing_key, dict(route.headers))
    assert (arrival.queue, arrival.at) == (queue, rounded_up(delay))
    assert route.delay == arrival.at
    assert len(arrival.hops) == route.hops
    assert route.hops <= 6 + isolated
    restored = restore("whatever", arrival.routing_key, {"headers": arrival.headers or {"x": 1}})
    assert restored.routing_key == queue
    assert not set(restored.values["headers"]) - {"x", "x-death"}


@given(
    delay=st.timedeltas(min_value=STEP, max_value=timedelta(days=400)),
    key=routing_keys,
    carrier=carriers,
    kind=st.sampled_from(["topic", "direct", "fanout"]),
    patterns=st.lists(
        st.one_of(
            st.sampled_from(PATTERNS),
            st.lists(st.sampled_from(["*", "#", "order", "created", "a"]), min_size=1, max_size=5).map(".".join),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_an_exchange_routes_a_delayed_message_as_it_routes_a_direct_one(
    delay: timedelta, key: str, carrier: Literal["CC", "BCC"], kind: str, patterns: list[str]
) -> None:
    clock = Clock(carrier=carrier)
    # A pattern that names our own padding word asks for our keys.
    users = Topology(
        [Exchange("shop", kind)],
        [Queue(f"u{number}") for number in range(len(patterns))],
        [Binding("shop", f"u{number}", pattern) for number, pattern in enumerate(patterns)],
    )
    direct = Model(users).route("shop", key, {}).queues
    route = clock.route(delay, ExchangeTarget("shop", key))
    arrivals = Model(CLOCK.topology() | users | route.requires).travel(route.exchange, key, dict(route.headers))
    delivered = [arrival for arrival in arrivals if arrival.queue.startswith("u")]
    assert sorted(arrival.queue for arrival in delivered) == sorted(direct)
    assert all(arrival.at == rounded_up(delay) for arrival in delivered)


@given(
    delay=delays,
    max_delay=st.sampled_from([timedelta(seconds=5), timedelta(minutes=3), timedelta(days=2)]),
    resolution=st.sampled_from([STEP, timedelta(milliseconds=50), timedelta(seconds=1)]),
    lanes=st.integers(1, 3),
    message_id=st.text(max_size=8),
)
def test_what_a_smaller_layout_lacks_is_set_aside_never_early_never_lost(
    delay: timedelta, max_delay: timedelta, resolution: timedelta, lanes: int, message_id: str
) -> None:
    """A publisher with the full clock, and more lanes, on a broker that has less."""
    big = Clock(lanes=lanes)
    small = Clock(max_delay=max_delay, resolution=resolution)
    route = big.route(delay, QueueTarget("orders"), message_id=message_id)
    topology = small.topology() | Topology(queues=[Queue("orders")]) | route.requires
    (arrival,) = Model(topology).travel(route.exchange, route.routing_key, dict(route.headers))
    assert arrival.queue in ("orders", small.undeliverable)
    if arrival.queue == "orders":
        assert arrival.at == rounded_up(delay)
