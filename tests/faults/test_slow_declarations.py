"""A slow declaration, which does not delay the message that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
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
"""By how much a message may be later than one whose declarations are quick: half of it."""


@pytest.fixture
async def client(vhost: Vhost, proxy: Proxy) -> AsyncIterator[bide.Client]:
    """One that has sent delayed messages to the queue before, but none through the digits of most due times."""
    async with bide.connect(proxy.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("q")]))
        await client.publish(b"before", to="q", delay="10ms")
        await receive(client, "q", 1)
        yield client


class Prompt:
    """Messages with the same due times, of a client whose declarations are quick."""

    def __init__(self, client: bide.Client) -> None:
        self._client = client

    async def publish(self, due: datetime) -> None:
        await self._client.publish(b"", to="prompt", deliver_at=due)

    async def compare(self, receiving: Awaitable[list[bide.Message]]) -> None:
        """Check that messages are neither early nor much later than the one that was published."""
        messages, (prompt,) = await asyncio.gather(receiving, receive(self._client, "prompt", 1))
        assert prompt.lateness is not None
        for message in messages:
            assert message.lateness is not None
            assert timedelta(0) <= message.lateness < prompt.lateness + LATENESS


@pytest.fixture
async def prompt(vhost: Vhost, quiet: None) -> AsyncIterator[Prompt]:
    # With queues of its own: it must not declare those of the client under test.
    async with bide.connect(vhost.url, infrastructure=bide.Clock(prefix="prompt")) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("prompt")]))
        await client.bind("prompt")
        yield Prompt(client)


def stall(proxy: Proxy) -> datetime:
    """Stop the broker's answers for a while; return a due time that leaves time enough after that."""
    proxy.stall()
    asyncio.get_running_loop().call_later(STALL, proxy.moving.set)
    return datetime.now(UTC) + timedelta(seconds=3 * STALL + 0.37)


async def test_a_slow_declaration_does_not_delay_a_due_time(proxy: Proxy, client: bide.Client, prompt: Prompt) -> None:
    due = stall(proxy)
    await prompt.publish(due)
    receipts = await asyncio.gather(*(client.publish(b"", to="q", deliver_at=due) for _ in range(3)))
    assert [receipt.attempts for receipt in receipts] == [1] * 3
    await prompt.compare(receive(client, "q", 3))


async def test_a_slow_declaration_does_not_delay_a_bulk_publish(
    proxy: Proxy, client: bide.Client, prompt: Prompt
) -> None:
    async def messages() -> AsyncIterator[bide.OutgoingMessage]:
        # The bulk opens its channel for the first, so that the second waits for its declaration alone.
        yield bide.OutgoingMessage(b"", to="q")
        await receive(client, "q", 1)
        due = stall(proxy)
        await prompt.publish(due)
        yield bide.OutgoingMessage(b"", to="q", deliver_at=due)

    assert [outcome.error async for outcome in client.publish_many(messages())] == [None, None]
    await prompt.compare(receive(client, "q", 1))


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
