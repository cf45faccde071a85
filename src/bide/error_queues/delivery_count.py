"""Keep a queue from giving up messages because they were looked at too often."""

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
from bide.runtime.logs import logger
from bide.topology import Argument

log = logger(__name__)

_MARGIN: Final = 2
"""So many looks may be killed, and give back what they held uncounted by us, before the limit is reached."""

_AT_ONCE: Final = 200
"""Copies on their way at once."""


class DeliveryCountReset:
    """Replaces messages that come near to their queue's delivery limit by copies, which count from zero.

    Args:
        queue: that is looked at.
        limit: its delivery limit, or None for a queue without.
        assumed: why the limit is not known for sure, or None where it is.

    Attributes:
        queue: that is looked at.
        arguments: of the queue, or None where the management API does not know them.
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
        """By the delivery limit that the management API tells, or else RabbitMQ's default.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        release, url = await client.release(), client.url
        try:
            async with asyncio.timeout(5), management_api(url, management_url) as api:
                found = await api.queue(url.vhost, queue)
                limit = await delivery_limit(api, url.vhost, queue, release=release)
        except (ManagementApiError, TimeoutError) as error:
            # Any release may have been told a limit.
            return cls(client, queue, DEFAULT_LIMIT, assumed=str(error) or "its management API is too slow")
        return cls(client, queue, limit, arguments=None if found is None else found.queue.arguments)

    def anew(self) -> DeliveryCountReset:
        """For another look at the same queue, which has no copies of this one's to recognise."""
        return DeliveryCountReset(
            self._client, self.queue, self._limit, assumed=self._assumed, arguments=self.arguments
        )

    def is_due(self, deliveries: int) -> bool:
        """Whether a message that was given back so often must not just be given back once more."""
        if self._limit is None:
            return False
        if deliveries and self._assumed is not None:
            log.warning(
                "the delivery limit of %r is not known: %d is assumed, and with a lower one messages that are looked "
                "at too often are lost (%s)",
                *(self.queue, self._limit, self._assumed),
            )
            self._assumed = None
        return deliveries >= self._limit - _MARGIN

    def is_copy(self, held: BrowsedMessage) -> bool:
        """Whether this message is a copy that was made here; each is recognised once."""
        if held.deliveries or not self._copies[held.message.id]:
            return False
        self._copies[held.message.id] -= 1
        return True

    async def renew(self, held: BrowsedMessage, ack: Callable[[BrowsedMessage], None]) -> None:
        """Send a copy to the end of the queue, and acknowledge the message once the broker has it, if that is due."""
        if not self.is_due(held.deliveries):
            return
        while len(self._sending) >= _AT_ONCE:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        self._copies[held.message.id] += 1
        task = asyncio.create_task(self._send(held, ack))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait for the copies on their way, and say how many could not be sent."""
        if self._sending:
            await asyncio.wait(set(self._sending))
        if self._refused:
            log.warning("%r loses %d of its messages if they are looked at again and again", self.queue, self._refused)

    async def _send(self, held: BrowsedMessage, ack: Callable[[BrowsedMessage], None]) -> None:
        try:
            await self._client.forward(redrive.uncounted(held.message, queue=self.queue))
            ack(held)
        except BideError as error:
            if not self._refused:
                log.warning(
                    "a message of %r was delivered %d times, its limit is %s, and the queue takes no copy of it: %s",
                    *(self.queue, held.deliveries + 1, self._limit, error),
                )
            self._refused += 1
