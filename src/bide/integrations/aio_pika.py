"""Delayed publishes over connections of aio-pika, which FastStream and taskiq use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aio_pika.exceptions import ChannelInvalidStateError

from bide.delay.protocol import DelayInfrastructure, ExchangeTarget, Target
from bide.integrations.declarations import Declaration
from bide.integrations.delays import DelayedPublish, Delays

if TYPE_CHECKING:
    from aio_pika.abc import AbstractConnection, UnderlayConnection


class AioPikaDelays:
    """:class:`bide.integrations.Delays` for connections of aio-pika.

    It declares what messages need on channels of its own. A declaration that fails then does not close the channel that
    other messages are published on.

    Args:
        infrastructure: the delay infrastructure; ``Clock()`` if None.
    """

    def __init__(self, infrastructure: DelayInfrastructure | None = None) -> None:
        self.delays = Delays(infrastructure)
        self._declaring = asyncio.Lock()

    async def prepare(
        self, connection: AbstractConnection, target: Target, *, delay: timedelta, properties: Mapping[str, Any]
    ) -> DelayedPublish:
        """What to publish for a message that is delayed from now on, once everything that it needs is declared.

        Args:
            properties: the message's properties by their AMQP names.

        Raises:
            InvalidInputError: as :meth:`bide.integrations.Delays.route`.
            AMQPError: of aio-pika: the target is missing, the broker refuses, or the connection is lost.
        """
        opened = (await _open(connection)).connection
        publish = self.delays.route(
            target, delay=delay, server_properties=opened.server_properties, properties=properties
        )
        if self._missing(publish, opened):
            async with self._declaring:
                # Another message may have declared it meanwhile.
                if missing := self._missing(publish, opened):
                    channel = await opened.channel(publisher_confirms=False)
                    try:
                        if isinstance(target, ExchangeTarget):
                            # The release queue of an exchange that is missing would be declared all the same.
                            await channel.exchange_declare(target.exchange, passive=True)
                        for one in missing:
                            await one.call(channel)
                    finally:
                        await channel.close()
                    self.delays.declared(publish, connection=opened)
        return publish

    async def forget(self, connection: AbstractConnection) -> None:
        """Declare everything again before the next message: an exchange of the infrastructure was missing."""
        self.delays.forget((await _open(connection)).connection)

    def _missing(self, publish: DelayedPublish, opened: object) -> list[Declaration]:
        return list(self.delays.declarations(publish, connection=opened))


async def _open(connection: AbstractConnection) -> UnderlayConnection:
    """The connection of aiormq below one of aio-pika, which has a new one after each loss of it."""
    if connection.is_closed:
        raise ChannelInvalidStateError("the connection is closed: connect again")
    await connection.ready()
    assert connection.transport is not None
    return connection.transport
