"""Quorum queues that are too busy to count, which the broker reports as empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import bide
from bide.error_queues import ErrorQueue
from bide.errors import NotEmptyError
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


async def stall(vhost: Vhost) -> None:
    """Let the queue do nothing for 3 s, as on a machine that is overloaded."""
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


async def test_a_busy_queue_with_messages_is_not_deleted(client: bide.Client, vhost: Vhost) -> None:
    await stall(vhost)
    with pytest.raises(NotEmptyError, match=r"3 messages wait in q \(3\)"):
        await client.destroy(QUEUE)
    assert await client.message_count("q") == 3
