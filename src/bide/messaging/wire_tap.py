"""A wire tap: copies of the messages that pass an exchange."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bide.client.client import Client
from bide.patterns.conventions import wire_tap

if TYPE_CHECKING:
    from bide.client.consumer import Consumer


@asynccontextmanager
async def tap(client: Client, exchange: str, *, max_length: int = 10_000) -> AsyncIterator[Consumer]:
    """Receive copies of all messages that pass an exchange: ``async with tap(client, "app1.private") as messages``.

    Other consumers are not affected. The queue of the tap is deleted at the end of the block, or within an hour after a
    crash.

    Args:
        client: an open client.
        exchange: an exchange of type fanout, topic or headers.
        max_length: maximum number of unread copies; the broker drops the oldest ones.

    Raises:
        TargetNotFoundError: the exchange does not exist.
        BrokerError: the broker refuses.
    """
    topology = wire_tap(exchange, queue=f"{exchange}.tap.{secrets.token_hex(4)}", max_length=max_length)
    await client.declare(topology, external={exchange})
    try:
        async with client.consume(topology.queues[0].name) as messages:
            yield messages
    finally:
        await client.destroy(topology, force=True, external={exchange})
