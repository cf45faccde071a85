"""Who wants to know what an endpoint does: the events stream, metrics, traces, or anything of the user's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bide.client.client import Client
    from bide.client.message import Message
    from bide.endpoint.event import Event


class Observer:
    """Told of every message. Override what is of interest.

    What it raises is logged and changes nothing for the message.
    """

    async def started(self, client: Client) -> None:
        """The endpoint is about to receive its first message.

        Raises:
            BideError: it cannot do its work; the endpoint does not start.
        """

    def handling(self, message: Message, *, endpoint: str, queue: str) -> AbstractContextManager[None]:
        """Entered before the message's handler is called and left after it, with the exception if it failed.

        It cannot hold that exception back.

        Args:
            endpoint: its name.
            queue: the queue that the message came from.
        """
        return nullcontext()

    async def happened(self, event: Event) -> None:
        """A message left the endpoint's hands. It is settled with the broker only after this returns."""
