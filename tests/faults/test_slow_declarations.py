"""A slow declaration, which does not delay the message that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import bide
from tests.broker.receiving import receive

if TYPE_CHECKING:
    from tests.faults.proxy import Proxy
    from tests.support import Vhost

STALL = 4.0
"""Seconds for which the broker does not answer."""

LATENESS = timedelta(seconds=STALL / 2)
"""Half of it: far more than a message is late by otherwise, on a busy machine as well."""


@pytest.fixture
async def client(vhost: Vhost, proxy: Proxy) -> AsyncIterator[bide.Client]:
    """One that has sent delayed messages to the queue before, but none through the digits of most due times."""
    async with bide.connect(proxy.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish(b"before", to="q", delay="10ms")
        await receive(client, "q", 1)
        yield client


def stall(proxy: Proxy) -> datetime:
    """Stop the broker's answers for a while; return a due time that leaves time enough after that."""
    proxy.stall()
    asyncio.get_running_loop().call_later(STALL, proxy.moving.set)
    return datetime.now(UTC) + timedelta(seconds=3 * STALL + 0.37)


async def test_a_slow_declaration_does_not_delay_a_due_time(vhost: Vhost, proxy: Proxy, client: bide.Client) -> None:
    due = stall(proxy)
    receipts = await asyncio.gather(*(client.publish(b"", to="q", deliver_at=due) for _ in range(3)))
    assert [receipt.attempts for receipt in receipts] == [1] * 3
    for message in await receive(client, "q", 3):
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < LATENESS


async def test_a_slow_declaration_does_not_delay_a_bulk_publish(
    vhost: Vhost, proxy: Proxy, client: bide.Client
) -> None:
    async def messages() -> AsyncIterator[bide.OutgoingMessage]:
        # The bulk opens its channel for the first, so that the second waits for its declaration alone.
        yield bide.OutgoingMessage(b"", to="q")
        await receive(client, "q", 1)
        yield bide.OutgoingMessage(b"", to="q", deliver_at=stall(proxy))

    assert [outcome.error async for outcome in client.publish_many(messages())] == [None, None]
    (message,) = await receive(client, "q", 1)
    assert message.lateness is not None
    assert timedelta(0) <= message.lateness < LATENESS


async def test_repeated_slow_declarations_do_not_prevent_a_publish(
    vhost: Vhost, proxy: Proxy, client: bide.Client
) -> None:
    proxy.lag = 0.15
    receipt = await client.publish(b"", to="q", deliver_at=datetime.now(UTC) + timedelta(seconds=2.37))
    assert receipt.attempts == 1
    proxy.lag = 0.0
    (message,) = await receive(client, "q", 1)
    assert message.lateness is not None
    assert message.lateness >= timedelta(0)
