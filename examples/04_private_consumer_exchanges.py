"""Pattern 4: public message exchanges, a consumer's private exchange, and a wire tap on it.

Prints::

    the tap heard: sold on the website
    the tap heard: sold by MyTravel
    app3 received: sold by MyTravel
"""

from __future__ import annotations

import asyncio

import bide
from bide.messaging.wire_tap import tap
from bide.patterns.conventions import private_consumer_exchanges


async def main() -> None:
    topology = private_consumer_exchanges(
        messages=["example4.booking.new"],
        consumers={"example4.app3": ["example4.booking.new"]},
        keys={"example4.app3": ["mytravel.com"]},
    )
    async with bide.connect() as client:
        await client.declare(topology)
        async with tap(client, "example4.app3.private") as heard:
            await client.publish("sold on the website", exchange="example4.booking.new", routing_key="web")
            await client.publish("sold by MyTravel", exchange="example4.booking.new", routing_key="mytravel.com")
            for _ in range(2):
                print("the tap heard:", (await anext(heard)).body.decode())
        async with client.consume("example4.app3") as messages:
            message = await anext(messages)
            print("app3 received:", message.body.decode())
            await message.ack()
        await client.destroy(topology)


asyncio.run(main())
