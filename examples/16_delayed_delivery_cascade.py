"""Pattern 16: the publisher gives the delay, and shared levels delay the message.

Prints::

    time for tea, not early
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import bide
from bide.patterns.delays import delayed_delivery_cascade

# Up to 10 seconds in steps of a tenth, to have it small; leave both out for any delay up to eight years.
CLOCK = bide.Clock(max_delay=timedelta(seconds=10), resolution=timedelta(milliseconds=100))


async def main() -> None:
    topology = delayed_delivery_cascade(queues=["example16.reminders"], max_delay="10s", resolution="100ms")
    async with bide.connect(infrastructure=CLOCK) as client:
        await client.declare(topology)
        await client.publish("time for tea", to="example16.reminders", delay="1.5s")
        async with client.consume("example16.reminders") as messages:
            message = await anext(messages)
            assert message.lateness is not None
            print(f"{message.body.decode()}, {'early' if message.lateness < timedelta(0) else 'not early'}")
            await message.ack()
        # Other publishers share the levels: delete only the queue.
        await client.destroy(bide.Topology(queues=[bide.Queue("example16.reminders")]))


asyncio.run(main())
