"""Counts of the messages and consumers of a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from bide.amqp.channel import Channel
from bide.errors import QueueBusyError
from bide.topology import Queue

ATTEMPTS: Final = 20
"""How often to ask a queue that is too busy to count."""

_BUSY_AFTER: Final = 0.24
"""Seconds. RabbitMQ asks a quorum queue for 250 ms, and then replies that it has 0 messages and 0 consumers
(``rabbit_quorum_queue:stat/1``)."""

_ROUND_TRIPS: Final = 3
"""Round trips to measure. A single one may be slow by chance."""


async def queue_counts(channel: Channel, queue: str) -> Any:
    """The reply to a passive declaration, with ``message_count`` (ready messages) and ``consumer_count``.

    A queue that is too busy to count is asked again, for 5 s or longer. A quorum queue without a leader counts as
    empty: the broker replies so at once, and AMQP does not tell the difference.

    Raises:
        TargetNotFoundError: the queue does not exist.
        QueueBusyError: the queue was too busy each time.
        BideError: the connection was lost, or the broker refuses.
    """
    loop = asyncio.get_running_loop()
    for _ in range(ATTEMPTS):
        asked_at = loop.time()
        reply = await channel.declare_queue(Queue(queue), passive=True)
        seconds = loop.time() - asked_at
        if not is_empty(reply) or await have_counted(seconds, channel.round_trip):
            return reply
    raise busy_error(queue)


def is_empty(reply: Any) -> bool:
    """Whether a reply says that the queue has no ready messages and no consumers."""
    return not reply.message_count and not reply.consumer_count


async def have_counted(seconds: float, round_trip: Callable[[], Awaitable[Any]]) -> bool:
    """Whether queues have counted, and the broker has not given up waiting for one of them.

    A busy queue that is taken for an empty one can cost messages, and the opposite costs another attempt. So in doubt
    the answer is no.

    Args:
        seconds: the time from the first question to the last reply.
        round_trip: see :meth:`bide.amqp.channel.Channel.round_trip`.
    """
    if seconds < _BUSY_AFTER:
        return True
    loop = asyncio.get_running_loop()
    round_trips = []
    for _ in range(_ROUND_TRIPS):
        asked_at = loop.time()
        await round_trip()
        round_trips.append(loop.time() - asked_at)
    return seconds - min(round_trips) < _BUSY_AFTER / 2


def busy_error(queue: str) -> QueueBusyError:
    """The error for a queue that did not count."""
    return QueueBusyError(
        f"the queue {queue!r} is too busy to count its messages: it did not answer the broker within 250 ms, "
        f"{ATTEMPTS} times; try again when the broker has less to do"
    )
