"""Delay queues that are declared while a node is down: docs/clusters.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import bide
from bide.local_broker import LocalCluster
from bide.local_broker.installation import numbers
from tests.broker.receiving import eventually
from tests.faults.cluster import cluster
from tests.support import Rabbitmq

_MENDED = (3, 12, 11)
"""The first release that starts such members as it starts others."""

_DELAY = bide.Queue(
    "delay",
    arguments={
        "x-queue-type": "quorum",
        "x-message-ttl": 100,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "orders",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    },
)


@pytest.fixture
def made(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    """A cluster. The time limit of the test does not count the wait for those of other workers."""
    with cluster(rabbitmq) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_messages_leave_a_delay_queue_after_another_start_of_a_node_that_was_down(made: LocalCluster) -> None:
    node, other, _ = made.nodes

    async def control(*arguments: str) -> str:
        return await asyncio.to_thread(other.rabbitmqctl, *arguments)

    async def leads() -> bool:
        move = f"(catch ra:transfer_leadership({{'%2F_delay', '{other.name}'}}, {{'%2F_delay', '{node.name}'}})), "
        # While an election is under way, there is none.
        leader = "case ra_leaderboard:lookup_leader('%2F_delay') of {_, Node} -> Node; None -> None end."
        return node.name in await control("eval", move + leader)

    async def has(*queue: str) -> bool:
        """Whether there is a queue with this name, number of messages, and number of ready messages."""
        listed = await control("list_queues", "--silent", "name", "messages", "messages_ready")
        return list(queue) in [line.split() for line in listed.splitlines()]

    async with bide.connect(other.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
        node.kill()
        await client.declare(bide.Topology(queues=[_DELAY]), external=["orders"])
        await asyncio.to_thread(node.restart)
        await eventually(leads, step=1)
        await client.publish(b"one", to="delay")
        if numbers(made.release) < _MENDED:
            await eventually(lambda: has("delay", "1", "0"), step=1)
            await asyncio.to_thread(node.restart)
        await eventually(lambda: has("orders", "1", "1"), step=1)
