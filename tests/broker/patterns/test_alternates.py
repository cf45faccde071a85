"""Patterns 11 and 12: alternate exchanges."""

from __future__ import annotations

import bide
from bide.amqp.connection import Connection
from bide.patterns.alternates import if_else, not_routing
from bide.patterns.catalogue import find_pattern
from bide.topology import Binding
from tests.broker.patterns.queue_contents import bodies


async def test_if_else_routes_to_the_first_matching_branch(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("11").sample_topology())
    for client_id in ("acme", "globex", "hooli", "initech", ""):
        await client.publish(client_id, exchange="clients", routing_key=client_id)
    assert await bodies(connection, "acme", "partners", "everybody-else") == {
        "acme": ["acme"],
        "partners": ["globex", "initech"],
        "everybody-else": ["hooli", ""],
    }


async def test_the_first_of_two_matching_branches_is_taken(client: bide.Client, connection: Connection) -> None:
    await client.declare(if_else("x", branches={"a": ["*.de"], "b": ["shop.#"]}, otherwise="c", type="topic"))
    for key in ("shop.de", "shop.fr", "home.fr"):
        await client.publish(key, exchange="x", routing_key=key)
    assert await bodies(connection, "a", "b", "c") == {"a": ["shop.de"], "b": ["shop.fr"], "c": ["home.fr"]}


async def test_a_message_with_two_keys_takes_one_branch(client: bide.Client, connection: Connection) -> None:
    await client.declare(if_else("x", branches={"a": ["1"], "b": ["2"]}, otherwise="c"))
    await client.publish("both", exchange="x", routing_key="2", headers={"CC": ["1"]})
    assert await bodies(connection, "a", "b", "c") == {"a": ["both"], "b": [], "c": []}


async def test_a_branch_without_its_queue_falls_to_the_next(client: bide.Client, connection: Connection) -> None:
    await client.declare(if_else("x", branches={"a": ["1"]}, otherwise="c"))
    async with await connection.channel() as channel:
        await channel.delete_queue("a")
    await client.publish("1", exchange="x", routing_key="1")
    assert await bodies(connection, "c") == {"c": ["1"]}


async def test_not_routing_diverts_unwanted_keys(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("12").sample_topology())
    for channel in ("web", "mytravel.com", "agents"):
        await client.publish(channel, exchange="booking.new", routing_key=channel)
    assert await bodies(connection, "app2", "app2.waste") == {"app2": ["web", "agents"], "app2.waste": []}


async def test_not_routing_does_not_affect_other_queues(client: bide.Client, connection: Connection) -> None:
    topology = not_routing("in", queue="q", unwanted=["ad.#"], source_type="topic")
    await client.declare(topology | bide.Topology(queues=[bide.Queue("all")], bindings=[Binding("in", "all", "#")]))
    await client.publish("ad", exchange="in", routing_key="ad.shoes")
    assert await bodies(connection, "q", "all") == {"q": [], "all": ["ad"]}


async def test_one_unwanted_key_of_several_diverts_the_message(client: bide.Client, connection: Connection) -> None:
    await client.declare(not_routing("in", queue="q", unwanted=["ad"]))
    await client.publish("news and ad", exchange="in", routing_key="news", headers={"CC": ["ad"]})
    assert await bodies(connection, "q") == {"q": []}


async def test_without_the_waste_queue_unwanted_messages_arrive(client: bide.Client, connection: Connection) -> None:
    await client.declare(not_routing("in", queue="q", unwanted=["ad"]))
    async with await connection.channel() as channel:
        await channel.delete_queue("q.waste")
    await client.publish("ad", exchange="in", routing_key="ad")
    assert await bodies(connection, "q") == {"q": ["ad"]}
