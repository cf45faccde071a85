"""Delays by a temporary exchange and queue for each message.

Publisher and consumer for :func:`bide.patterns.delays.ephemeral_delay`. Use them for a delay now and then on a broker
where no delay infrastructure may stay. ``client.publish(..., delay=...)`` costs a small part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from bide.client.client import Client
from bide.client.message import KEPT_PROPERTIES, Message
from bide.client.publisher import Receipt
from bide.durations import DelayLike
from bide.errors import BideError, PublishInDoubtError
from bide.patterns.delays import ephemeral_delay
from bide.runtime.logs import logger
from bide.topology import Exchange, Queue, Topology

log = logger(__name__)

RETRIES_HEADER: Final = "ephemeral-retries"
"""Header with the number of times that a message was sent back to its queue."""


class EphemeralDelays:
    """Sends messages through an exchange and a queue that are there for this one message.

    The receiver calls :meth:`clear`, or :meth:`retry`, which does it too, before it settles the message. It is what
    removes quorum queues; classic ones go by themselves too, somewhat later.

    Args:
        prefix: starts the names.
        queue_type: ``quorum``, or ``classic`` for queues that expire and can lose what their target refuses.
        grace: of classic queues; see the pattern.
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
        """Send a message that comes to a queue, or to an exchange with its own routing key, after a delay.

        Args:
            properties: more arguments of :meth:`bide.Client.publish`.

        Raises:
            InvalidInputError: in one of its kinds; nothing was sent, and nothing is left behind.
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
            # The message is not in the queue, and no other program would ever delete the queue.
            await self._remove(topology)
            raise

    async def _remove(self, topology: Topology) -> None:
        try:
            await self._client.destroy(topology)
        except BideError as error:
            log.warning("the queue %s is left behind: %s", topology.queues[0].name, error)

    async def retry(self, message: Message, *, delay: DelayLike, to: str) -> Receipt:
        """Send a received message back to its queue after a delay, and acknowledge it.

        Its routing key becomes the queue's name; where it came from first stands in ``x-death``. The header
        :data:`RETRIES_HEADER` counts.

        Raises:
            BideError: as :meth:`send`; the message is not settled then.
        """
        headers = {name: value for name, value in message.headers.items() if name not in ("CC", "BCC")}
        headers[RETRIES_HEADER] = retries_of(message) + 1
        properties = {name: getattr(message, name) for name in KEPT_PROPERTIES}
        receipt = await self.send(message.body, delay=delay, to=to, headers=headers, **properties)
        await self.clear(message)
        await message.ack()
        return receipt

    async def clear(self, message: Message) -> bool:
        """Remove the exchange and the queue that a message came by; tell whether it came by any.

        Raises:
            NotEmptyError: something else was put into that queue.
            BrokerError: the broker refuses.
        """
        name = self._carrier(message.raw.values.get("headers") or {})
        if name is None:
            return False
        await self._client.destroy(Topology([Exchange(name, "fanout")], [Queue(name)]))
        return True

    def _carrier(self, headers: Mapping[str, Any]) -> str | None:
        deaths = headers.get("x-death")
        if not isinstance(deaths, list):
            return None
        names = (death.get("queue") for death in deaths if isinstance(death, Mapping))
        return next((one for one in names if isinstance(one, str) and one.startswith(f"{self._prefix}.")), None)


def retries_of(message: Message) -> int:
    """How often a message was sent back to its queue."""
    count = message.headers.get(RETRIES_HEADER, 0)
    return count if isinstance(count, int) and not isinstance(count, bool) else 0
