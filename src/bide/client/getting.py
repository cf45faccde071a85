"""Single messages of queues (``basic.get``), on channels that stay open."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.delivery import Delivery
from bide.amqp.reply_codes import is_refusal
from bide.client.conversation import Conversation
from bide.client.message import Message
from bide.client.private_queues import PrivateQueues
from bide.client.reconnecting import ReconnectingConnection
from bide.client.subscription import DeliveryChannel
from bide.delay.protocol import check_name
from bide.errors import ConnectionLostError

_MAX_CHANNELS: Final = 100
"""With this many open channels, a new channel replaces one without unsettled messages."""


class Getting:
    """Gets single messages. Each queue has its own channel, because the broker closes a channel for an error.

    The channels stay open: closing a channel right after an acknowledgement can lose the acknowledgement.
    """

    def __init__(self, reconnecting: ReconnectingConnection, private_queues: PrivateQueues) -> None:
        self._reconnecting = reconnecting
        self._private_queues = private_queues
        self._channels: dict[str, DeliveryChannel] = {}

    async def get(self, queue: str, conversation: Conversation) -> Message | None:
        """The next message of a queue, or None.

        Args:
            conversation: sends the replies, commands and events that the message causes.

        Raises:
            BideError: as :meth:`bide.Client.get`.
        """
        check_name("queue", queue)
        while True:
            connection = await self._reconnecting.connection()
            try:
                source = await self._channel(queue)
                delivery = await _get(source.channel, queue)
            except ConnectionLostError as error:
                # If a message was on its way, it is back in its queue, because the connection was lost.
                if connection.is_open or is_refusal(error):
                    raise
            else:
                if delivery is None:
                    return None
                source.delivered()
                return Message(delivery, source, connection.now(), conversation)

    async def _channel(self, queue: str) -> DeliveryChannel:
        # Popping and inserting keeps the channels in the order of their last use.
        found = self._channels.pop(queue, None)
        if found is None or not found.channel.is_open:
            await self._close_idle()
            connection = await self._reconnecting.connection()
            await self._private_queues.ensure(connection, queue)
            found = DeliveryChannel(await connection.channel())
        self._channels[queue] = found
        return found

    async def _close_idle(self) -> None:
        if len(self._channels) < _MAX_CHANNELS:
            return
        idle = next((name for name, one in self._channels.items() if not one.unsettled), None)
        if idle is not None:
            await self._channels.pop(idle).channel.close()


async def _get(channel: Channel, queue: str) -> Delivery | None:
    getting = asyncio.ensure_future(channel.get(queue))
    try:
        return await asyncio.shield(getting)
    except asyncio.CancelledError:
        # The broker may have sent a message already, which nothing would settle.
        getting.add_done_callback(partial(_give_back, channel))
        raise


def _give_back(channel: Channel, getting: asyncio.Future[Delivery | None]) -> None:
    if getting.cancelled() or getting.exception() is not None or not channel.is_open:
        return
    delivery = getting.result()
    if delivery is not None:
        channel.nack(delivery.delivery_tag)
