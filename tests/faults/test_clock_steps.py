"""Steps of the system clock during a publish, which do not change the delay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

import bide
from bide.amqp.transport import Tcp
from bide.amqp.url import BrokerUrl
from bide.durations import from_milliseconds, to_milliseconds
from tests.broker.receiving import eventually, fresh, receive
from tests.faults.conftest import CLOCK
from tests.faults.proxy import PUBLISH, Proxy
from tests.timeouts import MAX_LATENESS, TIMEOUT

HOUR = timedelta(hours=1)
DELAY = timedelta(seconds=6)


class SteppedClock(Tcp):
    """TCP, on a machine whose clock is set."""

    def __init__(self) -> None:
        self.step = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.step


@asynccontextmanager
async def bound_queue(proxy: Proxy) -> AsyncIterator[tuple[SteppedClock, bide.Client, str]]:
    """A client behind the proxy, its clock, and a queue that it has bound."""
    transport = SteppedClock()
    url = replace(BrokerUrl.parse(proxy.url), transport=transport)
    async with bide.connect(url, infrastructure=CLOCK, timeout=timedelta(seconds=TIMEOUT)) as client:
        queue = fresh("q")
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue)]))
        await client.bind(queue)
        yield transport, client, queue


async def publish_one(client: bide.Client, message: bide.OutgoingMessage) -> datetime | None:
    receipt = await client.publish(message.body, to=message.to, delay=message.delay, deliver_at=message.deliver_at)
    assert receipt.attempts == 2
    return receipt.due


async def publish_in_bulk(client: bide.Client, message: bide.OutgoingMessage) -> datetime | None:
    async for outcome in client.publish_many([message]):
        assert outcome.error is None
        assert outcome.attempts == 2
        return outcome.due
    return None


@pytest.mark.parametrize("publish", [publish_one, publish_in_bulk])
@pytest.mark.parametrize("step", [HOUR, -HOUR])
@pytest.mark.slow
async def test_a_clock_step_before_a_repeat_neither_hastens_nor_refuses_a_delay(
    proxy: Proxy, publish: Callable[[bide.Client, bide.OutgoingMessage], Awaitable[datetime | None]], step: timedelta
) -> None:
    async with bound_queue(proxy) as (transport, client, queue):
        begun = time.monotonic()
        publishing = await cut_off(proxy, publish(client, bide.OutgoingMessage(b"x", to=queue, delay=DELAY)))
        transport.step = step
        proxy.refusing = False
        due = await publishing
        [message] = await receive(client, queue, 1)
        waited = timedelta(seconds=time.monotonic() - begun)
        assert DELAY <= waited < DELAY + MAX_LATENESS
        # The header follows the clock as it was when the message was sent again, so that the lateness is right.
        assert due is not None
        assert message.due == rounded_up(due)
        assert message.lateness is not None
        assert timedelta(0) <= message.lateness < MAX_LATENESS


@pytest.mark.parametrize("publish", [publish_one, publish_in_bulk])
async def test_a_due_time_follows_a_clock_step_before_a_repeat(
    proxy: Proxy, publish: Callable[[bide.Client, bide.OutgoingMessage], Awaitable[datetime | None]]
) -> None:
    async with bound_queue(proxy) as (transport, client, queue):
        when = client.now() + timedelta(seconds=15)
        publishing = await cut_off(proxy, publish(client, bide.OutgoingMessage(b"x", to=queue, deliver_at=when)))
        transport.step = HOUR
        proxy.refusing = False
        assert await publishing == when
        [message] = await receive(client, queue, 1)
        assert message.due == rounded_up(when)
        assert message.lateness is not None
        assert message.lateness > HOUR - timedelta(minutes=1)


def rounded_up(moment: datetime) -> datetime | None:
    """A time as it is on the wire."""
    return from_milliseconds(to_milliseconds(moment))


async def cut_off(proxy: Proxy, work: Awaitable[datetime | None]) -> asyncio.Future[datetime | None]:
    """Begin to publish: the message is lost with its connection, and no other connection is let in."""
    proxy.refusing = True
    proxy.on_method[PUBLISH] = "before"
    publishing = asyncio.ensure_future(work)

    async def is_cut() -> bool:
        return proxy.cuts > 0

    await eventually(is_cut)
    # Long enough for the rest of the delay to differ from all of it.
    await asyncio.sleep(2)
    return publishing
