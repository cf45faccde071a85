"""Delayed publishes over connections of aio-pika, which FastStream and taskiq use."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from aio_pika.exceptions import ChannelInvalidStateError, ChannelNotFoundEntity
from aio_pika.message import encode_expiration

from bide.delay.clock import Clock
from bide.delay.protocol import ExchangeTarget, Target
from bide.integrations.declarations import Declaration
from bide.integrations.delays import DelayedPublish, Delays

if TYPE_CHECKING:
    import aio_pika
    from aio_pika.abc import AbstractConnection, UnderlayConnection

Result = TypeVar("Result")


class AioPikaDelays:
    """:class:`bide.integrations.Delays` for connections of aio-pika.

    It declares the queues and bindings that a message needs on a channel of its own, so that a declaration that fails
    does not close the channel on which other messages are published.

    Args:
        infrastructure: the delay infrastructure; ``Clock()`` if None.
    """

    def __init__(self, infrastructure: Clock | None = None) -> None:
        self.delays = Delays(infrastructure)
        self._declaring = asyncio.Lock()

    async def publish(
        self,
        publish: Callable[[str, str, aio_pika.Message], Awaitable[Result]],
        message: aio_pika.Message,
        target: Target,
        *,
        connection: AbstractConnection,
        delay: timedelta,
        headers: Mapping[str, Any] | None = None,
    ) -> Result:
        """Declare everything that a delayed message needs, and publish the message.

        Args:
            publish: publishes a message to an exchange with a routing key, over this connection.
            message: the message without a delay; it is not changed.
            delay: the time from now to the delivery.
            headers: headers to add.

        Raises:
            InvalidInputError: as :meth:`bide.integrations.Delays.route`.
            AMQPError: from aio-pika: the target is missing, the broker refuses, or the connection is lost.
        """
        for is_last in (False, True):
            route = await self._prepare(connection, target, delay, _acting_properties(message))
            routed = copy.copy(message)
            routed.headers = {**route.properties["headers"], **(headers or {})}
            if route.hops:
                routed.priority = route.properties.get("priority", 0)
                routed.expiration = None
            try:
                return await publish(route.exchange, route.routing_key, routed)
            except ChannelNotFoundEntity:
                # An exchange was deleted.
                self.delays.forget((await _open(connection)).connection)
                if is_last:
                    raise
        raise AssertionError

    async def _prepare(
        self, connection: AbstractConnection, target: Target, delay: timedelta, properties: Mapping[str, Any]
    ) -> DelayedPublish:
        opened = (await _open(connection)).connection
        publish = self.delays.route(
            target, delay=delay, server_properties=opened.server_properties, properties=properties
        )
        if self._missing(publish, opened):
            async with self._declaring:
                # Checked again, because another message may have declared them meanwhile.
                if missing := self._missing(publish, opened):
                    channel = await opened.channel(publisher_confirms=False)
                    try:
                        if isinstance(target, ExchangeTarget):
                            # Checked first, because otherwise a missing exchange would still get a release queue.
                            await channel.exchange_declare(target.exchange, passive=True)
                        for one in missing:
                            await one.call(channel)
                    finally:
                        await channel.close()
                    self.delays.declared(publish, connection=opened)
        return publish

    def _missing(self, publish: DelayedPublish, opened: object) -> list[Declaration]:
        return list(self.delays.declarations(publish, connection=opened))


async def _open(connection: AbstractConnection) -> UnderlayConnection:
    """The aiormq connection that a connection of aio-pika uses. It is a new one after each reconnect."""
    if connection.is_closed:
        raise ChannelInvalidStateError("the connection is closed: connect again")
    await connection.ready()
    assert connection.transport is not None
    return connection.transport


def _acting_properties(message: aio_pika.Message) -> dict[str, Any]:
    """The properties of a message that matter while it waits, by their AMQP names."""
    properties: dict[str, Any] = {"headers": message.headers, "priority": message.priority}
    if (expiration := encode_expiration(message.expiration)) is not None:
        properties["expiration"] = expiration
    if message.message_id is not None:
        properties["message_id"] = message.message_id
    return properties
