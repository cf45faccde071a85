"""The due time and the target of waiting messages, computed at any moment of any wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.delay.cascade_keys import HEADER_DELAY
from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.nservicebus import NServiceBus, format_timestamp
from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, QueueTarget, Target
from bide.delay.waiting import WaitingMessage, waiting_message
from bide.delay.waiting_hall import HEADER_REST, WaitingHall
from bide.durations import from_milliseconds, to_milliseconds
from bide.errors import InvalidDelayError, InvalidInputError

SENT = datetime(2026, 7, 1, 12, 0, 0, 123_000, tzinfo=UTC)
SECOND = timedelta(seconds=1)
TICK = timedelta(milliseconds=10)
QUEUE = QueueTarget("orders")
TOPIC = ExchangeTarget("shop.events", "order.created")

CASCADES: list[NServiceBus | Celery] = [
    NServiceBus(),
    NServiceBus(version=1, routing="direct"),
    Celery(),
    Celery(prefix="eu", queue_type="classic"),
]
CLOCKS = [Clock(), Clock(prefix="eu.shop", lanes=4), Clock(hides_keys=True)]
HALLS = [WaitingHall(), WaitingHall(prefix="eu", levels=4, resolution=timedelta(milliseconds=250))]
ALL: list[DelayInfrastructure] = [*CASCADES, *CLOCKS, *HALLS]

TARGETS = st.sampled_from(
    [QUEUE, TOPIC, QueueTarget("eu.orders", isolated=True), ExchangeTarget("amq.direct", "a/b%~")]
)
DELAYS = st.integers(1, 2**28 - 1).map(lambda seconds: seconds * SECOND) | st.integers(1, 600).map(
    lambda seconds: seconds * SECOND
)
PLACES = st.tuples(st.floats(0, 1), st.floats(0, 1))
"""Which of the queues on the route, and how much of the wait in it is over."""


class Place:
    """A message on its way: where it is at a moment, with the headers that it has there."""

    def __init__(
        self, infrastructure: DelayInfrastructure, delay: timedelta, target: Target, where: tuple[float, float]
    ) -> None:
        route = infrastructure.route(delay, target, message_id="m")
        self.routing_key, self.headers = route.routing_key, dict(route.headers)
        self.released = SENT + route.delay
        steps = [one for one in infrastructure.steps(delay, target) if one.delay]
        if isinstance(infrastructure, Clock) and infrastructure.lanes > 1:
            lane = infrastructure.lane_of("m")
            queues = [f"{one.routed_to}/{lane}" if lane else one.routed_to for one in steps]
        else:
            queues = [one.routed_to for one in steps]
        number = min(int(where[0] * len(steps)), len(steps) - 1)
        step = steps[number]
        self.queue = queues[number]
        entered = SENT + sum((one.delay for one in steps[:number]), timedelta(0))
        self.now = entered + step.delay * where[1]
        if number:
            self.headers["x-death"] = [
                {"queue": queues[number - 1], "count": 1, "reason": "expired", "time": entered.replace(microsecond=0)}
            ]
        if isinstance(infrastructure, WaitingHall):
            if step.routed_to == infrastructure.meditating:
                self.headers[HEADER_REST] = (self.released - entered - infrastructure.round) // timedelta(
                    milliseconds=1
                )
            else:
                self.headers["bide-pick-up-key"], self.routing_key = self.routing_key, step.segment

    def found(self, infrastructure: DelayInfrastructure, **headers: Any) -> WaitingMessage:
        return waiting_message(
            infrastructure,
            self.queue,
            routing_key=self.routing_key,
            headers={**self.headers, **headers},
            now=self.now,
        )


@pytest.mark.parametrize("infrastructure", ALL, ids=str)
@given(delay=DELAYS, target=TARGETS, where=PLACES)
def test_bounds_without_a_due_time_contain_the_end_of_the_wait(
    infrastructure: DelayInfrastructure, delay: timedelta, target: Target, where: tuple[float, float]
) -> None:
    place = Place(infrastructure, delay, target, where)
    found = place.found(infrastructure)
    assert found.target == target or infrastructure in CLOCKS + HALLS
    assert str(found.target) == str(target)
    if isinstance(infrastructure, WaitingHall) and "meditating" in place.queue:
        # The rest after the round is known, and the time of entering is not.
        assert found.earliest <= place.released + infrastructure.resolution
        assert place.released <= found.latest
        return
    assert found.earliest <= place.released <= found.latest


@pytest.mark.parametrize("infrastructure", ALL, ids=str)
@given(delay=DELAYS, where=PLACES, early=st.integers(0, 999))
def test_the_due_time_of_bide_is_exact(
    infrastructure: DelayInfrastructure, delay: timedelta, where: tuple[float, float], early: int
) -> None:
    """The delay was rounded up, so the due time is up to a second before the end of the wait."""
    place = Place(infrastructure, delay, QUEUE, where)
    due = max(place.released - timedelta(milliseconds=early), SENT + SECOND)
    found = place.found(infrastructure, **{"bide-due": to_milliseconds(due)})
    assert found == WaitingMessage(target=found.target, earliest=due, latest=due, source="bide-due")
    assert found.uncertainty == timedelta(0)


@given(delay=DELAYS, where=PLACES, early=st.integers(0, 999_999))
def test_deliver_at_is_exact_and_time_sent_does_not_matter(
    delay: timedelta, where: tuple[float, float], early: int
) -> None:
    infrastructure = NServiceBus()
    place = Place(infrastructure, delay, QUEUE, where)
    due = place.released - timedelta(microseconds=early)
    sent = {"NServiceBus.TimeSent": format_timestamp(SENT - timedelta(days=3))}
    found = place.found(infrastructure, **{"NServiceBus.DeliverAt": format_timestamp(due)}, **sent)
    assert (found.earliest, found.latest, found.source) == (due, due, "NServiceBus.DeliverAt")


@given(delay=DELAYS, where=PLACES, ago=st.integers(0, 10**6), has_retried_at=st.booleans())
@example(delay=16 * SECOND, where=(0.0, 0.05), ago=0, has_retried_at=True)
@example(delay=30 * SECOND, where=(0.0, 0.5), ago=3600, has_retried_at=False)
def test_a_retry_that_still_has_the_first_due_time_is_not_early(
    delay: timedelta, where: tuple[float, float], ago: int, has_retried_at: bool
) -> None:
    """NServiceBus copies the headers of the failed message, so they have the due time of the first delivery.

    Where the time of the failure is missing too, a due time of the last two seconds could be that of this wait.
    """
    infrastructure = NServiceBus()
    place = Place(infrastructure, delay, QUEUE, where)
    if not has_retried_at:
        ago = max(ago, 3)
    first = SENT - ago * SECOND
    headers: dict[str, Any] = {
        "NServiceBus.DeliverAt": format_timestamp(first),
        "bide-due": to_milliseconds(first),
        "NServiceBus.TimeSent": format_timestamp(first - SECOND),
        HEADER_DELAY: delay // SECOND,
    }
    if has_retried_at:
        headers["NServiceBus.Retries.Timestamp"] = format_timestamp(SENT)
    found = place.found(infrastructure, **headers)
    assert found.earliest <= place.released <= found.latest
    if has_retried_at:
        assert found.uncertainty <= SECOND


@given(delay=DELAYS, where=PLACES, fraction=st.integers(0, 999_999))
def test_the_eta_of_a_task_is_its_due_time(delay: timedelta, where: tuple[float, float], fraction: int) -> None:
    """Celery truncates the delay, so the levels release a task up to a second before its eta."""
    place = Place(Celery(), delay, QUEUE, where)
    eta = place.released + timedelta(microseconds=fraction)
    found = place.found(Celery(), eta=eta.isoformat(), task="shop.send")
    assert (found.earliest, found.latest, found.source) == (eta, eta, "eta")
    # Celery writes UTC without an offset if it is configured so.
    assert place.found(Celery(), eta=eta.replace(tzinfo=None).isoformat(), task="shop.send").latest == eta
    # Another program's header of that name is not a due time.
    assert place.found(Celery(), eta="north").source != "eta"


@pytest.mark.parametrize("source", ALL, ids=str)
@pytest.mark.parametrize("target", ALL, ids=str)
@given(delay=st.integers(1, 10**6).map(lambda seconds: seconds * SECOND), where=PLACES, after=st.integers(0, 10**6))
def test_the_route_in_another_layout_is_never_early_and_late_by_the_bounds_at_most(
    source: DelayInfrastructure, target: DelayInfrastructure, delay: timedelta, where: tuple[float, float], after: int
) -> None:
    place = Place(source, delay, QUEUE, where)
    found = place.found(source)
    then = place.now + timedelta(milliseconds=after)
    route = found.route(target, then, message_id="m")
    due = max(place.released, then)
    assert then + route.delay >= due
    assert then + route.delay < due + found.uncertainty + target.resolution + (
        source.resolution if isinstance(source, WaitingHall) else timedelta(0)
    )


def test_the_last_death_narrows_the_bounds_to_a_second() -> None:
    place = Place(NServiceBus(), timedelta(days=20), QUEUE, (0.5, 0.9))
    found = place.found(NServiceBus())
    assert found.source == "x-death"
    assert found.uncertainty <= SECOND
    place.headers["x-death"][0]["count"] = 2  # a copy with the deaths of the original
    assert place.found(NServiceBus()).source == "queue"


def test_digits_that_the_broker_removed_are_counted_as_the_highest() -> None:
    """A BCC header is gone when a message is consumed."""
    clock = Clock(carrier="BCC")
    place = Place(clock, timedelta(hours=5, minutes=59, seconds=59, milliseconds=990), QUEUE, (0.0, 0.0))
    del place.headers["BCC"]
    found = place.found(clock)
    assert (found.earliest, found.latest) == (SENT, place.released)
    assert found.latest == SENT + timedelta(hours=6) - TICK


def test_a_message_before_the_relay_has_read_it_waits_from_now() -> None:
    hall = WaitingHall()
    found = waiting_message(hall, hall.receiving_queue, routing_key="a.b", headers={"x-delay": "1500"}, now=SENT)
    assert found.target == ExchangeTarget(hall.delivery_exchange, "a.b")
    assert found.latest == SENT + timedelta(milliseconds=1500)
    assert waiting_message(hall, hall.receiving_queue, routing_key="a.b", headers={}, now=SENT).latest == SENT


def test_an_address_of_celery_leads_to_the_delivery_exchange() -> None:
    """Workers bind what they please there."""
    celery = Celery()
    key = "0." * 26 + "1.0.order.created"
    found = waiting_message(celery, "celery_delayed_1", routing_key=key, headers={}, now=SENT)
    assert found.target == ExchangeTarget("celery_delayed_delivery", "0." * 28 + "order.created")


def test_an_address_of_nservicebus_wins_over_a_copied_header() -> None:
    """An endpoint that sends a message on copies its headers."""
    key = "0." * 26 + "1.0.Shipping"
    found = waiting_message(
        NServiceBus(), "nsb.v2.delay-level-01", routing_key=key, headers={"bide-to": "q:Sales"}, now=SENT
    )
    assert found.target == QueueTarget("Shipping")


KEY = "0." * 26 + "1.0."


@pytest.mark.parametrize(
    ("queue", "key", "headers", "says"),
    [
        ("nsb.v2.delay-level-01", "orders", {}, "does not start with the digits"),
        ("nsb.v2.delay-level-01", KEY, {}, "has no address"),
        ("nsb.v2.delay-level-02", KEY + "orders", {}, "its digit there is 0"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"bide-due": "soon"}, "'soon': it must be milliseconds"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"bide-due": True}, "True: it must be milliseconds"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"bide-due": 10**18}, "it must be milliseconds"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"NServiceBus.DeliverAt": "soon"}, "it must be a time"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"NServiceBus.DeliverAt": "2026-99-01 00:00:00:000000 Z"}, "a time"),
        ("nsb.v2.delay-level-01", KEY + "orders", {"eta": "soon", "task": "x"}, "ISO 8601"),
        ("nsb.v2.delay-delivery", KEY + "orders", {}, "not one of those in which messages"),
        ("orders", KEY + "orders", {}, "not one of those in which messages"),
        ("bide.v1.h5", "orders", {}, "name no target"),
        ("bide.v1.h5", "orders", {"bide-to": "somewhere"}, "neither a queue nor an exchange"),
        ("bide.v1.h25", "orders", {"bide-to": "q:a"}, "not one of those in which messages"),
        ("bide.hall.v1.level-01", "orders", {}, "is not the digits of a wait"),
        ("bide.hall.v1.level-01", "1.0", {"bide-pick-up-key": 7}, "it must be a routing key"),
        ("bide.hall.v1.meditating-19", "a", {}, "bide-rest is None"),
        ("bide.hall.v1.receiving", "a", {"x-delay": "soon"}, "x-delay is 'soon'"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_why(
    queue: str, key: str, headers: dict[str, Any], says: str
) -> None:
    infrastructure = Clock() if "v1.h" in queue else WaitingHall() if "hall" in queue else NServiceBus()
    with pytest.raises(InvalidInputError, match=says):
        waiting_message(infrastructure, queue, routing_key=key, headers=headers, now=SENT)


def test_a_delay_that_the_other_layout_cannot_hold_is_an_error() -> None:
    due = from_milliseconds(to_milliseconds(SENT + timedelta(days=4000)))
    assert due is not None
    found = WaitingMessage(target=QUEUE, earliest=due, latest=due, source="bide-due")
    with pytest.raises(InvalidDelayError):
        found.route(NServiceBus(), SENT)


@pytest.mark.parametrize("infrastructure", ALL, ids=str)
def test_messages_move_down_the_list_of_waiting_queues(infrastructure: DelayInfrastructure) -> None:
    """The relay's queues are at the ends of the list: messages come back from the rounds to the first of them."""
    names = [one.name for one in infrastructure.waiting_queues()]
    place = {name: number for number, name in enumerate(names)}
    for delay in (SECOND, timedelta(hours=1, minutes=2, seconds=3), timedelta(days=2999, seconds=7)):
        passed = [one.routed_to for one in infrastructure.steps(delay, QUEUE) if one.delay]
        numbers = [place[name] for name in passed]
        assert numbers == sorted(numbers)
