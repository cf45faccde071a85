"""Patterns 4, 5 and 8: conventions of exchanges and queues."""

from __future__ import annotations

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import DeclarationMismatchError, TargetNotFoundError, UnroutableError
from bide.messaging.wire_tap import tap
from bide.patterns.catalogue import find_pattern
from bide.patterns.conventions import hierarchical_routing, message_line, point_to_point, private_consumer_exchanges
from bide.topology import Exchange, Topology
from tests.broker.patterns.queue_contents import bodies
from tests.support import Vhost


async def test_private_exchanges_filter_for_their_queue(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("4").sample_topology())
    await client.publish("new", exchange="booking.new", routing_key="mytravel.com")
    await client.publish("important", exchange="booking.new", routing_key="web", headers={"client.id": 1001})
    await client.publish("modified", exchange="booking.modified", routing_key="mytravel.com")
    assert await bodies(connection, "app1", "app2", "app3") == {
        "app1": ["new", "important"],
        "app2": ["important"],
        "app3": ["new", "modified"],
    }


async def test_publisher_and_consumer_can_declare_in_any_order(client: bide.Client, connection: Connection) -> None:
    for app in ("one", "two"):
        await client.declare(private_consumer_exchanges(messages=["m"], consumers={app: ["m"]}))
    await client.publish("hello", exchange="m")
    assert await bodies(connection, "one", "two") == {"one": ["hello"], "two": ["hello"]}


async def test_a_different_declaration_of_a_message_exchange_is_refused(client: bide.Client) -> None:
    await client.declare(Topology([Exchange("m", "topic")]))
    with pytest.raises(DeclarationMismatchError, match="the exchange 'm' exists with type"):
        await client.declare(private_consumer_exchanges(messages=["m"], consumers={"one": ["m"]}))


async def test_a_wire_tap_copies_messages_and_leaves_nothing_behind(
    client: bide.Client, connection: Connection, vhost: Vhost
) -> None:
    await client.declare(find_pattern("4").sample_topology())
    await client.publish("before", exchange="booking.new", routing_key="web")
    async with tap(client, "app3.private") as messages:
        # What app3 does not want passes its private exchange, too: the tap shows why nothing came.
        await client.publish("refused by app3", exchange="booking.new", routing_key="web")
        await client.publish("wanted by app3", exchange="booking.new", routing_key="mytravel.com")
        seen = [await anext(messages), await anext(messages)]
        assert [one.body.decode() for one in seen] == ["refused by app3", "wanted by app3"]
        # They were not acknowledged: the tap goes with them.
    await client.publish("after", exchange="booking.new", routing_key="web")
    assert await bodies(connection, "app3") == {"app3": ["wanted by app3"]}
    queues = {one["name"] for one in vhost.broker.management.call("GET", "queues", vhost.name)}
    assert queues == {"app1", "app2", "app3"}


async def test_a_tap_on_a_missing_exchange_is_refused(client: bide.Client) -> None:
    with pytest.raises(TargetNotFoundError, match="no exchange 'nowhere'"):
        async with tap(client, "nowhere"):
            pytest.fail("there is nothing to listen to")


async def test_a_point_to_point_message_reaches_only_its_queue(client: bide.Client, connection: Connection) -> None:
    await client.declare(point_to_point(queues=["charge-card", "send-ticket"]))
    await client.publish("command", to="charge-card")
    assert await bodies(connection, "charge-card", "send-ticket") == {"charge-card": ["command"], "send-ticket": []}


async def test_a_message_to_a_misspelt_queue_is_unroutable(client: bide.Client) -> None:
    await client.declare(point_to_point(queues=["charge-card"]))
    with pytest.raises(UnroutableError):
        await client.publish("command", to="charge-cart")
    # Queues without a subscription do not receive it.
    await client.publish("command", to="charge-cart", mandatory=False)


async def test_a_hierarchy_routes_to_every_level_above(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("8").sample_topology())
    await client.publish("alert", exchange="finance.fraud.alert")
    await client.publish("invoice", exchange="finance.invoicing.invoice-requested")
    assert await bodies(connection, "ledger", "investigators") == {
        "ledger": ["alert", "invoice"],
        "investigators": ["alert"],
    }


async def test_a_message_type_added_later_reaches_the_levels_above(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("8").sample_topology())
    await client.declare(message_line("finance.fraud.pattern-found"))
    await client.publish("pattern", exchange="finance.fraud.pattern-found")
    assert await bodies(connection, "ledger", "investigators") == {"ledger": ["pattern"], "investigators": ["pattern"]}


async def test_a_queue_on_two_levels_gets_one_copy_and_children_get_none(
    client: bide.Client, connection: Connection
) -> None:
    await client.declare(hierarchical_routing(messages=["a.b.c"], queues={"both": ["a", "a.b"], "child": ["a.b.c"]}))
    await client.publish("from below", exchange="a.b.c")
    await client.publish("from above", exchange="a")
    assert await bodies(connection, "both", "child") == {"both": ["from below", "from above"], "child": ["from below"]}
