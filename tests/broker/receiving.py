"""Helpers of the broker tests: declare, receive, count and wait."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

import bide
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.amqp.transport import Tcp
from bide.amqp.url import BrokerUrl
from bide.client.broker_state import BrokerState
from bide.errors import QueueBusyError, TargetNotFoundError
from bide.topology import Queue, Topology
from tests.timeouts import TIMEOUT

_names = count(1)


def fresh(stem: str) -> str:
    """A name that no other test uses."""
    return f"{stem}-{next(_names)}"


def stack_of(record: logging.LogRecord) -> str:
    """The stack trace of a log record; empty without one."""
    return "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""


async def declare(channel: Channel, topology: Topology) -> None:
    """Declare without the checks of a client."""
    for exchange in topology.exchanges:
        await channel.declare_exchange(exchange)
    for queue in topology.queues:
        await channel.declare_queue(queue)
    for binding in topology.bindings:
        await channel.bind(binding)


async def receive(client: bide.Client, queue: str, number: int, *, seconds: float = TIMEOUT) -> list[bide.Message]:
    """Consume and acknowledge exactly ``number`` messages; fewer within the time are an error."""
    received: list[bide.Message] = []
    async with asyncio.timeout(seconds), client.consume(queue) as messages:
        async for message in messages:
            await message.ack()
            received.append(message)
            if len(received) == number:
                break
    return received


async def delete_bound(client: bide.Client, connection: Connection, *queues: str) -> None:
    """Delete queues that a client has bound a moment ago, so that it sends on without knowing that they are gone.

    A message that waited before could be due before its queue is deleted, and be deleted with it.
    """
    await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue) for queue in queues]))
    for queue in queues:
        await client.publish(b"binds it", to=queue, delay="50ms")
        await receive(client, queue, 1)
    async with await connection.channel() as channel:
        for queue in queues:
            await channel.delete_queue(queue)


async def ready(connection: Connection, queue: str) -> int:
    """Ready messages in a queue, which is asked again while it is too busy to count."""
    async with await connection.channel() as channel, asyncio.timeout(TIMEOUT):
        while True:
            try:
                return int((await queue_counts(channel, queue)).message_count)
            except QueueBusyError:
                await asyncio.sleep(0.05)  # before the next question


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """A bare connection, for what a client does not do.

    Nothing reconnects it. So it has no heartbeats and a long timeout, and no pause of the test closes it.
    """
    patient = replace(BrokerUrl.parse(url), heartbeat=0, timeout=timedelta(seconds=TIMEOUT))
    connection = await Connection.open(patient)
    try:
        yield connection
    finally:
        await connection.close()


async def has_consumer(connection: Connection, queue: str, number: int = 1) -> bool:
    """Whether a queue exists and has this number of consumers, or more."""
    async with await connection.channel() as channel:
        try:
            return bool((await channel.declare_queue(Queue(queue), passive=True)).consumer_count >= number)
        except TargetNotFoundError:
            return False


async def ready_at(url: str, queue: str) -> int:
    """Ready messages in a queue, asked over a connection of its own."""
    async with connected(url) as connection:
        return await ready(connection, queue)


async def until_ready(url: str, queue: str, number: int) -> None:
    """Wait until a queue has this number of ready messages, asked over a connection of its own."""
    async with connected(url) as connection:

        async def has_arrived() -> bool:
            return await ready(connection, queue) == number

        await eventually(has_arrived)


async def state_of(client: bide.Client) -> BrokerState:
    """What a client knows of its broker, for tests of what happens to it: no public name leads there."""
    return await client._publisher.state()


async def connection_of(client: bide.Client) -> Connection:
    """The connection that a client publishes over."""
    return (await state_of(client)).connection


async def consuming_connection_of(client: bide.Client) -> Connection:
    """The connection that a client consumes over."""
    return await client._consuming_connection.connection()


async def eventually(what: Callable[[], Awaitable[bool]], *, seconds: float = TIMEOUT, step: float = 0.05) -> None:
    """Wait until something holds; that it does not is an error."""
    deadline = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(step)  # there is no event to wait for


@contextmanager
def leaping_clock(*, suspends: bool = False) -> Iterator[Callable[[timedelta], None]]:
    """Yield a function that sets bide's clock forward; the broker's clock is not changed.

    A timeout then ends after a fixed number of steps, however long each step takes.

    Args:
        suspends: whether the monotonic clock goes forward too, as on a machine that was suspended. A gate believes
            this at once, and a step of the wall clock alone only later.
    """
    offset = timedelta(0)

    def leap(by: timedelta) -> None:
        nonlocal offset
        offset += by

    def now(self: Tcp) -> datetime:
        return datetime.now(UTC) + offset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tcp, "now", now)
        if suspends:
            monotonic = Tcp.monotonic
            patch.setattr(Tcp, "monotonic", lambda self: monotonic(self) + offset.total_seconds())
        yield leap
