"""Targets that are unreachable for a moment, which do not count as missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import bide
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import receive

if TYPE_CHECKING:
    from tests.support import Vhost

SLOW, OTHERS = "slow", ["a", "b", "c"]


@asynccontextmanager
async def unreachable(vhost: Vhost, queue: str) -> AsyncIterator[None]:
    """Make the broker answer as it does while the node of a classic queue is down or stopping."""
    name = f'Name = rabbit_misc:r(<<"{vhost.name}">>, queue, <<"{queue}">>), '
    is_old = "non_existing =:= code:which(rabbit_db_queue)"

    async def change(old: str, new: str) -> None:
        text = f"{name} case {is_old} of true -> {old}; false -> {new} end."
        await asyncio.to_thread(vhost.broker.rabbitmqctl, "eval", text)

    def state(value: str) -> str:
        return f"rabbit_db_queue:update(Name, fun(Q) -> amqqueue:set_state(Q, {value}) end)"

    await change("mnesia:dirty_delete(rabbit_queue, Name)", state("stopped"))
    try:
        yield
    finally:
        await change(
            "[Q] = mnesia:dirty_read(rabbit_durable_queue, Name), mnesia:dirty_write(rabbit_queue, Q)", state("live")
        )


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    async with bide.connect(vhost.url, infrastructure=SMALL_CLOCK, timeout="5m") as client:
        await client.declare(bide.Topology(queues=[bide.Queue(SLOW), *map(bide.Queue.quorum, OTHERS)]))
        yield client


async def test_a_temporarily_unavailable_queue_is_not_reported_as_missing(vhost: Vhost, client: bide.Client) -> None:
    async with unreachable(vhost, SLOW):
        asking = asyncio.create_task(client.exists(SLOW))
        publishing = asyncio.create_task(client.publish(b"", to=SLOW, delay="50ms", isolated=True))
        await asyncio.sleep(1)  # longer than a reachable queue takes to answer
        assert not asking.done()
        assert not publishing.done()
    assert await asking
    await publishing
    await receive(client, SLOW, 1)
    assert not await client.exists("missing")


async def test_an_unavailable_target_does_not_delay_messages_to_others(vhost: Vhost, client: bide.Client) -> None:
    async with unreachable(vhost, SLOW):
        slow = asyncio.create_task(client.publish(b"", to=SLOW, delay="50ms", isolated=True))
        await asyncio.sleep(0.5)  # so that it is at work first
        await asyncio.gather(*(client.publish(b"", to=name, delay="50ms", isolated=True) for name in OTHERS))
        assert not slow.done()
    await slow
    for name in (SLOW, *OTHERS):
        await receive(client, name, 1)


async def test_an_unavailable_target_does_not_delay_a_bulk_publish(vhost: Vhost, client: bide.Client) -> None:
    outgoing = [
        bide.OutgoingMessage(str(number), to=name, delay="50ms", isolated=True)
        for number in range(100)
        for name in (OTHERS[0], SLOW, *OTHERS[1:])
    ]
    publishing = aiter(client.publish_many(outgoing))
    async with unreachable(vhost, SLOW):
        outcomes = [await anext(publishing) for _ in range(300)]
        assert {outcome.message.to for outcome in outcomes} == set(OTHERS)
    outcomes += [outcome async for outcome in publishing]
    assert [outcome.error for outcome in outcomes] == [None] * 400
    for name in (SLOW, *OTHERS):
        messages = await receive(client, name, 100)
        assert [int(message.body) for message in messages] == list(range(100)), name
