"""The waiting hall in the routing model, and the relay's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.delay.explain import explain, mermaid, rows
from bide.delay.forwarding import LONGEST_PAUSE
from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, QueueTarget, Target
from bide.delay.received import restore
from bide.delay.waiting_hall import MAX_DELAY, WaitingHall
from bide.errors import DelayQueueError, InvalidDelayError, InvalidInputError, InvalidNameError, UnsupportedTargetError
from bide.relay.decision import RelayDecision, RelayedMessage
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Model
from bide.topology.validation import validate

SECOND = timedelta(seconds=1)
MILLISECOND = timedelta(milliseconds=1)
START = 1_800_000_000_000
FOUR = WaitingHall(levels=4)

OTHERS = Topology(
    [Exchange("shop", "topic")],
    [Queue.quorum("orders"), Queue.quorum("created"), Queue.quorum("picked-up")],
    [Binding("shop", "created", "order.#")],
)


@cache
def model(hall: WaitingHall) -> Model:
    picked_up = Topology(bindings=[Binding(hall.delivery_exchange, "picked-up", "#")])
    return Model(hall.topology() | OTHERS | picked_up)


@dataclass(slots=True)
class Walk:
    """One message on its way, on a clock of its own.

    Attributes:
        lag: how long the relay lets each message wait, in milliseconds.
    """

    hall: WaitingHall
    lag: int = 0
    now: int = START
    sent: list[RelayDecision] = field(default_factory=list)
    queue: str = ""
    routing_key: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def publish(self, exchange: str, routing_key: str, values: dict[str, Any]) -> None:
        """What the broker does until the message is in a queue that holds it."""
        (copy,) = model(self.hall).travel(exchange, routing_key, values.get("headers"))
        assert copy.fate == "arrived"
        self.now += copy.at // MILLISECOND
        self.queue, self.routing_key = copy.queue, copy.routing_key
        # The broker notes where it was, and the relay must not hand that on.
        self.values = {**values, "headers": {**copy.headers, "x-death": [{"queue": hop} for hop in copy.hops]}}

    def to_the_end(self) -> None:
        """What the relay does until the message is with its target."""
        while self.queue in self.hall.relay_queues:
            self.now += self.lag
            relayed = RelayedMessage.read(self.hall, self.routing_key, self.values, now=self.now)
            decision = relayed.deliver() if self.queue == self.hall.distributing_queue else relayed.forward(self.now)
            assert "x-death" not in decision.values["headers"]
            self.sent.append(decision)
            self.publish(decision.exchange, decision.routing_key, dict(decision.values))


def send(hall: WaitingHall, delay: timedelta, target: Target, *, lag: int = 0) -> Walk:
    """As the client does."""
    route = hall.route(delay, target)
    due = START + -(-delay // MILLISECOND)
    walk = Walk(hall, lag)
    walk.publish(route.exchange, route.routing_key, {"headers": {**route.headers, "bide-due": due}})
    walk.to_the_end()
    return walk


def test_a_delay_of_27_seconds_takes_two_rounds_and_one_pass_of_the_levels() -> None:
    walk = send(FOUR, 27 * SECOND, ExchangeTarget("shop", "order.created"))
    assert [(one.step, one.exchange, one.routing_key, one.rest) for one in walk.sent] == [
        ("round", "bide.hall.v1.meditating-03", "order.created", 19_000),
        ("round", "bide.hall.v1.meditating-03", "order.created", 11_000),
        ("levels", "bide.hall.v1.level-03", "1.0.1.1", 11_000),
        ("target", "shop", "order.created", 0),
    ]
    assert (walk.queue, walk.routing_key, walk.now - START) == ("created", "order.created", 27_000)


@pytest.mark.parametrize(
    ("seconds", "rounds", "digits"),
    [(1, 0, "1"), (8, 0, "1.0.0.0"), (15, 0, "1.1.1.1"), (16, 1, "1.0.0.0"), (23, 1, "1.1.1.1"), (24, 2, "1.0.0.0")],
)
def test_a_message_takes_rounds_while_the_rest_exceeds_all_levels(seconds: int, rounds: int, digits: str) -> None:
    walk = send(FOUR, seconds * SECOND, QueueTarget("orders"))
    assert [one.step for one in walk.sent] == ["round"] * rounds + ["levels", "target"]
    assert walk.sent[rounds].routing_key == digits
    assert FOUR.route(seconds * SECOND, QueueTarget("orders")).hops == 2 * rounds + 2 + digits.count("1")


def test_more_levels_accept_the_keys_of_fewer_levels() -> None:
    """A publisher, or a relay, with other levels than the broker does no harm."""
    more = WaitingHall(levels=9)
    for units in range(1, 16):
        (copy,) = model(more).travel(FOUR.entry_exchange(units), FOUR.key(units))
        assert (copy.queue, copy.at) == (more.distributing_queue, units * SECOND)


halls = st.builds(
    WaitingHall,
    levels=st.integers(1, 12),
    resolution=st.sampled_from([10, 250, 999, 1000, 60_000]).map(lambda number: number * MILLISECOND),
)
targets = st.sampled_from(
    [QueueTarget("orders"), QueueTarget("orders", isolated=True), ExchangeTarget("shop", "order")]
)


@given(hall=halls, share=st.floats(0, 1), microseconds=st.integers(0, 10**6), target=targets, lag=st.integers(0, 5000))
@example(hall=FOUR, share=1.0, microseconds=0, target=QueueTarget("orders"), lag=0)
def test_a_delay_is_never_early_and_rounded_up_by_less_than_the_resolution(
    hall: WaitingHall, share: float, microseconds: int, target: Target, lag: int
) -> None:
    delay = hall.span * 3 * share + timedelta(microseconds=microseconds)
    walk = send(hall, delay, target, lag=lag)
    waited = (walk.now - START) * MILLISECOND
    assert walk.queue == ("orders" if isinstance(target, QueueTarget) else "created")
    assert waited >= delay
    # A relay that is late makes up for it at the next turn; what is left is the last look at the clock, the way from
    # there through the levels, and the last turn.
    assert waited < delay + hall.resolution + MILLISECOND + 2 * lag * MILLISECOND
    assert hall.route(delay, target).delay - delay < hall.resolution


@given(hall=halls, units=st.integers(1, 10**5))
def test_explained_steps_equal_the_modelled_path(hall: WaitingHall, units: int) -> None:
    delay = units * hall.resolution
    if hall.rounds(units) > 200:
        delay = hall.span * 2
    steps = hall.steps(delay, ExchangeTarget("shop", "order.created"))
    assert sum((step.delay for step in steps), timedelta(0)) == delay
    assert steps[0].exchange == hall.check_in
    assert steps[-1].exchange == "shop"
    walk = send(hall, delay, ExchangeTarget("shop", "order.created"))
    if hall.rounds(units) <= 4:
        assert [step.routed_to for step in steps if step.exchange == "(relay)"] == [one.exchange for one in walk.sent]


def test_the_table_shows_every_round() -> None:
    text = explain(FOUR, 27 * SECOND, QueueTarget("orders"))
    for words in ("27 s", "19 s", "11 s", "> 15 s: round 1", "> 15 s: round 2", "1.0.1.1"):
        assert words in text
    assert "round 3" not in text
    assert "| 30 times" in explain(FOUR, 270 * SECOND, QueueTarget("orders"))
    assert len(rows(FOUR, MAX_DELAY, QueueTarget("orders"))) < 25
    chart = mermaid(FOUR, 27 * SECOND, QueueTarget("orders"))
    relay = next(line.split("(")[0].strip() for line in chart.splitlines() if '("(relay)")' in line)
    assert sum(f"==> {relay}" in line for line in chart.splitlines()) == 2  # from both of its queues
    assert "Delay of 27 seconds" in chart


def test_it_satisfies_the_protocol() -> None:
    hall: DelayInfrastructure = WaitingHall()
    topology = hall.topology()
    validate(topology)
    assert len(topology.queues) == 20 + 4
    assert {one.name for one in hall.probes().queues} == {"bide.hall.v1.level-19", "bide.hall.v1.meditating-19"}
    assert all(
        hall.owns(name) for name in [*(one.name for one in topology.exchanges), *(one.name for one in topology.queues)]
    )
    assert not hall.owns("bide.v1.delivery")
    for queue in topology.queues:
        assert queue.durable
        assert queue.type == "quorum"
        assert queue.arguments["x-overflow"] == "reject-publish"
        assert queue.name == hall.undeliverable or queue.arguments["x-dead-letter-strategy"] == "at-least-once"


def test_names_hold_resolution_and_level() -> None:
    quick = WaitingHall(prefix="shop", resolution="250ms")
    assert quick == WaitingHall(prefix="shop", resolution=timedelta(milliseconds=250))
    assert quick.check_in == "shop.hall-250ms.v1.check-in"
    both = WaitingHall(levels=3).topology() | WaitingHall(levels=5).topology()
    assert both.queue("bide.hall.v1.meditating-02") != both.queue("bide.hall.v1.meditating-04")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"levels": 0}, InvalidInputError, "0 levels: give 1 to 28"),
        ({"levels": 29}, InvalidInputError, "29 levels"),
        ({"resolution": timedelta(microseconds=10_500)}, InvalidDelayError, "whole number of milliseconds"),
        ({"resolution": timedelta(milliseconds=9)}, InvalidDelayError, "at least 10"),
        ({"resolution": timedelta(days=1), "levels": 13}, InvalidDelayError, "longer delays wait in rounds"),
        ({"prefix": ""}, InvalidNameError, "prefix name is empty"),
        ({"prefix": "amq.x"}, InvalidNameError, "reserved by RabbitMQ"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        WaitingHall(**settings)


@pytest.mark.parametrize(
    ("delay", "target", "error"),
    [
        (-SECOND, QueueTarget("q"), InvalidDelayError),
        (MAX_DELAY + SECOND, QueueTarget("q"), InvalidDelayError),
        (SECOND, QueueTarget(""), InvalidNameError),
        (SECOND, ExchangeTarget("x", "k" * 256), InvalidNameError),
        (SECOND, ExchangeTarget("", "q"), UnsupportedTargetError),
        (SECOND, ExchangeTarget(FOUR.check_in), UnsupportedTargetError),
        (SECOND, QueueTarget(FOUR.receiving_queue), UnsupportedTargetError),
        (SECOND, QueueTarget(FOUR.delivery_exchange), UnsupportedTargetError),
    ],
)
def test_invalid_delays_and_targets_are_refused(delay: timedelta, target: Target, error: type[Exception]) -> None:
    with pytest.raises(error):
        FOUR.route(delay, target)
    assert FOUR.route(SECOND, ExchangeTarget(FOUR.delivery_exchange, "k" * 255)).hops == 3


def test_a_relayed_message_is_restored_as_it_was_sent() -> None:
    sent: dict[str, Any] = {
        "expiration": "5000",
        "priority": 7,
        "user_id": "publisher",
        "message_id": "m",
        "headers": {"mine": {"deep": [1]}, "CC": ["also"], "x-delay": "2500.5", "x-death": [{"count": 1}]},
    }
    relayed = RelayedMessage.read(FOUR, "a.b", sent, now=START, user="publisher")
    inside = relayed.forward(START)
    assert not {"expiration", "priority"} & set(inside.values)
    assert not {"CC", "x-death", "x-delay"} & set(inside.values["headers"])
    assert (inside.exchange, inside.routing_key) == (FOUR.level_name(1), "1.1")
    out = RelayedMessage.read(FOUR, inside.routing_key, inside.values, now=START, user="publisher").deliver()
    assert (out.exchange, out.routing_key) == (FOUR.delivery_exchange, "a.b")
    assert {name: value for name, value in out.values.items() if name != "headers"} == {
        name: value for name, value in sent.items() if name != "headers"
    }
    assert out.values["headers"] == {
        "mine": {"deep": [1]},
        "CC": ["also"],
        "bide-due": START + 2501,
        "bide-to": f"x:{FOUR.delivery_exchange}",
    }
    arrival = restore(out.exchange, out.routing_key, out.values)
    assert (arrival.exchange, arrival.routing_key) == (FOUR.delivery_exchange, "a.b")
    # A message that leaves the levels for the undeliverable queue keeps its own key, too.
    assert restore("", inside.routing_key, inside.values).routing_key == "a.b"


@pytest.mark.parametrize("queue", ["bide.v1.h1", "celery_delayed_3", "nsb.v2.delay-level-03", "other.hall.v1.level-02"])
def test_no_message_is_delivered_to_a_delay_queue(queue: str) -> None:
    """It has no keys for a target: on the queue of a level, 32 such messages block those behind them."""
    for headers in ({"bide-to": f"q:{queue}"}, {"bide-to": "q:orders", "CC": [queue]}):
        with pytest.raises(DelayQueueError, match="has no target"):
            RelayedMessage.read(FOUR, "k", {"headers": headers}, now=START)


def test_a_foreign_user_id_becomes_a_header() -> None:
    out = RelayedMessage.read(FOUR, "k", {"user_id": "alice"}, now=START, user="relay").deliver()
    assert "user_id" not in out.values
    assert out.values["headers"]["bide-user-id"] == "alice"


@pytest.mark.parametrize(
    ("delay", "milliseconds"), [(1500, 1500), (0.5, 1), ("250", 250), ("1e3", 1000), (-5, 0), (0, 0)]
)
def test_x_delay_takes_precedence_over_a_due_time(delay: Any, milliseconds: int) -> None:
    """``x-delay`` wins over a due time, which may be a copy from a message that was delayed before."""
    values = {"headers": {"x-delay": delay, "bide-due": 5}}
    assert RelayedMessage.read(FOUR, "k", values, now=START).due == START + milliseconds


def test_x_delay_is_an_ordinary_header_on_a_message_delayed_by_bide() -> None:
    route = FOUR.route(60 * SECOND, QueueTarget("orders"))
    values = {"headers": {**route.headers, "bide-due": START + 60_000, "x-delay": 5}}
    relayed = RelayedMessage.read(FOUR, "orders", values, now=START)
    assert relayed.due == START + 60_000
    again = RelayedMessage.read(FOUR, "orders", relayed.forward(START).values, now=START + 50_000)
    assert again.due == START + 60_000
    assert again.deliver().values["headers"]["x-delay"] == 5


def test_a_message_without_a_delay_is_due_at_once() -> None:
    assert RelayedMessage.read(FOUR, "k", {}, now=START).forward(START).step == "target"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-delay": "soon"},
        {"x-delay": True},
        {"x-delay": float("nan")},
        {"x-delay": [1]},
        {"x-delay": 10**19},
        {"bide-due": "tomorrow"},
        {"bide-due": True},
        {"bide-due": START + 200 * 365 * 86_400_000},
        {"bide-to": "orders"},
        {"bide-to": "q:"},
        {"bide-to": 7},
        {"bide-to": "x:" + "n" * 256},
        {"bide-to": f"x:{FOUR.check_in}"},
        {"bide-to": f"q:{FOUR.delivery_exchange}"},
        {"bide-pick-up-key": 7},
    ],
)
def test_malformed_relay_headers_are_refused(headers: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        RelayedMessage.read(FOUR, "k", {"headers": headers}, now=START).forward(START)


def test_a_message_from_a_bound_exchange_goes_to_the_delivery_exchange_of_that_exchange() -> None:
    def read(headers: dict[str, Any], exchange: str) -> tuple[str, int]:
        found = RelayedMessage.read(FOUR, "order.created", {"headers": headers}, now=START, exchange=exchange)
        return str(found.target), found.due - START

    assert read({"x-delay": 5000}, "shop") == ("x:shop.delivery", 5000)
    assert read({"x-delay": 5000, "bide-to": "q:orders"}, "shop") == ("q:orders", 5000)
    pick_up = f"x:{FOUR.delivery_exchange}"
    assert read({"x-delay": 5000}, FOUR.check_in) == (pick_up, 5000)
    # Without the header it was not delayed in place of the plugin, and must not loop through the exchange.
    assert read({}, "shop") == (pick_up, 0)
    # A message in the middle of its rounds has its target.
    assert read({"x-delay": 5000, "bide-rest": 8000, "bide-due": START + 9, "bide-to": "q:orders"}, "shop")[0] == (
        "q:orders"
    )


@given(hall=halls)
def test_a_refusing_target_is_retried_with_growing_pauses(hall: WaitingHall) -> None:
    values: Any = {"headers": {"bide-to": "q:orders", "bide-due": START}}
    key, waits = "orders", []
    for _ in range(70):
        decision = RelayedMessage.read(hall, key, values, now=START).again()
        assert decision.step == "levels"
        waits.append(decision.rest * MILLISECOND)
        key, values = decision.routing_key, decision.values
    assert waits[0] == hall.resolution
    assert waits == sorted(waits)
    assert waits[-1] <= max(min(hall.span, LONGEST_PAUSE), hall.resolution)
    delivered = RelayedMessage.read(hall, key, values, now=START).deliver()
    assert (delivered.exchange, delivered.routing_key) == ("", "orders")
    assert set(delivered.values["headers"]) == {"bide-to", "bide-due"}


@pytest.mark.parametrize("name", ["bide.v1.schedule", "bide.v1.schedule.gates"])
def test_a_relay_refuses_messages_for_the_schedule_log(name: str) -> None:
    """The relay may write to it, and a message there could be a forged claim."""
    values: Any = {"headers": {"bide-to": f"x:{name}", "bide-due": START}}
    with pytest.raises(DelayQueueError, match="belongs to the schedule log"):
        RelayedMessage.read(FOUR, "0", values, now=START)
