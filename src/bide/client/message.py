"""Received messages of an asynchronous client, and their settlement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from bide.client.received_message import ReceivedMessage
from bide.messages.outgoing import OutgoingMessage, takes

if TYPE_CHECKING:
    from bide.client.publisher import Receipt
    from bide.delay.message_type import MessageType


class Message(ReceivedMessage):
    """A received message as it was sent, without the changes of a delay infrastructure.

    Settle it once: :meth:`ack`, :meth:`requeue` or :meth:`reject`. An unsettled message returns to its queue when the
    consumer or its connection closes, or when nothing refers to message and consumer anymore.

    Attributes:
        body: the body.
        received_at: when this process received it.
        redelivered: whether the queue delivered it before.
        raw: the delivery with all properties and headers, as the broker sent it.
    """

    __slots__ = ()

    async def ack(self) -> None:
        """Acknowledge the message: the queue deletes it.

        Raises:
            DeliveryLostError: the connection that delivered it was lost; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._ack()

    async def requeue(self) -> None:
        """Return the message to the queue, which delivers it again. A quorum queue counts this for its delivery limit.

        Raises:
            DeliveryLostError: the connection that delivered it was lost; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._reject(requeue=True)

    async def reject(self) -> None:
        """Reject the message: the queue dead-letters it, or drops it if it has no dead-letter exchange.

        Raises:
            DeliveryLostError: the connection that delivered it was lost; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._reject(requeue=False)

    @takes(OutgoingMessage)
    async def reply(self, message: OutgoingMessage) -> Receipt:
        """Send a reply, and wait for its confirm. The parameters are the fields of :class:`OutgoingMessage`.

        The reply goes to this message's address for replies, with this message's correlation id. With the layout
        ``NServiceBus``, it continues the conversation and finds the saga that sent this message. A handler that is
        retried replies again.

        Args:
            to: a queue that gets the reply instead.

        Raises:
            InvalidInputError: this message has no address for replies, or a value is invalid.
            BideError: as :meth:`bide.Client.publish`.
        """
        return await self._sender.reply(self, message)

    @takes(OutgoingMessage)
    async def send(self, message: OutgoingMessage) -> Receipt:
        """Send a command that this message causes, as :meth:`bide.Client.publish` does.

        With the layout ``NServiceBus``, the command continues the conversation. A handler that is retried sends again.

        Raises:
            BideError: as :meth:`bide.Client.publish`.
        """
        return await self._sender.send(self, message)

    async def publish(
        self,
        event: MessageType | str,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        headers: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        content_type: str | None = None,
    ) -> Receipt:
        """Publish an event that this message causes, to the endpoints that subscribe to its type.

        An event without subscribers is dropped. This needs the layout ``NServiceBus``.

        Args:
            event: the type, with its base class and interfaces, whose subscribers receive the event too; or the full
                name of a class that has none.
            body: bytes, or text that is sent as UTF-8.
            json: instead of a body, any value that serialises as JSON.
            message_id: the message id; None generates one.

        Raises:
            InvalidInputError: a value is invalid.
            UnsupportedTargetError: the layout has no rule for events.
            BideError: as :meth:`bide.Client.publish`.
        """
        outgoing = OutgoingMessage(body, json=json, headers=headers, message_id=message_id, content_type=content_type)
        return await self._sender.publish(self, event, outgoing)

    @asynccontextmanager
    async def process(self, *, requeue: bool = False) -> AsyncIterator[Self]:
        """Acknowledge the message at the end of the block, or reject it if an exception ends the block.

        ``async with message.process(): ...``. The exception is raised again. If the block is cancelled, the message
        returns to its queue. A message that was settled within the block stays as it is. For retries with delays, use
        :class:`bide.Endpoint`.

        Args:
            requeue: after an exception, :meth:`requeue` the message instead of rejecting it. A queue without a
                dead-letter exchange drops rejected messages.

        Raises:
            DeliveryLostError: the block succeeded, but the connection that delivered the message was lost; the broker
                delivers it again.
        """
        try:
            yield self
        except BaseException as error:
            await self._end(error, requeue=requeue)
            raise
        await self._end(None, requeue=requeue)
