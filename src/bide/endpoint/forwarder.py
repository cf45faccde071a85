"""Sending of the copies that replace received messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from bide.errors import BideError, BrokerError, ClosedError
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.messages.prepared import PreparedMessage

log = logger(__name__)

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 15.0


class Forwarder:
    """Publishes messages, and repeats until the broker confirms them.

    Args:
        endpoint: the endpoint's name, for log lines.
        forward: publishes a message and waits for the confirm.
    """

    def __init__(self, endpoint: str, forward: Callable[[PreparedMessage], Awaitable[Any]]) -> None:
        self._endpoint = endpoint
        self._forward = forward

    async def send(self, copy: PreparedMessage, *, final: tuple[type[BideError], ...] = ()) -> None:
        """Publish, and repeat until the broker confirms. The received message stays unsettled until then.

        Args:
            final: errors that are raised instead of repeating the publish.

        Raises:
            InvalidInputError: the message can never be sent.
            ClosedError: the client was closed.
            BideError: one of *final*.
        """
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await self._forward(copy)
            except ClosedError:
                raise
            except BrokerError as error:
                if isinstance(error, final):
                    raise
                log.error("%s: cannot forward %s yet: %s", self._endpoint, copy.message_id, error)
                await asyncio.sleep(backoff.next())  # until the broker can take it
            else:
                return
