"""The topology of an event bus, and checks of the TTL of its retry queue."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.errors import InvalidInputError, InvalidTopologyError
from bide.patterns.event_bus import EventBusQueue, event_bus
from bide.topology import Binding, Exchange, Queue
from bide.topology.rendering import mermaid
from bide.topology.routing import Model
from bide.topology.validation import problems, validate


def queue(topology: bide.Topology, name: str) -> Queue:
    return next(one for one in topology.queues if one.name == name)


def test_the_topology_has_the_names_and_arguments_of_the_pattern() -> None:
    topology = event_bus("shop", "orders", delay="5s", queue_type="classic")
    validate(topology)
    assert {one.name for one in topology.exchanges} == {"shop", "shop.retry"}
    assert queue(topology, "orders").arguments == {
        "x-dead-letter-exchange": "shop.retry",
        "x-dead-letter-routing-key": "orders.retry",
    }
    back = {"x-dead-letter-exchange": "shop", "x-dead-letter-routing-key": "orders"}
    assert queue(topology, "orders.retry").arguments == back
    assert queue(topology, "orders.delay").arguments == {**back, "x-message-ttl": 5000}
    assert set(topology.bindings) == {
        Binding("shop", "orders", "orders"),
        Binding("shop.retry", "orders.retry", "orders.retry"),
        Binding("shop", "orders.delay", "orders.delay"),
    }


def test_quorum_queues_dead_letter_at_least_once() -> None:
    topology = event_bus("shop", "orders", delay="5s")
    for name in ("orders", "orders.retry", "orders.delay"):
        arguments = queue(topology, name).arguments
        assert (arguments["x-dead-letter-strategy"], arguments["x-overflow"]) == ("at-least-once", "reject-publish")


def test_each_key_is_routed_to_its_queue() -> None:
    model = Model(event_bus("shop", "orders", "billing", delay="5s", keys=("order.*",)))
    assert model.route("shop", "orders").queues == {"orders"}
    assert model.route("shop", "order.created").queues == {"orders", "billing"}
    assert model.route("shop.retry", "orders.retry").queues == {"orders.retry"}
    assert model.route("shop", "orders.delay").queues == {"orders.delay"}
    (arrival,) = model.travel("shop", "orders.delay")
    assert (arrival.queue, arrival.hops, arrival.at.total_seconds()) == ("orders", ("orders.delay",), 5)


REASON = (
    "queue 'orders.retry': its x-message-ttl makes the broker retry messages of 'orders' forever, uncounted: "
    "remove the TTL, and let the consumer of 'orders.retry' send messages to 'orders.delay'"
)


def looping(topology: bide.Topology) -> bide.Topology:
    """With a TTL on the retry queue of orders."""
    return bide.Topology(
        topology.exchanges,
        (
            replace(one, arguments={**one.arguments, "x-message-ttl": 1000}) if one.name == "orders.retry" else one
            for one in topology.queues
        ),
        topology.bindings,
    )


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("keys", [(), ("order.*",), ("#",)])
def test_a_ttl_on_the_retry_queue_is_refused_with_the_reason(queue_type: str, keys: tuple[str, ...]) -> None:
    with pytest.raises(InvalidTopologyError) as caught:
        validate(looping(event_bus("shop", "orders", "billing", delay="5s", queue_type=queue_type, keys=keys)))
    assert REASON in caught.value.problems
    if "#" not in keys:
        assert caught.value.problems == [REASON]


def test_a_ttl_among_the_arguments_of_the_retry_queue_is_refused_too() -> None:
    with pytest.raises(InvalidTopologyError) as caught:
        event_bus("shop", "orders", delay="5s", retry_arguments={"x-message-ttl": 1000})
    assert caught.value.problems == [REASON]


def test_a_ttl_on_the_retry_queue_is_refused_under_any_names() -> None:
    """Classic queues with the pattern's arguments only, declared by another system under its own names."""
    back = {"x-dead-letter-exchange": "bus", "x-dead-letter-routing-key": "work"}
    topology = bide.Topology(
        [Exchange("bus", "topic"), Exchange("again", "topic")],
        [
            Queue("work", arguments={"x-dead-letter-exchange": "again", "x-dead-letter-routing-key": "failed"}),
            Queue("failed", arguments={**back, "x-message-ttl": 10}),
            Queue("later", arguments={**back, "x-message-ttl": 20}),
        ],
        [Binding("bus", "work", "work"), Binding("again", "failed", "failed"), Binding("bus", "later", "later")],
    )
    (problem,) = problems(topology)
    assert problem.startswith("queue 'failed': its x-message-ttl makes the broker retry messages of 'work' forever")


def to(key: str, exchange: str = "", **more: Any) -> dict[str, Any]:
    return {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": key, **more}


def ttl(milliseconds: int) -> dict[str, Any]:
    return {"x-message-ttl": milliseconds}


HARMLESS = {
    "one wait queue, and a consumer of the work queue that counts": bide.Topology(
        queues=[Queue("work", arguments=to("wait")), Queue("wait", arguments=to("work", **ttl(1000)))]
    ),
    "two wait queues that a consumer publishes to": bide.Topology(
        queues=[Queue("work"), *(Queue(f"wait-{one}", arguments=to("work", **ttl(one))) for one in (1000, 5000))]
    ),
    "a short wait by rejecting, a long one by publishing": bide.Topology(
        queues=[
            Queue("work", arguments=to("short")),
            Queue("short", arguments=to("work", **ttl(1000))),
            Queue("long", arguments=to("work", **ttl(60_000))),
        ]
    ),
    "the same on one exchange with a name": bide.Topology(
        [Exchange("app")],
        [
            Queue("work", arguments=to("short", "app")),
            Queue("short", arguments=to("work", "app", **ttl(1000))),
            Queue("long", arguments=to("work", "app", **ttl(60_000))),
        ],
        [Binding("app", one, one) for one in ("work", "short", "long")],
    ),
    "wait queues on an exchange of their own": bide.Topology(
        [Exchange("app", "topic"), Exchange("wait")],
        [
            Queue("work", arguments=to("short", "wait")),
            Queue("short", arguments=to("work", "app", **ttl(1000))),
            Queue("long", arguments=to("work", "app", **ttl(60_000))),
        ],
        [Binding("app", "work", "work"), Binding("wait", "short", "short"), Binding("wait", "long", "long")],
    ),
}


@pytest.mark.parametrize("topology", HARMLESS.values(), ids=HARMLESS)
def test_other_retry_topologies_have_no_problems(topology: bide.Topology) -> None:
    assert problems(topology) == []


def test_delay_infrastructures_have_no_problems() -> None:
    for layout in (bide.Clock(), bide.NServiceBus(), bide.Celery()):
        assert problems(layout.topology()) == []


def test_quorum_queues_have_a_delivery_limit_of_20() -> None:
    quorum, classic = (event_bus("shop", "orders", delay="5s", queue_type=one) for one in ("quorum", "classic"))
    assert queue(quorum, "orders").arguments["x-delivery-limit"] == 20
    assert "x-delivery-limit" not in queue(quorum, "orders.retry").arguments
    assert "x-delivery-limit" not in queue(classic, "orders").arguments


def test_more_arguments_of_the_retry_queue_are_merged_or_refused() -> None:
    topology = event_bus("shop", "orders", delay="5s", retry_arguments={"x-max-length": 1000})
    assert queue(topology, "orders.retry").arguments["x-max-length"] == 1000
    assert "x-max-length" not in queue(topology, "orders.delay").arguments
    for wrong in ({"x-dead-letter-exchange": "elsewhere"}, {"x-overflow": "drop-head"}, {"x-queue-type": "classic"}):
        with pytest.raises(InvalidInputError, match="leave it out"):
            event_bus("shop", "orders", delay="5s", retry_arguments=wrong)
    with pytest.raises(InvalidTopologyError, match="x-max-length"):
        event_bus("shop", "orders", delay="5s", retry_arguments={"x-max-length": "many"})


def test_the_delay_is_rounded_up_to_milliseconds() -> None:
    topology = event_bus("shop", "orders", delay=timedelta(microseconds=1001))
    assert queue(topology, "orders.delay").arguments["x-message-ttl"] == 2


def test_queue_names_that_collide_are_refused() -> None:
    with pytest.raises(InvalidTopologyError, match=r"'orders\.retry' is defined twice"):
        event_bus("shop", "orders", "orders.retry", delay="5s")


def test_the_picture_in_the_docs_shows_the_topology() -> None:
    page = (Path(__file__).parents[2] / "docs" / "event-bus.md").read_text()
    assert mermaid(event_bus("shop", "orders", delay="5s", keys=("order.*",))) in page


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"delay": "0s"}, "1 ms"),
        ({"delay": "4000d"}, "3650 d"),
        ({"delay": "5s", "type": "fanout"}, "fanout"),
        ({"delay": "5s", "queue_type": "stream"}, "stream"),
        ({"delay": "5s", "queue": "q" * 250}, "255"),
        ({"delay": "5s", "queue": ""}, "name"),
        ({"delay": "5s", "queue": "orders.#"}, "wildcards"),
        ({"delay": "5s", "queue": "*"}, "wildcards"),
        ({"delay": "5s", "keys": "order.*"}, "list"),
        ({"delay": "5s", "keys": ["k" * 256]}, "255"),
        ({"delay": "5s", "keys": ["#.#.#"]}, "RabbitMQ 4.3.5"),
        ({"delay": "5s", "exchange": "amq.topic"}, "reserved"),
        ({"delay": "5s", "exchange": ""}, "name"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        EventBusQueue(**{"exchange": "shop", "queue": "orders", **options})


def test_a_bus_without_queues_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no queue"):
        event_bus("shop", delay="5s")
