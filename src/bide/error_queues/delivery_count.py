"""Reset of delivery counts, so that browsing a queue does not exhaust its delivery limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Self

from bide.admin.delivery_limit import DEFAULT_LIMIT, delivery_limit
from bide.admin.locate import management_api
from bide.client.client import Client
from bide.error_queues.browsed_message import BrowsedMessage
from bide.errors import BideError, ManagementApiError
from bide.recoverability import redrive
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.logs import logger
from bide.topology import Argument

log = logger(__name__)

_MARGIN: Final = 2
"""Deliveries kept in reserve below the limit, for browsers that are killed before they can replace messages."""

_WINDOW: Final = 200
"""How many copies may be unconfirmed at the same time."""

_MANAGEMENT_TIMEOUT: Final = 5.0
"""Seconds to wait for the management API. If it does not answer in time, RabbitMQ's default limit is assumed."""

_warned: Final = BoundedCache[tuple[object, ...], bool]()
"""Queues for which this process has logged that their delivery limit is unknown. A command reads a queue repeatedly."""


class DeliveryCountReset:
    """Replaces messages that are close to their queue's delivery limit by copies, whose deliveries count from zero.

    Args:
        client: sends the copies.
        queue: the queue that is browsed.
        limit: its delivery limit, or None if it has none.
        assumed: why the limit is only assumed, or None if it is known.

    Attributes:
        queue: the queue that is browsed.
        arguments: the queue's arguments, or None if the management API did not report them.
    """

    def __init__(
        self,
        client: Client,
        queue: str,
        limit: int | None,
        *,
        assumed: str | None = None,
        arguments: Mapping[str, Argument] | None = None,
    ) -> None:
        self.arguments = arguments
        self._client = client
        self.queue = queue
        self._limit = limit
        self._assumed = assumed
        self._copies: Counter[str] = Counter()
        self._sending: set[asyncio.Task[None]] = set()
        self._refused = 0

    @classmethod
    async def of(cls, client: Client, queue: str, management_url: str | None) -> Self:
        """Read the delivery limit from the management API; if that fails, assume RabbitMQ's default.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        release, url = await client.release(), client.url
        try:
            async with asyncio.timeout(_MANAGEMENT_TIMEOUT), management_api(url, management_url) as api:
                found = await api.queue(url.vhost, queue)
                limit = await delivery_limit(api, url.vhost, queue, release=release)
        except (ManagementApiError, TimeoutError) as error:
            # The broker's release does not help here: policies set the limit on every release.
            return cls(client, queue, DEFAULT_LIMIT, assumed=str(error) or "its management API is too slow")
        return cls(client, queue, limit, arguments=None if found is None else found.queue.arguments)

    def renewed(self) -> DeliveryCountReset:
        """Create an equal object for another pass over the queue, without the copies of this pass."""
        return DeliveryCountReset(
            self._client, self.queue, self._limit, assumed=self._assumed, arguments=self.arguments
        )

    def stop(self) -> None:
        """Replace no more messages."""
        self._limit = None

    def needs_reset(self, deliveries: int) -> bool:
        """Whether a message with this many deliveries must be replaced instead of requeued."""
        if self._limit is None:
            return False
        if deliveries and self._assumed is not None:
            self._warn(self._assumed)
            self._assumed = None
        return deliveries >= self._limit - _MARGIN

    def _warn(self, reason: str) -> None:
        """Warn, once per process and queue, that the limit is only assumed."""
        queue = (self._client.url.hosts, self._client.url.vhost, self.queue)
        if queue not in _warned:
            _warned[queue] = True
            log.warning(
                "the delivery limit of %r is unknown and assumed to be %d: if it is lower, browsing the queue "
                "repeatedly loses messages (%s)",
                *(self.queue, self._limit, reason),
            )

    def is_copy(self, held: BrowsedMessage) -> bool:
        """Whether this message is a copy that this object sent; True once for each copy."""
        if held.deliveries or not self._copies[held.message.id]:
            return False
        self._copies[held.message.id] -= 1
        return True

    async def renew(self, held: BrowsedMessage, ack: Callable[[BrowsedMessage], None]) -> None:
        """If a message needs a reset, send a copy to the end of the queue, and then acknowledge the message."""
        if not self.needs_reset(held.deliveries):
            return
        while len(self._sending) >= _WINDOW:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        self._copies[held.message.id] += 1
        task = asyncio.create_task(self._send(held, ack))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait for unconfirmed copies, and log how many the queue refused."""
        if self._sending:
            await asyncio.wait(set(self._sending))
        if self._refused:
            log.warning("%r loses %d of its messages if it is browsed repeatedly", self.queue, self._refused)

    async def _send(self, held: BrowsedMessage, ack: Callable[[BrowsedMessage], None]) -> None:
        try:
            await self._client.forward(redrive.uncounted(held.message, queue=self.queue))
            ack(held)
        except BideError as error:
            if not self._refused:
                log.warning(
                    "a message of %r was delivered %d times (limit: %s), and the queue refuses a copy of it: %s",
                    *(self.queue, held.deliveries + 1, self._limit, error),
                )
            self._refused += 1
