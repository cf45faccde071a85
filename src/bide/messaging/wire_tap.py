"""A wire tap: listen to what passes an exchange, for as long as one likes."""

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
    """Copies of all messages that pass an exchange: ``async with tap(client, "app1.private") as messages``.

    Other consumers get neither more nor less. The tap's queue goes with the block, or within an hour after a crash.

    Args:
        exchange: of type fanout, topic or headers.
        max_length: how many copies wait to be read; more push the oldest out.

    Raises:
        TargetNotFoundError: there is no such exchange.
        BrokerError: the broker refuses.
    """
    topology = wire_tap(exchange, queue=f"{exchange}.tap.{secrets.token_hex(4)}", max_length=max_length)
    await client.declare(topology, external={exchange})
    try:
        async with client.consume(topology.queues[0].name) as messages:
            yield messages
    finally:
        await client.destroy(topology, force=True, external={exchange})
