"""Patterns 9 and 10: priorities and classes of service."""

from __future__ import annotations

import asyncio

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import PublishRefusedError
from bide.patterns.catalogue import find_pattern
from bide.patterns.service_classes import classes_of_service, priority_queue
from bide.topology import Queue, Topology
from tests.broker.patterns.queue_contents import bodies, take_all
from tests.broker.receiving import eventually, ready

BOTH_TYPES = pytest.mark.parametrize("queue_type", ["classic", "quorum"])


async def publish(client: bide.Client, *priorities: int, to: str = "q") -> None:
    for number, priority in enumerate(priorities, start=1):
        await client.publish(f"{priority} as no. {number}", to=to, priority=priority)


async def priorities(connection: Connection, queue: str = "q") -> list[int]:
    return [int(one.body.split()[0]) for one in await take_all(connection, queue)]


async def test_urgent_messages_overtake_others(client: bide.Client, connection: Connection) -> None:
    await client.declare(priority_queue("q"))
    await publish(client, 0, 0, 9, 5, 9, 200)
    assert await bodies(connection, "q") == {
        # More than the highest priority counts as the highest; equal ones keep their order.
        "q": ["200 as no. 6", "9 as no. 3", "9 as no. 5", "5 as no. 4", "0 as no. 1", "0 as no. 2"]
    }


@BOTH_TYPES
async def test_low_priority_messages_starve_beyond_their_ttl(
    client: bide.Client, connection: Connection, release: tuple[int, ...], queue_type: str
) -> None:
    (queue,) = priority_queue("q", queue_type=queue_type).queues
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    starving = Queue("q", arguments={**queue.arguments, **dead_letters})
    await client.declare(Topology(queues=[starving, Queue("dead")]))

    async def publish_low() -> None:
        await client.publish("low", to="q", priority=1, expiration="2s")

    async def dead() -> bool:
        return await ready(connection, "dead") == 1

    if queue_type == "quorum" and not (4, 0) <= release < (4, 3):
        # 3.x knows no priorities there, so "low" is the next in line; 4.3 looks at each priority.
        await publish_low()
        await client.publish("high", to="q", priority=9)
        await eventually(dead)
        assert await bodies(connection, "dead", "q") == {"dead": ["low"], "q": ["high"]}
        return
    await client.publish("high", to="q", priority=9)
    await publish_low()  # after "high": alone in the queue, it would expire
    await asyncio.sleep(3)  # longer than "low" may wait
    assert await bodies(connection, "dead") == {"dead": []}
    assert await ready(connection, "q") == 2
    # It expires when it is next in line, and not before.
    assert await bodies(connection, "q") == {"q": ["high"]}
    await eventually(dead)
    assert await bodies(connection, "dead") == {"dead": ["low"]}


@BOTH_TYPES
async def test_a_full_priority_queue_drops_urgent_messages_first(
    client: bide.Client, connection: Connection, release: tuple[int, ...], queue_type: str
) -> None:
    await client.declare(priority_queue("q", max_length=2, queue_type=queue_type))
    await publish(client, 9, 9, 1)
    assert await priorities(connection) == [9, 1]
    await publish(client, 1, 1, 9)
    if queue_type == "quorum" and release < (4, 0):
        # No priorities: the oldest goes.
        assert await priorities(connection) == [1, 9]
    else:
        # What is urgent is at the head as soon as it comes, and so makes room itself.
        assert await priorities(connection) == [1, 1]


async def test_a_full_priority_queue_can_refuse_messages(client: bide.Client, connection: Connection) -> None:
    await client.declare(priority_queue("q", max_length=2, overflow="reject-publish"))
    await publish(client, 9, 9)
    with pytest.raises(PublishRefusedError):
        await publish(client, 1)
    assert await priorities(connection) == [9, 9]


async def test_quorum_queues_order_messages_by_priority_from_4_0_on(
    client: bide.Client, connection: Connection, release: tuple[int, ...]
) -> None:
    await client.declare(priority_queue("q", queue_type="quorum"))
    await publish(client, 0, 4, 5, 9, 31, 0, 5)
    got = await priorities(connection)
    if release < (4, 0):
        assert got == [0, 4, 5, 9, 31, 0, 5]
    elif release < (4, 3):
        # Two classes; of the urgent one two for each of the others.
        assert got == [5, 9, 0, 31, 5, 4, 0]
    else:
        assert got == [31, 9, 5, 5, 4, 0, 0]


async def test_each_class_of_service_has_its_queue(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("10").sample_topology())
    for number in range(50):
        await client.publish(f"low {number}", exchange="orders", routing_key="eu.new.low")
    await client.publish("high", exchange="orders", routing_key="eu.new.high")
    await client.publish("unknown", exchange="orders", routing_key="eu.new.whatever")
    held = await bodies(connection, "orders.high", "orders.low")
    assert held["orders.high"] == ["high"]
    assert held["orders.low"] == [*(f"low {number}" for number in range(50)), "unknown"]


async def test_a_full_class_does_not_affect_another(client: bide.Client, connection: Connection) -> None:
    topology = classes_of_service("x", queue="q", levels=["high", "low"], queue_type="classic")
    full = [Queue(one.name, arguments={"x-max-length": 1}) for one in topology.queues]
    await client.declare(Topology(topology.exchanges, full, topology.bindings))
    for key in ("high", "low", "low"):
        await client.publish(key, exchange="x", routing_key=key)
    assert await bodies(connection, "q.high", "q.low") == {"q.high": ["high"], "q.low": ["low"]}
