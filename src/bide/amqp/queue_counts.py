"""Counts of the messages and consumers of a queue."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any, Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import QueueBusyError, TargetNotFoundError
from bide.topology import Exchange, Queue

_BUSY_AFTER: Final = 0.24
"""Seconds. RabbitMQ asks a quorum queue for 250 ms, and then replies that it has 0 messages and 0 consumers
(``rabbit_quorum_queue:stat/1``)."""

_ATTEMPTS: Final = 20

_ROUND_TRIPS: Final = 3
"""How often to measure for each attempt how slow the connection is. A single measurement may be held up by chance."""


async def queue_counts(channel: Channel, queue: str) -> Any:
    """The reply to a passive declaration, with ``message_count`` (ready messages) and ``consumer_count``.

    A queue that may be too busy to count is asked again, for 5 s or longer.

    Raises:
        TargetNotFoundError: the queue does not exist.
        QueueBusyError: the queue was too busy each time.
        BideError: the connection was lost, or the broker refuses.
    """
    loop, round_trip = asyncio.get_running_loop(), math.inf
    for _ in range(_ATTEMPTS):
        asked_at = loop.time()
        reply = await channel.declare_queue(Queue(queue), passive=True)
        seconds = loop.time() - asked_at
        if not _may_be_busy(reply, seconds):
            return reply
        for _ in range(_ROUND_TRIPS):
            asked_at = loop.time()
            await channel.declare_exchange(Exchange("amq.direct"), passive=True)
            round_trip = min(round_trip, loop.time() - asked_at)
        if seconds - round_trip < _BUSY_AFTER:
            # The connection is slow, and the queue has counted.
            return reply
    raise QueueBusyError(
        f"the queue {queue!r} is too busy to count its messages: it did not answer the broker within 250 ms, "
        f"{_ATTEMPTS} times; try again when the broker has less to do"
    )


async def count_again(connection: Connection, replies: dict[str, Any], asked_at: float) -> None:
    """Ask queues again that may have been too busy to count, and put the new replies in place of theirs.

    Args:
        replies: the replies to passive declarations, by the name of the queue.
        asked_at: when the first declaration was sent, by the clock of the event loop.

    Raises:
        QueueBusyError: a queue was too busy each time.
        BideError: the connection was lost, or the broker refuses.
    """
    seconds = asyncio.get_running_loop().time() - asked_at
    for name in [name for name, reply in replies.items() if _may_be_busy(reply, seconds)]:
        with suppress(TargetNotFoundError):  # it was deleted meanwhile
            async with await connection.channel() as channel:
                replies[name] = await queue_counts(channel, name)


def _may_be_busy(reply: Any, seconds: float) -> bool:
    return not reply.message_count and not reply.consumer_count and seconds >= _BUSY_AFTER
