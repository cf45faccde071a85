"""The topology of an event bus, and what is wrong with a TTL on its retry queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import bide
from bide.errors import InvalidInputError, InvalidTopologyError
from bide.patterns.event_bus import EventBusQueue, event_bus
from bide.routing import Model
from bide.topology import Binding, Exchange, Queue
from bide.validation import problems, validate


def queue(topology: bide.Topology, name: str) -> Queue:
    return next(one for one in topology.queues if one.name == name)


def test_its_names_and_arguments() -> None:
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


def test_quorum_queues_lose_nothing_on_their_way() -> None:
    topology = event_bus("shop", "orders", delay="5s")
    for name in ("orders", "orders.retry", "orders.delay"):
        arguments = queue(topology, name).arguments
        assert (arguments["x-dead-letter-strategy"], arguments["x-overflow"]) == ("at-least-once", "reject-publish")


def test_every_step_leads_where_it_should() -> None:
    model = Model(event_bus("shop", "orders", "billing", delay="5s", keys=("order.*",)))
    assert model.route("shop", "orders").queues == {"orders"}
    assert model.route("shop", "order.created").queues == {"orders", "billing"}
    assert model.route("shop.retry", "orders.retry").queues == {"orders.retry"}
    assert model.route("shop", "orders.delay").queues == {"orders.delay"}
    (arrival,) = model.travel("shop", "orders.delay")
    assert (arrival.queue, arrival.hops, arrival.at.total_seconds()) == ("orders", ("orders.delay",), 5)


def test_a_ttl_on_the_retry_queue_is_refused_with_the_reason() -> None:
    topology = event_bus("shop", "orders", delay="5s")
    looping = replace(
        topology,
        queues=tuple(
            replace(one, arguments={**one.arguments, "x-message-ttl": 1000}) if one.name == "orders.retry" else one
            for one in topology.queues
        ),
    )
    with pytest.raises(InvalidTopologyError) as caught:
        validate(looping)
    (problem,) = caught.value.problems
    assert problem == (
        "queue 'orders.retry': its x-message-ttl sends what 'orders' rejected back for ever, and nobody counts: "
        "take the TTL away, and let its consumer send messages over 'orders.delay'"
    )


def test_a_wait_queue_without_a_delay_queue_is_left_alone() -> None:
    """The other usual retry: one wait queue, and a consumer of the work queue that counts."""
    topology = bide.Topology(
        [Exchange("x", "direct")],
        [
            Queue("work", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "wait"}),
            Queue(
                "wait",
                arguments={
                    "x-dead-letter-exchange": "",
                    "x-dead-letter-routing-key": "work",
                    "x-message-ttl": 1000,
                },
            ),
        ],
    )
    assert problems(topology) == []


def test_two_delay_queues_are_left_alone() -> None:
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}
    waits = [Queue(f"wait-{ttl}", arguments={**back, "x-message-ttl": ttl}) for ttl in (1000, 5000)]
    assert problems(bide.Topology(queues=[Queue("work"), *waits])) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"delay": "0s"}, "1 ms"),
        ({"delay": "4000d"}, "3650 d"),
        ({"delay": "5s", "type": "fanout"}, "fanout"),
        ({"delay": "5s", "queue_type": "stream"}, "stream"),
        ({"delay": "5s", "queue": "q" * 250}, "255"),
        ({"delay": "5s", "queue": ""}, "name"),
        ({"delay": "5s", "exchange": ""}, "name"),
    ],
)
def test_bad_settings(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        EventBusQueue(**{"exchange": "shop", "queue": "orders", **options})


def test_a_bus_without_queues() -> None:
    with pytest.raises(InvalidInputError, match="no queue"):
        event_bus("shop", delay="5s")
