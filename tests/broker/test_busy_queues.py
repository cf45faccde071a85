"""Quorum queues that are too busy to count, which the broker reports as empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import bide
from bide.error_queues import ErrorQueue
from bide.errors import NotEmptyError, QueueBusyError
from tests.faults.proxy import Proxy
from tests.support import Vhost

QUEUE = bide.Topology(queues=[bide.Queue.quorum("q")])


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    """A client, with a queue of three messages."""
    async with bide.connect(vhost.url) as client:
        await client.declare(QUEUE)
        for number in range(3):
            await client.publish(b"x", to="q", message_id=f"{number}")
        yield client


async def suspend(vhost: Vhost) -> None:
    """Let the queue do nothing, as on a machine that is overloaded."""
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:suspend('{vhost.name}_q').")


async def resume(vhost: Vhost) -> None:
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", f"sys:resume('{vhost.name}_q').")


async def stall(vhost: Vhost) -> None:
    """Let the queue do nothing for 3 s."""
    code = f"Queue = '{vhost.name}_q', sys:suspend(Queue), spawn(fun() -> timer:sleep(3000), sys:resume(Queue) end)."
    await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", code)


async def test_the_messages_of_a_busy_queue_are_counted(client: bide.Client, vhost: Vhost) -> None:
    await stall(vhost)
    assert await client.message_count("q") == 3


async def test_the_messages_of_a_busy_error_queue_are_all_seen(client: bide.Client, vhost: Vhost) -> None:
    """A thousand more than the number at the start are seen at most."""
    await client.publish_many(bide.OutgoingMessage(b"x", to="q") for _ in range(1_100))
    queue = ErrorQueue(client, "q", audit=False, management_url=vhost.broker.management_url)
    await stall(vhost)
    assert await queue.count() == 1_103


@pytest.mark.parametrize("others", [0, 5])
async def test_a_busy_queue_with_messages_is_not_deleted(client: bide.Client, vhost: Vhost, others: int) -> None:
    """Queues are counted together, so one that is busy makes all replies late."""
    topology = bide.Topology(queues=[bide.Queue.quorum(f"empty-{number}") for number in range(others)]) | QUEUE
    await client.declare(topology)
    await stall(vhost)
    with pytest.raises(NotEmptyError, match=r"3 messages wait in q \(3\)"):
        await client.destroy(topology)
    assert await client.message_count("q") == 3


async def test_a_queue_that_stays_busy_is_not_taken_for_an_empty_one(client: bide.Client, vhost: Vhost) -> None:
    await suspend(vhost)
    try:
        with pytest.raises(QueueBusyError, match=r"'q' is too busy to count.* within 250 ms, 20 times; try again when"):
            await client.message_count("q")
        with pytest.raises(QueueBusyError):
            await client.destroy(QUEUE)
    finally:
        await resume(vhost)
    assert await client.message_count("q") == 3


async def test_a_slow_connection_is_not_taken_for_a_busy_queue(vhost: Vhost) -> None:
    async with Proxy(vhost.url) as proxy, bide.connect(proxy.url) as client:
        await client.declare(QUEUE)
        proxy.lag = 0.4
        assert await client.message_count("q") == 0
        assert (await client.destroy(QUEUE)).queues == 1
