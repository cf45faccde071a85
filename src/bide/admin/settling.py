"""A workaround that makes new quorum queues survive a crash of their node."""

from __future__ import annotations

import os
from typing import Final

from bide.admin.declaring import Declaring
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.topology import Queue

_QUEUE_ARGUMENTS: Final = {"x-quorum-initial-group-size": 99, "x-expires": 60_000}
"""A member on every node, and an expiry in case the client ends before it deletes the queue."""


def settling_queue(prefix: str) -> Queue:
    """The queue that is declared and deleted to settle the others; see :func:`settle`.

    Its name is random, because other clients settle at the same time, and short, because a node never forgets a name.
    """
    return Queue.quorum(f"{prefix}.settle.{os.urandom(2).hex()}", _QUEUE_ARGUMENTS)


async def settle(connection: Connection, *, prefix: str, can_move: bool = True) -> None:
    """Make all nodes write recently declared quorum queues to disk, by declaring and deleting one more queue.

    RabbitMQ's library ra stores the members of quorum queues in the file ``names.dets``, through a cache. A member that
    is not in the file when its node is killed starts empty again, and its messages, although in the log, are dropped.
    The cache is written about a second after the last declaration, or when a name that is not in the cache is looked
    up. ra looks up the name of each new queue, so one more declaration writes the cache.

    (ra 2.2 to 3.1, which RabbitMQ 3.10 to 4.3 have: ``ra_directory:register_name``, ``ra_log_wal:recover_records``;
    ``rabbit_quorum_queue:recover``; ``dets:update_cache`` of Erlang.)

    Args:
        prefix: the start of the queue's name, for users with permissions for certain names only.

    Raises:
        BrokerError: the broker refuses, or the connection was lost.
    """
    queue = settling_queue(prefix)
    async with Declaring(connection, can_move=can_move) as declaring:
        await declaring.all(Channel.declare_queue, [queue])
        await declaring.all(Channel.delete_queue, [queue.name])
