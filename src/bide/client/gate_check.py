"""Warnings to a client that schedules messages while no gate is running."""

from __future__ import annotations

import math
from typing import Final

from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.errors import AccessRefusedError, QueueBusyError, TargetNotFoundError
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames

log = logger(__name__)

CHECK_EVERY: Final = 60.0
"""Seconds after a check in which there is no other one."""


class GateCheck:
    """Checks whether a gate is running, and warns when none is: once until one has been found again.

    A gate consumes questions from a queue of each partition that it leads. The check costs a passive declaration of one
    of these queues, of the partition that the client uses at that moment.

    Args:
        names: the names of the schedule log.
    """

    def __init__(self, names: ScheduleNames) -> None:
        self._names = names
        self._next = -math.inf
        self._is_missing = False

    async def check(self, connection: Connection, partition: int) -> None:
        """Check the gate of a partition, unless there was a check of any partition in the last minute.

        Raises:
            BideError: the channel was closed, or the connection lost.
        """
        now = connection.monotonic()
        if now < self._next:
            return
        self._next = now + CHECK_EVERY
        queue = self._names.queries(partition)
        async with await connection.channel() as channel:
            try:
                found = (await queue_counts(channel, queue)).consumer_count > 0
            except TargetNotFoundError:
                found = False
            except QueueBusyError as error:
                log.debug("it is not known whether a gate is running: %s", error)
                return
            except AccessRefusedError as error:
                # Another check would be refused too, and the broker logs each refusal.
                self._next = math.inf
                log.warning(
                    "this client will not warn if no gate is running: %s; since RabbitMQ 4.3.1, write permission for "
                    "the queue %s and those of the other partitions is enough",
                    error,
                    queue,
                )
                return
        if not found and not self._is_missing:
            log.warning(
                "no gate reads the queue %s: schedules wait until a gate is running (bide.Gate, or 'bide gate')", queue
            )
        self._is_missing = not found
