"""Counts of the messages and consumers of a queue."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import TargetNotFoundError
from bide.topology import Queue

_BUSY_AFTER: Final = 0.24
"""Seconds. RabbitMQ asks a quorum queue for 250 ms, and then replies that it has 0 messages and 0 consumers
(``rabbit_quorum_queue:stat/1``)."""

_ATTEMPTS: Final = 20


async def queue_counts(channel: Channel, queue: str) -> Any:
    """The reply to a passive declaration, with ``message_count`` (ready messages) and ``consumer_count``.

    A queue that may be too busy to count is asked again, for 5 s or longer.

    Raises:
        TargetNotFoundError: the queue does not exist.
        BideError: the connection was lost, or the broker refuses.
    """
    loop, attempts = asyncio.get_running_loop(), 0
    while True:
        asked_at = loop.time()
        reply = await channel.declare_queue(Queue(queue), passive=True)
        attempts += 1
        if attempts == _ATTEMPTS or not _may_be_busy(reply, loop.time() - asked_at):
            return reply


async def count_again(connection: Connection, replies: dict[str, Any], asked_at: float) -> None:
    """Ask queues again that may have been too busy to count, and put the new replies in place of theirs.

    Args:
        replies: the replies to passive declarations, by the name of the queue.
        asked_at: when the first declaration was sent, by the clock of the event loop.

    Raises:
        BideError: the connection was lost, or the broker refuses.
    """
    seconds = asyncio.get_running_loop().time() - asked_at
    for name in [name for name, reply in replies.items() if _may_be_busy(reply, seconds)]:
        with suppress(TargetNotFoundError):  # it was deleted meanwhile
            async with await connection.channel() as channel:
                replies[name] = await queue_counts(channel, name)


def _may_be_busy(reply: Any, seconds: float) -> bool:
    return not reply.message_count and not reply.consumer_count and seconds >= _BUSY_AFTER
