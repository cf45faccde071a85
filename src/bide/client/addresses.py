"""The exchanges of NServiceBus endpoints, through which undelayed messages reach queues."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from datetime import timedelta
from functools import partial
from math import inf
from typing import Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.delay.protocol import DelayInfrastructure
from bide.errors import AccessRefusedError
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.shared_tasks import SharedTasks
from bide.topology import Exchange, Topology

REBIND_AFTER: Final = timedelta(seconds=30)
"""Time after which bindings, exchanges and queues of a growing infrastructure are checked again at their next use."""


class Addresses:
    """Checks whether queues have the exchange of an NServiceBus endpoint, and checks again every 30 s of use.

    Messages to a queue without such an exchange, which is not the queue of an endpoint, go to the default exchange.

    Args:
        found: the exchanges that exist, by queue; kept up to date.
        slots: limits the number of concurrent checks.
    """

    def __init__(
        self,
        connection: Connection,
        infrastructure: DelayInfrastructure,
        tasks: SharedTasks,
        found: MutableMapping[str, str],
        slots: asyncio.Semaphore,
    ) -> None:
        self._connection = connection
        self._infrastructure = infrastructure
        self._tasks = tasks
        self._found = found
        self._slots = slots
        self._known_until = BoundedCache[str, float]()

    async def find(self, queue: str) -> float:
        """Look for the exchange of a queue, unless the result is known; return when it expires, in loop time."""
        exchange = self._infrastructure.address_exchange(queue)
        if exchange is None:
            return inf
        if self._known_until.get(queue, 0.0) <= self._connection.loop.time():
            await self._tasks.run((self, queue), partial(self._check, queue, exchange))
        return self._known_until.get(queue, 0.0)

    def forget(self) -> None:
        """Forget all results: an exchange was deleted, or this user may no longer use it."""
        self._known_until.clear()

    async def _check(self, queue: str, exchange: str) -> None:
        async with self._slots:
            try:
                is_there = await exists(self._connection, Topology([Exchange(exchange)]))
            except AccessRefusedError:
                # Since 4.3, RabbitMQ does not tell a user without any permission for an exchange whether it exists.
                is_there = False
        if is_there:
            self._found[queue] = exchange
        else:
            self._found.pop(queue, None)
        self._known_until[queue] = self._connection.loop.time() + REBIND_AFTER.total_seconds()
