"""Received messages of a synchronous client, and their settlement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from bide.client.client_thread import ClientThread
from bide.client.message import Message
from bide.client.received_message import ReceivedMessage
from bide.messages.outgoing import OutgoingMessage, takes

if TYPE_CHECKING:
    from bide.client.publisher import Receipt
    from bide.delay.message_type import MessageType


class SyncMessage(ReceivedMessage):
    """A received message with the attributes of :class:`bide.Message`, and blocking methods to settle it.

    Attributes:
        body: the body.
        received_at: when this process received it.
        redelivered: whether the queue delivered it before.
        raw: the delivery with all properties and headers, as the broker sent it.
    """

    __slots__ = ("_thread",)

    def __init__(self, message: Message, thread: ClientThread) -> None:
        super().__init__(message.raw, message._subscription, message.received_at, message._conversation)  # noqa: SLF001 (its twin's)
        self._thread = thread

    def ack(self) -> None:
        """See :meth:`bide.Message.ack`."""
        self._thread.wait_for(self._ack())

    def requeue(self) -> None:
        """See :meth:`bide.Message.requeue`."""
        self._thread.wait_for(self._reject(requeue=True))

    def reject(self) -> None:
        """See :meth:`bide.Message.reject`."""
        self._thread.wait_for(self._reject(requeue=False))

    @takes(OutgoingMessage)
    def reply(self, message: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Message.reply`."""
        return self._thread.wait_for(self._sender.reply(self, message))

    @takes(OutgoingMessage)
    def send(self, message: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Message.send`."""
        return self._thread.wait_for(self._sender.send(self, message))

    def publish(
        self,
        event: MessageType | str,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        headers: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        content_type: str | None = None,
    ) -> Receipt:
        """See :meth:`bide.Message.publish`."""
        outgoing = OutgoingMessage(body, json=json, headers=headers, message_id=message_id, content_type=content_type)
        return self._thread.wait_for(self._sender.publish(self, event, outgoing))

    @contextmanager
    def process(self, *, requeue: bool = False) -> Iterator[Self]:
        """See :meth:`bide.Message.process`."""
        try:
            yield self
        except BaseException as error:
            self._thread.wait_for(self._end(error, requeue=requeue))
            raise
        self._thread.wait_for(self._end(None, requeue=requeue))
