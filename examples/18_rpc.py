"""Pattern 18: requests and replies by direct reply-to and three other ways; a slow server.

Prints::

    direct: 7 euros
    instance: 7 euros
    ephemeral: 7 euros
    fixed: 7 euros for request-1
    no reply in time
"""

from __future__ import annotations

import asyncio

import bide
from bide.errors import ReplyTimeoutError
from bide.messaging.rpc import Caller, Replies, serve
from bide.patterns.rpc import rpc

WAYS: tuple[Replies, ...] = ("direct", "instance", "ephemeral")


async def price(request: bide.Message) -> str:
    if request.body == b"gold":
        await asyncio.sleep(60)  # longer than any caller here waits
    return "7 euros"


async def main() -> None:
    topology = rpc("example18.prices", replies="fixed", reply_queue="example18.replies")
    async with bide.connect() as client:
        await client.declare(topology)
        server = asyncio.create_task(serve(client, "example18.prices", price))
        for replies in WAYS:
            async with Caller(client, replies=replies) as caller:
                reply = await caller.call("tea", to="example18.prices", timeout="10s")
                print(f"{replies}: {reply.body.decode()}")
        await client.publish("tea", to="example18.prices", reply_to="example18.replies", correlation_id="request-1")
        async with client.consume("example18.replies") as messages:
            message = await anext(messages)
            print(f"fixed: {message.body.decode()} for {message.correlation_id}")
            await message.ack()
        async with Caller(client) as caller:
            try:
                await caller.call("gold", to="example18.prices", timeout="500ms")
            except ReplyTimeoutError:
                print("no reply in time")
        server.cancel()
        await asyncio.wait({server})
        await client.destroy(topology, force=True)


asyncio.run(main())
