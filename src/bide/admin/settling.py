"""Making new quorum queues survive the death of their node."""

from __future__ import annotations

import secrets
from typing import Final

from bide.admin.declaring import Declaring
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.topology import Queue

_ARGUMENTS: Final = {"x-quorum-initial-group-size": 99, "x-expires": 60_000}
"""A member on every node. The queue expires if its client ends before it deletes the queue."""


async def settle(connection: Connection, *, prefix: str, can_move: bool = True) -> None:
    """Have all nodes write the quorum queues that were declared before into their files.

    RabbitMQ's library ra notes the members of quorum queues in the file ``names.dets``, through a cache. A member that
    is not in the file when its node is killed starts again empty, and its messages, though they are in the log, are
    dropped. The cache is written out about a second after the last declaration, or when a name is looked up that is not
    in it, and that is what ra does for every new queue. So one more queue is declared, and deleted.

    (ra 2.2 to 3.1, which RabbitMQ 3.10 to 4.3 have: ``ra_directory:register_name``, ``ra_log_wal:recover_records``;
    ``rabbit_quorum_queue:recover``; ``dets:update_cache`` of Erlang.)

    Args:
        prefix: of the queue, for users who may not declare just any.

    Raises:
        BrokerError: the broker refuses, or the connection broke.
    """
    # Random, because other clients settle at the same time. Short, because a node never forgets a name.
    queue = Queue.quorum(f"{prefix}.settle.{secrets.token_hex(2)}", _ARGUMENTS)
    async with Declaring(connection, can_move=can_move) as declaring:
        await declaring.all(Channel.declare_queue, [queue])
        await declaring.all(Channel.delete_queue, [queue.name])
