"""Making new quorum queues survive the death of their node."""

from __future__ import annotations

import os
from typing import Final

from bide.admin.declaring import Declaring
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.topology import Queue

_ARGUMENTS: Final = {"x-quorum-initial-group-size": 99, "x-expires": 60_000}
"""As many members as there are nodes. It expires if its client does not come to delete it."""


async def settle(connection: Connection, *, prefix: str, can_move: bool = True) -> None:
    """Have all nodes write down the quorum queues that were declared before.

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
    # Another name than that of a client that does the same now, and not without end: a name is never freed on a node.
    queue = Queue.quorum(f"{prefix}.settle.{os.urandom(2).hex()}", _ARGUMENTS)
    async with Declaring(connection, can_move=can_move) as declaring:
        await declaring.all(Channel.declare_queue, [queue])
        await declaring.all(Channel.delete_queue, [queue.name])
