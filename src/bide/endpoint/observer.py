"""Observers of an endpoint: the base class of event stream, metrics and tracing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.message import Message
    from bide.endpoint.event import Event


class Observer:
    """Receives the events of an endpoint. Override the methods that you need.

    Exceptions of an observer are logged and have no effect on the message.
    """

    async def started(self, client: Client) -> None:
        """Called before the endpoint receives its first message.

        Raises:
            BideError: the observer cannot work; the endpoint does not start.
        """

    def handling(self, message: Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Return a context for the handler of a message. It receives the handler's exception but cannot suppress it.

        Args:
            message: the message.
            endpoint: the endpoint's name.
            queue: the queue that the message came from.
        """
        return nullcontext()

    async def happened(self, event: Event) -> None:
        """Called when a message was processed, before it is settled with the broker."""
