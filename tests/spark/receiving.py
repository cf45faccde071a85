"""Queues of the Spark tests."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import bide
from bide.amqp.queue_counts import queue_counts
from bide.client.message_sync import SyncMessage
from tests.broker.receiving import connected, ready_at
from tests.polling import wait_until
from tests.timeouts import TIMEOUT

_names = count(1)


def new_queue(url: str) -> str:
    """A new quorum queue."""
    name = f"q-{next(_names)}"
    with bide.connect_sync(url) as client:
        client.declare(bide.Topology(queues=[bide.Queue.quorum(name)]))
    return name


def drain(url: str, queue: str, number: int, *, quiet: str = f"{TIMEOUT:.0f}s", least: int = 0) -> list[SyncMessage]:
    """Acknowledge up to ``number`` messages; stop early if none arrives for a while and none is left.

    Args:
        least: how many messages there are at the least, so that one that is on its way is not missed.
    """
    found: list[SyncMessage] = []
    more, deadline = number > 0, time.monotonic() + TIMEOUT
    while more:
        with bide.connect_sync(url) as client, client.consume(queue, timeout=quiet, prefetch=2_000) as messages:
            for message in messages:
                found.append(message)
                message.ack()
                if len(found) == number:
                    return found
        # Once the consumer is closed, because a slow broker may have messages on their way to it.
        with bide.connect_sync(url) as client:
            more = client.wait_for(ready_at(url, queue)) > 0 or (len(found) < least and time.monotonic() < deadline)
    return found


def drain_all(url: str, queue: str, least: int) -> list[SyncMessage]:
    """Acknowledge all messages of a queue to which no more are sent, with duplicates: ``least`` of them or more."""
    return drain(url, queue, 10_000_000, quiet="3s", least=least)


def wait_until_released(url: str, queue: str) -> None:
    """Wait until a queue has no consumer any more, and has requeued what those of a killed process held."""

    async def consumers() -> int:
        async with connected(url) as connection:
            return int((await queue_counts(await connection.channel(), queue)).consumer_count)

    wait_until(lambda: not asyncio.run(consumers()), f"{queue} has no consumer")


def rest(url: str, queue: str) -> list[SyncMessage]:
    """All remaining messages of a queue to which no more are sent.

    A loaded broker may forget the last acknowledgements of a channel that closes, and deliver those messages again.
    """
    return [one for one in drain(url, queue, 10_000_000, quiet="1s") if not one.redelivered]
