"""Pattern 1: a fanout exchange gives every queue a copy.

Prints::

    billing: booking 1
    crm: booking 1
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.broadcast import fanout_broadcast


async def main() -> None:
    topology = fanout_broadcast("example1.bookings", queues=["example1.billing", "example1.crm"])
    async with bide.connect() as client:
        await client.declare(topology)
        await client.publish("booking 1", exchange="example1.bookings")
        for queue in ("example1.billing", "example1.crm"):
            async with client.consume(queue) as messages:
                message = await anext(messages)
                print(f"{queue.removeprefix('example1.')}: {message.body.decode()}")
                await message.ack()
        await client.destroy(topology)


asyncio.run(main())
