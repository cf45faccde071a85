"""Receiving: an endless sequence of messages that outlives its connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from bide.amqp.channel import Channel, Delivery
from bide.checks import whole_number
from bide.delay.infrastructure import check_name
from bide.errors import (
    AccessRefusedError,
    BideError,
    BrokerError,
    ClosedError,
    ConsumerCancelledError,
    TargetNotFoundError,
)
from bide.link import Link
from bide.message import Message

log = logging.getLogger(__name__)

MAX_PREFETCH: Final = 65535


class Consumer:
    """Messages of one queue, as an asynchronous iterator.

    It subscribes at the first message asked for. When the connection breaks it subscribes again; what it had received
    and not yet handed out is dropped then, because the broker delivers it again. Close it, or leave its ``async with``
    block, to give unsettled messages back.

    Args:
        prefetch: at most this many unsettled messages, 1 to 65,535.
        arguments: of the consumer, such as ``x-priority`` or ``x-stream-offset``.
        exclusive: refuse to share the queue with other consumers.
    """

    def __init__(
        self,
        link: Link,
        queue: str,
        *,
        prefetch: int = 100,
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
    ) -> None:
        check_name("queue", queue)
        self.queue = queue
        self._link = link
        self._prefetch = whole_number("prefetch", prefetch, 1, MAX_PREFETCH)
        self._arguments = arguments
        self._exclusive = exclusive
        self._channel: Channel | None = None
        self._inbox: asyncio.Queue[tuple[Delivery, datetime] | BideError] = asyncio.Queue()
        self._was_subscribed = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        await self._subscribe()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> Message:
        while not self._closed:
            if self._channel is None:
                await self._subscribe()
            channel = self._channel
            item = await self._inbox.get()
            if isinstance(item, BideError):
                await self._ended(item)
            else:
                delivery, received_at = item
                return Message(delivery, channel, received_at)
        raise StopAsyncIteration

    async def close(self) -> None:
        """Stop: what was not settled goes back to the queue."""
        if self._closed:
            return
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            await channel.close()
        self._inbox.put_nowait(ClosedError("the consumer was closed"))

    async def _subscribe(self) -> None:
        """Start consuming.

        Raises:
            TargetNotFoundError: the queue does not exist; after a lost connection this is waited out instead.
            AccessRefusedError: this user may not read from it, or another consumer has it for itself.
        """
        while not self._closed:
            connection = await self._link.connection()
            inbox: asyncio.Queue[tuple[Delivery, datetime] | BideError] = asyncio.Queue()
            self._inbox = inbox
            try:
                channel = await connection.channel()
                await channel.qos(self._prefetch)
                await channel.consume(
                    self.queue,
                    on_message=lambda delivery, inbox=inbox: inbox.put_nowait(  # type: ignore[misc]
                        (delivery, datetime.now(UTC))
                    ),
                    on_end=inbox.put_nowait,
                    arguments=self._arguments,
                    exclusive=self._exclusive,
                )
            except BrokerError as error:
                if connection.is_open and isinstance(error, TargetNotFoundError | AccessRefusedError):
                    raise
                if connection.is_open and not self._was_subscribed:
                    raise
                log.info("cannot consume from %s yet: %s", self.queue, error)
                await asyncio.sleep(0.1)  # the connection is back, the queue's leader may not be
                continue
            self._channel = channel
            self._was_subscribed = True
            return

    async def _ended(self, error: BideError) -> None:
        channel, self._channel = self._channel, None
        if self._closed:
            return
        if isinstance(error, ConsumerCancelledError):
            if channel is not None and channel.is_open:
                await channel.close()
            raise error
        if channel is not None and channel.connection.is_open:
            # The broker closed this channel alone: an acknowledgement timeout, or a wrong settlement.
            log.warning("the broker closed the channel of the consumer of %s: %s", self.queue, error)
        else:
            log.info("consuming from %s again after: %s", self.queue, error)
