"""Message types of NServiceBus: exchanges, routing keys and enclosed types of events."""

from __future__ import annotations

import pytest

import bide
from bide.delay.event_routing import ConventionalEvents, DirectEvents
from bide.errors import InvalidInputError
from bide.topology import Topology

EVENT = bide.MessageType("NServiceBus.IEvent", is_interface=True)
IORDER = bide.MessageType("Shop.IOrder", is_interface=True)
IRUSH = bide.MessageType("Shop.IRush", interfaces=[IORDER], is_interface=True)
ORDER = bide.MessageType("Shop.Order", interfaces=[EVENT, IORDER])
RUSH = bide.MessageType("Shop.Orders.Rush+Order", base=ORDER, interfaces=[IRUSH])


def links(topology: Topology) -> list[str]:
    return [f"{one.source} -> {one.destination} {one.destination_type} {one.routing_key}" for one in topology.bindings]


def test_conventional_publishers_bind_the_exchanges_of_all_types_above() -> None:
    topology = ConventionalEvents().publication(RUSH)
    names = ["Shop.Orders:Order", "Shop:Order", "System:Object", "NServiceBus:IEvent", "Shop:IOrder", "Shop:IRush"]
    assert [one.name for one in topology.exchanges] == names
    assert {(one.type, one.durable) for one in topology.exchanges} == {("fanout", True)}
    assert links(topology) == [
        "Shop.Orders:Order -> Shop:Order exchange ",
        "Shop:Order -> System:Object exchange ",
        "Shop.Orders:Order -> NServiceBus:IEvent exchange ",
        "Shop.Orders:Order -> Shop:IOrder exchange ",
        "Shop.Orders:Order -> Shop:IRush exchange ",
    ]
    assert ConventionalEvents().event_address(RUSH) == ("Shop.Orders:Order", "")


def test_conventional_subscribers_bind_the_exchange_of_their_queue() -> None:
    topology = ConventionalEvents().subscription(IRUSH, "Shipping")
    assert links(topology) == ["Shop:IRush -> Shop:IOrder exchange ", "Shop:IRush -> Shipping exchange "]
    for everything in (EVENT, bide.MessageType("System.Object")):
        assert links(ConventionalEvents().subscription(everything, "q")) == ["System:Object -> q exchange "]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (bide.MessageType("Paid"), "Paid"),
        (IORDER, "Shop-IOrder"),
        (IRUSH, "Shop-IOrder.Shop-IRush"),
        (ORDER, "Shop-IOrder.Shop-Order"),
        # The interface of the base class comes again.
        (RUSH, "Shop-IOrder.Shop-Order.Shop-IOrder.Shop-Orders-Rush+Order"),
        (bide.MessageType("A.Failed", base=bide.MessageType("System.Exception")), "A-Failed"),
    ],
)
def test_direct_routing_keys_start_with_the_types_above(kind: bide.MessageType, key: str) -> None:
    assert DirectEvents().event_address(kind) == ("amq.topic", key)
    assert links(DirectEvents().subscription(kind, "q")) == [f"amq.topic -> q queue {key}.#"]
    assert not len(DirectEvents().publication(kind))


def test_direct_subscribers_of_everything_bind_all_keys() -> None:
    assert links(DirectEvents().subscription(EVENT, "q")) == ["amq.topic -> q queue #"]


def test_enclosed_types_are_listed_derived_first_without_markers() -> None:
    assert RUSH.enclosed == "Shop.Orders.Rush+Order;Shop.Order;Shop.IOrder;Shop.IRush"
    assert bide.MessageType("Paid").enclosed == "Paid"


def test_names_without_a_namespace_have_an_exchange() -> None:
    assert ConventionalEvents().event_address(bide.MessageType("Paid")) == (":Paid", "")
    box = bide.MessageType("Shop.Box`1[[Shop.Order]]")
    assert ConventionalEvents().event_address(box) == ("Shop:Box`1", "")


def test_invalid_types_are_refused() -> None:
    for name in ("", " ", "Shop.Order, Shop.Messages", "A;B"):
        with pytest.raises(InvalidInputError, match="full name"):
            bide.MessageType(name)
    with pytest.raises(InvalidInputError, match="is_interface"):
        bide.MessageType("Shop.Order", interfaces=[bide.MessageType("Shop.IOrder")])
    with pytest.raises(InvalidInputError, match="base class"):
        bide.MessageType("Shop.IOrder", base=ORDER, is_interface=True)
    with pytest.raises(InvalidInputError, match="base class"):
        bide.MessageType("Shop.Order", base=IORDER)
