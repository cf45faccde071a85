"""Pattern 11: important clients have queues of their own, all others share one.

Prints::

    acme: from acme
    partners: from initech
    everybody-else: from hooli
"""

from __future__ import annotations

import asyncio

import bide
from bide.patterns.alternates import if_else


async def main() -> None:
    topology = if_else(
        "example11.clients",
        branches={"example11.acme": ["acme"], "example11.partners": ["globex", "initech"]},
        otherwise="example11.everybody-else",
    )
    async with bide.connect() as client:
        await client.declare(topology)
        for name in ("hooli", "initech", "acme"):
            await client.publish(f"from {name}", exchange="example11.clients", routing_key=name)
        for queue in ("acme", "partners", "everybody-else"):
            async with client.consume(f"example11.{queue}") as messages:
                message = await anext(messages)
                print(f"{queue}: {message.body.decode()}")
                await message.ack()
        await client.destroy(topology)


asyncio.run(main())
