"""Pattern 2: a topic exchange in front, a fanout and a headers exchange behind it.

Prints::

    billing: a booking
    pets: a dog
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.broadcast import layered_exchanges


async def main() -> None:
    topology = layered_exchanges(
        "example2.travel",
        layers={"example2.bookings": "booking.#", "example2.changes": "#"},
        queues={"example2.billing": "example2.bookings", "example2.pets": "example2.changes"},
        rules={"example2.pets": {"entity.type": "pet", "change.type": "new"}},
    )
    async with bide.connect() as client:
        await client.declare(topology)
        await client.publish("a booking", exchange="example2.travel", routing_key="booking.new")
        headers = {"entity.type": "pet", "change.type": "new"}
        await client.publish("a dog", exchange="example2.travel", routing_key="extras.pet", headers=headers)
        for queue in ("example2.billing", "example2.pets"):
            async with client.consume(queue) as messages:
                message = await anext(messages)
                print(f"{queue.removeprefix('example2.')}: {message.body.decode()}")
                await message.ack()
        await client.destroy(topology)


asyncio.run(main())
