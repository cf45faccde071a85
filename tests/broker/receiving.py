"""Helpers of the broker tests."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from itertools import count

import bide
from bide.amqp.connection import Connection
from bide.topology import Queue
from tests.patience import PATIENCE

_names = count(1)


def fresh(stem: str) -> str:
    """A name that no other test uses."""
    return f"{stem}-{next(_names)}"


def stack_of(record: logging.LogRecord) -> str:
    """The stack trace that a log tells; empty without one."""
    return "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""


async def receive(client: bide.Client, queue: str, number: int, *, seconds: float = PATIENCE) -> list[bide.Message]:
    """Exactly so many messages, acknowledged; fewer within the time are an error."""
    received: list[bide.Message] = []
    async with asyncio.timeout(seconds), client.consume(queue) as messages:
        async for message in messages:
            await message.ack()
            received.append(message)
            if len(received) == number:
                break
    return received


async def ready(connection: Connection, queue: str) -> int:
    """Ready messages in a queue."""
    channel = await connection.channel()
    reply = await channel.declare_queue(Queue(queue), passive=True)
    await channel.close()
    return int(reply.message_count)


async def eventually(what: Callable[[], Awaitable[bool]], *, seconds: float = PATIENCE, step: float = 0.05) -> None:
    """Wait until something holds; that it does not is an error."""
    deadline = time.monotonic() + seconds
    while not await what():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(step)
