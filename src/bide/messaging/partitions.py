"""Ordered consumption of the partitions of ``ordered_partitions``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bide.client.client import Client
from bide.client.message import Message
from bide.errors import InvalidInputError


async def consume_partitions(
    client: Client, queues: Sequence[str], handler: Callable[[Message], Awaitable[None]]
) -> None:
    """Handle the messages of all partitions until it is cancelled: those of one partition one by one, in their order.

    Start it in as many processes as should be there to take over. The broker gives each partition to one of them, the
    one that came first, and to the next when that one goes. To spread the load, start the processes with the queues in
    different orders, or with some of them each.

    What the handler raises ends all of it, and the message goes back to its place at the head of its partition: to skip
    a message is the handler's decision.

    Args:
        queues: see :func:`bide.patterns.partitions.partition_queues`.

    Raises:
        InvalidInputError: no queue is named.
        ExceptionGroup: of what the handler, or the broker, raised.
    """
    if not queues:
        raise InvalidInputError("queues is empty: name one partition at least")
    async with asyncio.TaskGroup() as tasks:
        for queue in queues:
            tasks.create_task(_consume(client, queue, handler))


async def _consume(client: Client, queue: str, handler: Callable[[Message], Awaitable[None]]) -> None:
    # With a higher prefetch, messages behind one that is requeued would be out of order.
    async with client.consume(queue, prefetch=1) as messages:
        async for message in messages:
            await handler(message)
            await message.ack()
