"""Settings of ``Clock``: prefixes, levels, lanes, and clients with different settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from bide.delay.clock import Clock
from bide.delay.clock_digits import MAX_DELAY
from bide.delay.clock_keys import carrier_for
from bide.delay.protocol import ExchangeTarget, QueueTarget
from bide.errors import InvalidDelayError, InvalidNameError, InvalidTopologyError
from bide.topology import Binding, Queue

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
STEP = timedelta(milliseconds=10)
ORDERS = QueueTarget("orders")
SMALL = Clock(max_delay=DAY, resolution=SECOND)


def keys_of(clock: Clock, delay: timedelta, *, message_id: str = "") -> list[str]:
    keys = clock.route(delay, ORDERS, message_id=message_id).headers["CC"]
    assert isinstance(keys, list)
    return keys


def digit_queues(clock: Clock) -> list[Queue]:
    return [one for one in clock.topology().queues if one.name != clock.undeliverable]


def test_the_prefix_starts_every_name() -> None:
    mine, yours = Clock(prefix="mine.v1"), Clock(prefix="mine")
    for clock in (mine, yours):
        names = {one.name for one in clock.topology().exchanges} | {one.name for one in clock.topology().queues}
        assert all(name.startswith(f"{clock.prefix}.v1.") for name in names)
        assert all(map(clock.owns, names))
    assert not {one.name for one in mine.topology().queues} & {one.name for one in yours.topology().queues}
    for foreign in ("orders", "bide", "bide.v1", "bide.v2.h5", "xbide.v1.h5"):
        assert not Clock().owns(foreign)


def test_one_day_in_seconds_needs_142_digit_queues() -> None:
    """The figure of the design: one day and whole seconds, 142 digit queues and the undeliverable one."""
    topology = SMALL.topology()
    assert len(topology.queues) == 143
    assert {queue.name for queue in digit_queues(SMALL)} == {
        "bide.v1.d1",
        *(f"bide.v1.h{digit}" for digit in range(1, 24)),
        *(f"bide.v1.m{digit}" for digit in range(1, 60)),
        *(f"bide.v1.s{digit}" for digit in range(1, 60)),
    }


def test_a_pruned_level_keeps_its_exchange_and_its_zero() -> None:
    topology = SMALL.topology()
    assert topology.exchanges == Clock().topology().exchanges
    for letter, following in zip("edhmsc", ("d", "h", "m", "s", "c", "released"), strict=True):
        assert Binding(f"bide.v1.{letter}", f"bide.v1.{following}", f"~{letter}0", "exchange") in topology.bindings
    assert keys_of(SMALL, SECOND) == ["~s1", "~c0", "~q:orders"]
    assert SMALL.route(timedelta(milliseconds=1), ORDERS).delay == SECOND
    assert SMALL.route(DAY, ORDERS).hops == 1
    with pytest.raises(InvalidDelayError, match=r"longer than this infrastructure can hold \(1 d\)"):
        SMALL.route(DAY + timedelta(microseconds=1), ORDERS)


def labelled(clock: Clock) -> str:
    return f"{clock.lanes} x {clock.resolution} to {clock.max_delay}"


CLIENTS = [
    Clock(),
    SMALL,
    Clock(lanes=3),
    Clock(lanes=2, max_delay=timedelta(minutes=5), resolution=timedelta(seconds=15)),
    Clock(resolution=timedelta(milliseconds=50), carrier="BCC"),
    Clock(resolution=DAY, max_delay=400 * DAY),
]


@pytest.mark.parametrize("one", CLIENTS, ids=labelled)
@pytest.mark.parametrize("other", CLIENTS, ids=labelled)
def test_clients_with_different_settings_declare_shared_parts_alike(one: Clock, other: Clock) -> None:
    """The layout is a fact of the broker: a union raises where two would declare the same thing differently."""
    both = one.topology() | other.topology()
    assert set(both.queues) == set(one.topology().queues) | set(other.topology().queues)
    assert both.exchanges == one.topology().exchanges == other.topology().exchanges
    for target in (ORDERS, QueueTarget("orders", isolated=True), ExchangeTarget("shop", "a.b")):
        assert one.route(one.resolution, target).requires == other.route(other.resolution, target).requires


@pytest.mark.parametrize("clock", CLIENTS, ids=labelled)
def test_the_probes_do_not_exist_on_a_clock_that_only_grew(clock: Clock) -> None:
    names = {one.name for one in clock.probes().exchanges}
    assert names == {"bide.v1.delivery", "bide.v1.complete"}
    assert not names <= {one.name for one in clock.topology().exchanges}


def test_each_lane_has_its_own_queues_and_keys() -> None:
    clock = Clock(lanes=3, max_delay=2 * SECOND, resolution=SECOND)
    assert [queue.name for queue in digit_queues(clock)] == [
        *("bide.v1.s1", "bide.v1.s1/1", "bide.v1.s1/2"),
        *("bide.v1.s2", "bide.v1.s2/1", "bide.v1.s2/2"),
    ]
    assert Binding("bide.v1.s", "bide.v1.s2/1", "~s2/1") in clock.topology().bindings
    assert Binding("bide.v1.s", "bide.v1.s2", "~s2") in clock.topology().bindings


def test_messages_are_spread_over_the_lanes_by_their_ids() -> None:
    clock = Clock(lanes=4)
    delay = timedelta(seconds=61)
    keys = [tuple(keys_of(clock, delay, message_id=f"id {number}")) for number in range(400)]
    assert keys == [tuple(keys_of(clock, delay, message_id=f"id {number}")) for number in range(400)]
    assert set(keys) == {(f"~m1{lane}", f"~s1{lane}", "~c0", "~q:orders") for lane in ("", "/1", "/2", "/3")}
    assert all(60 <= keys.count(one) <= 140 for one in set(keys))
    assert {tuple(keys_of(Clock(), delay, message_id=f"id {number}")) for number in range(9)} == {
        ("~m1", "~s1", "~c0", "~q:orders")
    }


# -- settings


@pytest.mark.parametrize(
    ("resolution", "longest"),
    [
        (STEP, MAX_DELAY),
        (timedelta(milliseconds=50), timedelta(days=3199, hours=23, minutes=59, seconds=59, milliseconds=950)),
        (SECOND, timedelta(days=3199, hours=23, minutes=59, seconds=59)),
        (timedelta(seconds=15), timedelta(days=3199, hours=23, minutes=59, seconds=45)),
        (timedelta(minutes=1), timedelta(days=3199, hours=23, minutes=59)),
        (timedelta(hours=12), timedelta(days=3199, hours=12)),
        (DAY, timedelta(days=3199)),
        (50 * DAY, timedelta(days=3150)),
    ],
)
def test_waits_are_multiples_of_the_resolution(resolution: timedelta, longest: timedelta) -> None:
    clock = Clock(resolution=resolution)
    assert clock.max_delay == longest
    assert clock.route(longest, ORDERS).delay == longest
    assert clock.route(timedelta(microseconds=1), ORDERS).delay == resolution
    waits = [timedelta(milliseconds=int(queue.arguments["x-message-ttl"])) for queue in digit_queues(clock)]
    assert all(not wait % resolution for wait in waits)
    assert min(waits) == resolution


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_delay": timedelta(0)}, "max_delay 0:00:00 must be from 0:00:00.01 to 3199 d 23:59:59.99"),
        ({"max_delay": -DAY}, "the delay -1 d is negative"),
        ({"max_delay": MAX_DELAY + STEP}, "max_delay 3200 d must be from"),
        ({"resolution": timedelta(0)}, "the resolution 0:00:00 must be a multiple of a unit"),
        ({"resolution": -SECOND}, "the delay -0:00:01 is negative"),
        ({"resolution": timedelta(milliseconds=5)}, "the resolution 0:00:00.005 must be"),
        ({"resolution": timedelta(milliseconds=15)}, "50 ms, 1 s or 15 s for example"),
        ({"resolution": timedelta(milliseconds=30)}, "that divides the next unit"),
        ({"resolution": timedelta(seconds=7)}, "that divides the next unit"),
        ({"resolution": timedelta(seconds=90)}, "that divides the next unit"),
        ({"resolution": 100 * DAY}, "that divides the next unit"),
        (
            {"resolution": timedelta(minutes=1), "max_delay": timedelta(seconds=90)},
            "max_delay 0:01:30 is not a multiple of the resolution 0:01:00: give 0:01:00 for example",
        ),
        (
            {"resolution": SECOND, "max_delay": STEP},
            "max_delay 0:00:00.01 is not a multiple of the resolution 0:00:01: give 0:00:01 for example",
        ),
    ],
)
def test_max_delay_and_resolution_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidDelayError) as caught:
        Clock(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("", "empty"), ("amq.x", "reserved by RabbitMQ"), ("p" * 101, "the limit is 100"), ("\ud800", "UTF-8")],
)
def test_invalid_prefixes_are_refused(prefix: str, message: str) -> None:
    with pytest.raises(InvalidNameError, match=message):
        Clock(prefix=prefix)


@pytest.mark.parametrize("lanes", [0, -1, 65, 2.5, True])
def test_lane_counts_out_of_range_are_refused(lanes: Any) -> None:
    with pytest.raises(InvalidTopologyError, match=f"{lanes} lanes: give 1 to 64"):
        Clock(lanes=lanes)


def test_keys_are_carried_by_bcc_from_4_0_on() -> None:
    releases = ((3, 10, 8), (3, 13, 7), (4, 0, 0), (4, 0, 5), (4, 3, 6), (5, 0, 0))
    assert [carrier_for(release) for release in releases] == ["CC", "CC", "BCC", "BCC", "BCC", "BCC"]


def test_durations_can_be_given_as_text() -> None:
    assert Clock(max_delay="2h", resolution="1s") == Clock(
        max_delay=timedelta(hours=2), resolution=timedelta(seconds=1)
    )
