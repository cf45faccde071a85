"""Helpers that consume or list the messages of queues."""

from __future__ import annotations

from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery


async def take_all(connection: Connection, queue: str) -> list[Delivery]:
    """What a queue holds now, taken out."""
    taken = []
    async with await connection.channel() as channel:
        while (delivery := await channel.get(queue)) is not None:
            channel.ack(delivery.delivery_tag)
            taken.append(delivery)
    return taken


async def bodies(connection: Connection, *queues: str) -> dict[str, list[str]]:
    """The bodies in each of these queues, taken out."""
    return {queue: [one.body.decode() for one in await take_all(connection, queue)] for queue in queues}
