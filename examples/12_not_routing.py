"""Pattern 12: all bookings but those of one sales channel.

Prints::

    app2: sold on the website
    app2: sold by an agent
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.alternates import not_routing


async def main() -> None:
    topology = not_routing("example12.booking.new", queue="example12.app2", unwanted=["mytravel.com"])
    async with bide.connect() as client:
        await client.declare(topology)
        for body, channel in (
            ("sold on the website", "web"),
            ("sold by MyTravel", "mytravel.com"),
            ("sold by an agent", "agents"),
        ):
            await client.publish(body, exchange="example12.booking.new", routing_key=channel)
        async with client.consume("example12.app2") as messages:
            for _ in range(2):
                message = await anext(messages)
                print("app2:", message.body.decode())
                await message.ack()
        await client.destroy(topology)


asyncio.run(main())
