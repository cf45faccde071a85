"""Look through a queue without taking anything out of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.content import Delivery
from bide.amqp.url import BrokerUrl
from bide.errors import BideError, BrokerError, TargetNotFoundError
from bide.recoverability.failed import FailedMessage
from bide.topology import Queue

log = logging.getLogger(__name__)

_QUIET: Final = 2.0
"""Seconds without a message after which no more is expected, though the broker had counted more."""

_LAST: Final = 0.2
"""Seconds for messages that the broker had not counted yet, because they had just been given back."""

_MOST_UNREAD: Final = 2000
_UNREAD_AGAIN: Final = 500
"""Bounds between which reading stops and goes on, so that a long queue does not fill our memory."""


@dataclass(frozen=True, slots=True)
class Held:
    """A message of the queue, as long as we look: it goes back at the end, unless it is acknowledged."""

    message: FailedMessage
    tag: int
    deliveries: int


class Look:
    """A look through a queue. Make it with :func:`looking`."""

    def __init__(self, connection: Connection, channel: Channel, queue: str, expected: int) -> None:
        self.expected = expected
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._unread: deque[Delivery] = deque()
        self._news = asyncio.Event()
        self._error: BideError | None = None
        self._last_tag = 0
        self._tag = ""
        self._holding = False

    async def start(self) -> None:
        """Have the broker send the queue's messages, without a limit.

        Raises:
            BrokerError: it refuses.
        """
        await self._channel.qos(0)
        self._tag = await self._channel.consume(self._queue, on_message=self.put, on_end=self.end)

    def put(self, delivery: Delivery) -> None:
        """The broker sent a message."""
        self._unread.append(delivery)
        self._last_tag = delivery.delivery_tag
        self._news.set()
        if len(self._unread) >= _MOST_UNREAD and not self._holding:
            self._holding = True
            self._connection.hold()

    def end(self, error: BideError) -> None:
        """The broker sends no more."""
        self._error = error
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Held]:
        """Every message that is in the queue now; those that come meanwhile may be among them.

        Raises:
            BrokerError: the connection broke, or the queue was deleted.
        """
        loop = asyncio.get_running_loop()
        seen = 0
        deadline: float | None = None
        while True:
            if not self._unread:
                if self._error is not None:
                    raise self._error
                if deadline is None and seen >= self.expected:
                    deadline = loop.time() + _LAST
                self._news.clear()
                try:
                    async with asyncio.timeout_at(deadline or loop.time() + _QUIET):
                        await self._news.wait()
                except TimeoutError:
                    return
                continue
            if deadline is not None and loop.time() > deadline:
                return
            delivery = self._unread.popleft()
            if self._holding and len(self._unread) <= _UNREAD_AGAIN:
                self._holding = False
                self._connection.go_on()
            seen += 1
            yield _held(delivery)

    def ack(self, held: Held) -> None:
        """The queue may forget this message.

        Raises:
            BrokerError: the connection broke: the message is still there.
        """
        self._channel.ack(held.tag)

    async def close(self) -> None:
        """Give back what was not acknowledged, in its old order."""
        try:
            if self._channel.is_open:
                self._channel.cancel_nowait(self._tag)
                self._unread.clear()
                if self._holding:
                    self._connection.go_on()
                if self._last_tag:
                    # Rather than closing alone: from RabbitMQ 4.3 on, this does not count as a failed delivery.
                    self._channel.nack(self._last_tag, multiple=True)
                await self._channel.close()
        except BideError as error:
            log.debug("the look at %s ended: %s", self._queue, error)
        finally:
            with suppress(BideError):
                await self._connection.close()


def _held(delivery: Delivery) -> Held:
    headers = delivery.values.get("headers") or {}
    count = headers.get("x-delivery-count", 0)
    message = FailedMessage.read(delivery.exchange, delivery.routing_key, delivery.values, delivery.body)
    return Held(message, delivery.delivery_tag, count if isinstance(count, int) else 0)


@asynccontextmanager
async def looking(url: BrokerUrl, queue: str) -> AsyncIterator[Look]:
    """Look through a queue, over a connection of its own.

    Others cannot receive its messages meanwhile. At the end all messages that were not acknowledged go back to their
    places.

    Raises:
        TargetNotFoundError: there is no such queue.
        BrokerError: the broker cannot be reached, refuses, or the queue is a stream.
    """
    connection = await Connection.open(url)
    try:
        channel = await connection.channel()
        try:
            counted = await channel.declare_queue(Queue(queue), passive=True)
        except TargetNotFoundError as error:
            raise TargetNotFoundError(
                f"there is no queue {queue!r} on the virtual host {url.vhost!r}: name another with --queue",
                reply_code=error.reply_code,
            ) from error
        look = Look(connection, channel, queue, counted.message_count)
        try:
            await look.start()
        except BrokerError as error:
            if "stream" in str(error):
                raise BrokerError(f"{queue!r} is a stream: nothing can be taken out of it", reply_code=540) from error
            raise
    except BaseException:
        await connection.close()
        raise
    try:
        yield look
    finally:
        await look.close()
