"""Sending of the copies that replace received messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bide.errors import BideError, BrokerError, ClosedError
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.messages.prepared import PreparedMessage

log = logger(__name__)


class Forwarder:
    """Publishes messages, and repeats until the broker confirms them.

    Args:
        name: the name of the endpoint or queue, for log lines.
        forward: publishes a message and waits for the confirm.
        first_pause: seconds until the second publish; later pauses are longer.
        longest_pause: seconds of the longest pause.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[PreparedMessage], Awaitable[Any]],
        *,
        first_pause: float = 0.5,
        longest_pause: float = 15.0,
    ) -> None:
        self._name = name
        self._forward = forward
        self._pauses = (first_pause, longest_pause)

    async def send(self, copy: PreparedMessage, *, final: tuple[type[BideError], ...] = ()) -> None:
        """Publish, and repeat until the broker confirms. The received message stays unsettled until then.

        Args:
            final: errors that are raised instead of repeating the publish.

        Raises:
            InvalidInputError: the message can never be sent.
            ClosedError: the client was closed.
            BideError: one of *final*.
        """
        backoff = Backoff(*self._pauses)
        while True:
            try:
                await self._forward(copy)
            except ClosedError:
                raise
            except BrokerError as error:
                if isinstance(error, final):
                    raise
                log.error("%s: cannot forward %s yet: %s", self._name, copy.message_id, error)
                await asyncio.sleep(backoff.next())  # until the broker can take it
            else:
                return
