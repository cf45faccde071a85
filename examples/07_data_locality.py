"""Pattern 7: each user's clicks are counted in one place, until a partition is added.

Prints::

    with 3 partitions: 40 users, each counted in one place
    with 4 partitions: some moved, all of them to clicks.4
"""

from __future__ import annotations

import asyncio

import bide
from bide.messaging.partitions import consume_partitions
from bide.patterns.partitions import data_locality, partition_queues

USERS = [f"user-{number}" for number in range(40)]


async def homes(client: bide.Client, partitions: int) -> dict[str, set[str]]:
    """User -> the partitions that heard of him."""
    queues = partition_queues("example7.clicks", partitions)
    heard: dict[str, set[str]] = {user: set() for user in USERS}
    count = 0
    done = asyncio.Event()

    async def consume(queue: str) -> None:
        async def handle(message: bide.Message) -> None:
            nonlocal count
            heard[message.headers["user-id"]].add(queue.removeprefix("example7."))
            count += 1
            if count == 2 * len(USERS):
                done.set()

        await consume_partitions(client, [queue], handle)

    consumers = [asyncio.create_task(consume(queue)) for queue in queues]
    for _ in range(2):
        for user in USERS:
            await client.publish("click", exchange="example7.clicks", headers={"user-id": user})
    await asyncio.wait_for(done.wait(), 30)
    for consumer in consumers:
        consumer.cancel()
    await asyncio.wait(consumers)
    return heard


def clicks(partitions: int) -> bide.Topology:
    return data_locality("example7.clicks", queue="example7.clicks", partitions=partitions, header="user-id")


async def main() -> None:
    async with bide.connect() as client:
        await client.declare(clicks(3))
        before = await homes(client, 3)
        assert all(len(places) == 1 for places in before.values())
        print(f"with 3 partitions: {len(before)} users, each counted in one place")
        await client.declare(clicks(4))
        after = await homes(client, 4)
        moved = {next(iter(after[user])) for user in USERS if after[user] != before[user]}
        print(f"with 4 partitions: some moved, all of them to {', '.join(sorted(moved))}")
        await client.destroy(clicks(4), force=True)


asyncio.run(main())
