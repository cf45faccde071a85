"""Delays through a temporary exchange and queue for each message.

Publisher and consumer for :func:`bide.patterns.delays.ephemeral_delay`. Use them for occasional delays on a broker
where no delay infrastructure may be declared. ``client.publish(..., delay=...)`` is much cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from bide.client.client import Client
from bide.client.message import Message
from bide.client.publisher import Receipt
from bide.client.received_message import KEPT_PROPERTIES
from bide.durations import DelayLike
from bide.errors import BideError, PublishInDoubtError
from bide.patterns.delays import ephemeral_delay
from bide.runtime.logs import logger
from bide.topology import Exchange, Queue, Topology

log = logger(__name__)

RETRIES_HEADER: Final = "ephemeral-retries"
"""Header with the number of retries of a message."""


class EphemeralDelays:
    """Sends each message through an exchange and a queue that are declared for it alone.

    The receiver has to call :meth:`clear` before it settles a message, or :meth:`retry`, which does the same. Without
    these calls, quorum queues remain for good; classic queues expire.

    Args:
        client: publishes the messages.
        prefix: the start of the names of exchanges and queues.
        queue_type: ``quorum``, or ``classic`` for queues that expire, and that lose a message if its target refuses it.
        grace: how long a classic queue outlives its message; see the pattern.
    """

    def __init__(
        self,
        client: Client,
        *,
        prefix: str = "bide.ephemeral",
        queue_type: str = "quorum",
        grace: DelayLike | None = None,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._queue_type = queue_type
        self._grace = grace

    async def send(
        self,
        body: bytes | str | None = None,
        *,
        delay: DelayLike,
        to: str | None = None,
        exchange: str | None = None,
        routing_key: str = "",
        **properties: Any,
    ) -> Receipt:
        """Send a message to a queue, or to an exchange with its own routing key, after a delay.

        Args:
            body: as for :meth:`bide.Client.publish`.
            delay: how long the message waits.
            to: the target queue.
            exchange: the target exchange, instead of a queue.
            routing_key: the routing key for the exchange.
            properties: other arguments of :meth:`bide.Client.publish`.

        Raises:
            InvalidInputError: an argument is invalid; nothing was sent or declared.
            BideError: as :meth:`bide.Client.publish`.
        """
        topology = ephemeral_delay(
            f"{self._prefix}.{uuid4().hex}",
            delay=delay,
            to=to,
            exchange=exchange,
            queue_type=self._queue_type,
            grace=self._grace,
        )
        await self._client.declare(topology, external={to or str(exchange)})
        try:
            return await self._client.publish(
                body, exchange=topology.exchanges[0].name, routing_key=routing_key or to or "", **properties
            )
        except PublishInDoubtError:
            raise
        except BideError:
            # The message is not in the queue, so no receiver would ever delete the queue.
            await self._remove(topology)
            raise

    async def _remove(self, topology: Topology) -> None:
        try:
            await self._client.destroy(topology)
        except BideError as error:
            log.warning("the queue %s could not be deleted: %s", topology.queues[0].name, error)

    async def retry(self, message: Message, *, delay: DelayLike, to: str) -> Receipt:
        """Send a received message to its queue again after a delay, and acknowledge it.

        Its routing key becomes the name of the queue; ``x-death`` has the original one. The header
        :data:`RETRIES_HEADER` counts the retries.

        Raises:
            BideError: as :meth:`send`; the message stays unsettled.
        """
        headers = {name: value for name, value in message.headers.items() if name not in ("CC", "BCC")}
        headers[RETRIES_HEADER] = retries_of(message) + 1
        properties = {name: getattr(message, name) for name in KEPT_PROPERTIES}
        receipt = await self.send(message.body, delay=delay, to=to, headers=headers, **properties)
        await self.clear(message)
        await message.ack()
        return receipt

    async def clear(self, message: Message) -> bool:
        """Delete the temporary exchange and queue of a received message. False if it did not come through any.

        Raises:
            NotEmptyError: the queue has other messages.
            BrokerError: the broker refuses.
        """
        name = self._temporary_name(message.raw.values.get("headers") or {})
        if name is None:
            return False
        await self._client.destroy(Topology([Exchange(name, "fanout")], [Queue(name)]))
        return True

    def _temporary_name(self, headers: Mapping[str, Any]) -> str | None:
        deaths = headers.get("x-death")
        if not isinstance(deaths, list):
            return None
        names = (death.get("queue") for death in deaths if isinstance(death, Mapping))
        return next((one for one in names if isinstance(one, str) and one.startswith(f"{self._prefix}.")), None)


def retries_of(message: Message) -> int:
    """The number of retries of a message."""
    count = message.headers.get(RETRIES_HEADER, 0)
    return count if isinstance(count, int) and not isinstance(count, bool) else 0
