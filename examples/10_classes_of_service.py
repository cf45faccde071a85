"""Pattern 10: the last word of the routing key is the class; each class has its own queue.

Prints::

    high: order 3
    low: order 1
    low: order 2
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.service_classes import classes_of_service


async def main() -> None:
    topology = classes_of_service("example10.orders", queue="example10", levels=["high", "low"], otherwise="low")
    async with bide.connect() as client:
        await client.declare(topology)
        for body, key in (("order 1", "eu.low"), ("order 2", "eu.whatever"), ("order 3", "eu.high")):
            await client.publish(body, exchange="example10.orders", routing_key=key)
        for level, count in (("high", 1), ("low", 2)):
            async with client.consume(f"example10.{level}") as messages:
                for _ in range(count):
                    message = await anext(messages)
                    print(f"{level}: {message.body.decode()}")
                    await message.ack()
        await client.destroy(topology)


asyncio.run(main())
