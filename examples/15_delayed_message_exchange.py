"""Pattern 15: the x-delay header of the delayed-message plugin, with the plugin and without.

Prints, where the plugin is not enabled::

    no plugin here
    reminder for user.7, x-delay was 300
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import bide
from bide.errors import UnsupportedBrokerError
from bide.messaging.delayed_message import DelayedMessagePublisher
from bide.patterns.delays import delayed_message_exchange

# Small, for this example: up to 10 seconds in steps of a tenth. The default holds eight years, in steps of 10 ms.
CLOCK = bide.Clock(max_delay=timedelta(seconds=10), resolution=timedelta(milliseconds=100))


async def main() -> None:
    topology = delayed_message_exchange("example15.reminders", bindings={"example15.mail": ["user.#"]})
    headers = {"x-delay": 300}
    async with bide.connect(infrastructure=CLOCK) as client:
        try:
            await client.declare(topology)
        except UnsupportedBrokerError:
            print("no plugin here")
            topology = bide.Topology(
                [bide.Exchange("example15.reminders", "topic")], topology.queues, topology.bindings
            )
            await client.declare(topology)
            await DelayedMessagePublisher(client).publish(
                "tea", exchange="example15.reminders", routing_key="user.7", headers=headers
            )
        else:
            # The plugin knows of no mandatory messages, since it routes them later.
            await client.publish(
                "tea", exchange="example15.reminders", routing_key="user.7", headers=headers, mandatory=False
            )
        async with client.consume("example15.mail") as messages:
            reminder = await anext(messages)
            print(f"reminder for {reminder.routing_key}, x-delay was {-reminder.headers['x-delay']}")
            await reminder.ack()
        await client.destroy(topology)


asyncio.run(main())
