"""Sending copies of messages that cannot be sent on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from bide.client.client import Client
from bide.errors import InvalidInputError
from bide.messages.prepared import PreparedMessage

_SHORT_REASON: Final = 100
"""Characters of a reason that has to be shortened."""


async def send_aside(client: Client, reason: str, copy: Callable[[str | None], PreparedMessage]) -> None:
    """Send a copy with the reason. If the headers nearly fill a frame, send one with a shorter reason, or without one.

    Args:
        client: the client. Its infrastructure must not add the headers of a new message.
        reason: why the message cannot be sent on.
        copy: makes the copy with this reason; None: without a reason, see
            :func:`bide.delay.forwarding.set_aside_values`.

    Raises:
        BideError: as :meth:`bide.Client.publish`.
    """
    for text in dict.fromkeys((reason, reason[:_SHORT_REASON])):
        with suppress(InvalidInputError):
            await client.forward(copy(text))
            return
    await client.forward(copy(None))
