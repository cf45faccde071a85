"""Pattern 9: urgent tickets overtake others, and a full queue refuses new messages.

Prints::

    handled: the server room burns
    handled: mouse is slow
    handled: keyboard is slow
    refused: one ticket too many
"""

from __future__ import annotations

import asyncio

import bide
from bide.errors import PublishRefusedError
from bide.patterns.service_classes import priority_queue


async def main() -> None:
    topology = priority_queue("example9.tickets", priorities=5, max_length=3, overflow="reject-publish")
    async with bide.connect() as client:
        await client.declare(topology)
        await client.publish("mouse is slow", to="example9.tickets", priority=1)
        await client.publish("keyboard is slow", to="example9.tickets", priority=1)
        await client.publish("the server room burns", to="example9.tickets", priority=5)
        async with client.consume("example9.tickets") as messages:
            for _ in range(3):
                message = await anext(messages)
                print("handled:", message.body.decode())
                await message.ack()
        try:
            for _ in range(4):
                await client.publish("a ticket", to="example9.tickets", priority=5)
        except PublishRefusedError:
            print("refused: one ticket too many")
        await client.destroy(topology, force=True)


asyncio.run(main())
