"""Pattern 5: a command goes to one queue, which the sender names.

Prints::

    charge-card: 7 euros
    charge-cart: no queue takes it
"""

from __future__ import annotations

import asyncio

import bide
from bide.errors import UnroutableError
from bide.patterns.conventions import point_to_point


async def main() -> None:
    topology = point_to_point(queues=["example5.charge-card"])
    async with bide.connect() as client:
        await client.declare(topology)
        await client.publish("7 euros", to="example5.charge-card")
        async with client.consume("example5.charge-card") as messages:
            message = await anext(messages)
            print("charge-card:", message.body.decode())
            await message.ack()
        try:
            await client.publish("7 euros", to="example5.charge-cart")
        except UnroutableError:
            print("charge-cart: no queue takes it")
        await client.destroy(topology)


asyncio.run(main())
