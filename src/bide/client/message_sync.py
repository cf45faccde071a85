"""Received messages of a synchronous client, and their settlement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from bide.client.client_thread import ClientThread
from bide.client.message import Message, ReceivedMessage


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
        super().__init__(message.raw, message._subscription, message.received_at)  # noqa: SLF001 (its twin's)
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

    @contextmanager
    def process(self, *, requeue: bool = False) -> Iterator[Self]:
        """See :meth:`bide.Message.process`."""
        try:
            yield self
        except BaseException as error:
            self._thread.wait_for(self._end(error, requeue=requeue))
            raise
        self._thread.wait_for(self._end(None, requeue=requeue))
