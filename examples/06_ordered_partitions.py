"""Pattern 6: messages of one booking stay in order, with four partitions and two consumers.

Prints::

    booking 7: created, paid, changed, cancelled
    booking 8: created, paid, changed, cancelled
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import bide
from bide.messaging.partitions import consume_partitions
from bide.patterns.partitions import ordered_partitions, partition_queues

STEPS = ("created", "paid", "changed", "cancelled")


async def main() -> None:
    topology = ordered_partitions("example6.bookings", queue="example6.bookings", partitions=4)
    handled: dict[str, list[str]] = defaultdict(list)
    done = asyncio.Event()

    async def handle(message: bide.Message) -> None:
        handled[message.routing_key].append(message.body.decode())
        if sum(map(len, handled.values())) == 8:
            done.set()

    async with bide.connect() as client:
        await client.declare(topology)
        queues = partition_queues("example6.bookings", 4)
        consumers = [asyncio.create_task(consume_partitions(client, queues, handle)) for _ in range(2)]
        for step in STEPS:
            for booking in ("booking 7", "booking 8"):
                await client.publish(step, exchange="example6.bookings", routing_key=booking)
        await asyncio.wait_for(done.wait(), 30)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.wait(consumers)
        for booking in sorted(handled):
            print(f"{booking}: {', '.join(handled[booking])}")
        # The last acknowledgement may have been on its way when the consumers stopped.
        await client.destroy(topology, force=True)


asyncio.run(main())
