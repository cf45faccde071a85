"""Pattern 17: one publisher delays all its messages, by its own exchange and queue.

Prints::

    from another publisher
    from publisher 3
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.broadcast import fanout_broadcast
from bide.patterns.delays import private_publisher_delay


async def main() -> None:
    main_topology = fanout_broadcast("example17.bookings", queues=["example17.crm"])
    own = private_publisher_delay("example17.publisher3", to="example17.bookings", delay="3s")
    async with bide.connect() as client:
        await client.declare(main_topology | own)
        await client.publish("from publisher 3", exchange="example17.publisher3")
        await client.publish("from another publisher", exchange="example17.bookings")
        async with client.consume("example17.crm") as messages:
            for _ in range(2):
                message = await anext(messages)
                print(message.body.decode())
                await message.ack()
        await client.destroy(main_topology | own)


asyncio.run(main())
