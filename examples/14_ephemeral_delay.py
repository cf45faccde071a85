"""Pattern 14: a failed message waits in a temporary queue of its own.

Prints::

    attempt 1 fails
    attempt 2 works
"""

from __future__ import annotations

import asyncio

import bide
from bide.messaging.ephemeral import EphemeralDelays, retries_of


async def main() -> None:
    topology = bide.Topology(queues=[bide.Queue.quorum("example14.orders")])
    async with bide.connect() as client:
        await client.declare(topology)
        delays = EphemeralDelays(client)
        await client.publish("order 7", to="example14.orders")
        async with client.consume("example14.orders") as messages:
            async for message in messages:
                attempt = retries_of(message) + 1
                if attempt == 1:
                    print("attempt 1 fails")
                    await delays.retry(message, delay="500ms", to="example14.orders")
                    continue
                print(f"attempt {attempt} works")
                await delays.clear(message)
                await message.ack()
                break
        await client.destroy(topology)


asyncio.run(main())
