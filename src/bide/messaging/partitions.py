"""Ordered consumption of partitions that :func:`ordered_partitions` declares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bide.client.client import Client
from bide.client.message import Message
from bide.errors import InvalidInputError


async def consume_partitions(
    client: Client, queues: Sequence[str], handler: Callable[[Message], Awaitable[None]]
) -> None:
    """Handle the messages of all partitions until cancelled, one at a time and in order within each partition.

    Start it in several processes for failover. The broker activates one consumer per partition: the first one, and the
    next one when it ends. To spread the load, pass the queues in a different order to each process, or pass only some
    of them.

    An exception of the handler ends this call, and its message returns to the head of its partition. To skip a message,
    the handler has to return.

    Args:
        client: an open client.
        queues: names of the queues; see :func:`bide.patterns.partitions.partition_queues`.
        handler: handles a message.

    Raises:
        InvalidInputError: *queues* is empty.
        ExceptionGroup: the exceptions of handlers, and errors of the broker.
    """
    if not queues:
        raise InvalidInputError("queues is empty: name at least one partition")
    async with asyncio.TaskGroup() as tasks:
        for queue in queues:
            tasks.create_task(_consume(client, queue, handler))


async def _consume(client: Client, queue: str, handler: Callable[[Message], Awaitable[None]]) -> None:
    # With a higher prefetch, the messages behind a requeued one would already be delivered, out of order.
    async with client.consume(queue, prefetch=1) as messages:
        async for message in messages:
            await handler(message)
            await message.ack()
