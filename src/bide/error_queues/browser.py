"""Look through a queue without taking anything out of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.url import BrokerUrl
from bide.delay.recognition import refusal
from bide.error_queues.browsed_message import BrowsedMessage, deliveries_of
from bide.error_queues.delay_queues import holds_waiting
from bide.error_queues.delivery_count import DeliveryCountReset
from bide.error_queues.stream_check import is_stream, stream_error
from bide.errors import BideError, BrokerError, TargetNotFoundError
from bide.runtime.logs import logger
from bide.topology import Queue

log = logger(__name__)

_QUIET: Final = 0.1
"""Seconds without a message after which the broker is asked whether there are more."""

_PATIENCE: Final = 5.0
"""Seconds without a message after which we give up, though the broker counts more: others get them, or nobody can."""

_NEWCOMERS: Final = 1000
"""So many more than there were at the beginning, or a tenth more, are looked at in a queue that others fill."""

_GIVING_BACK: Final = 2.0
"""Seconds to wait until the broker counts what was given back, so that the next look finds it."""

_STEP: Final = 0.005

_TOGETHER: Final = 32
"""Messages that are given back by one command."""

_BLOCK: Final = 512
"""Messages after which we wait for the broker: RabbitMQ merges commands of which more than 32 are on their way."""

PREFETCH: Final = 50_000
"""Messages of one consumer. Quorum queues take "no limit" for 2,000; so another consumer is started when it is full."""

_MOST_UNREAD: Final = 2000
_UNREAD_AGAIN: Final = 500
_MOST_UNREAD_BYTES: Final = 64 << 20
"""Bounds between which reading stops and goes on, so that a long queue does not fill our memory."""


class QueueBrowser:
    """A look through a queue. Make it with :func:`looking`.

    Attributes:
        expected: messages that were ready at the beginning.
        others: other consumers that the queue had then: what they hold is not seen.
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        queue: str,
        renewal: DeliveryCountReset,
        *,
        expected: int,
        others: int,
        prefetch: int,
    ) -> None:
        self.expected = expected
        self.others = others
        self._prefetch = prefetch
        self._capacity = 0
        self._holds_waiting = False
        self._renewal = renewal
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._unread: deque[Delivery] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._error: BideError | None = None
        self._received = 0
        self._acknowledged: set[int] = set()
        self._tags: list[str] = []
        self._holding = False
        self._questions = 0

    async def start(self) -> None:
        """Have the broker send messages, or as many more of them as it has sent.

        Raises:
            BrokerError: it refuses.
        """
        prefetch = min(max(self._prefetch, self._capacity), PREFETCH)
        with self._asking():
            await self._channel.qos(prefetch)
            self._tags.append(await self._channel.consume(self._queue, on_message=self.put, on_end=self.end))
        self._capacity += prefetch

    def put(self, delivery: Delivery) -> None:
        """The broker sent a message."""
        self._unread.append(delivery)
        self._unread_bytes += len(delivery.body)
        self._received = delivery.delivery_tag
        self._news.set()
        self._hold_if_due()

    def end(self, error: BideError) -> None:
        """The broker sends no more."""
        self._error = error
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[BrowsedMessage]:
        """Every message that is in the queue now; those that come meanwhile may be among them.

        Raises:
            DelayQueueError: its messages wait in it for their due times.
            BrokerError: the connection broke, the queue was deleted, or it is a stream.
        """
        seen, most = 0, self.expected + max(_NEWCOMERS, self.expected // 10)
        idle = 0.0
        while seen < most:
            if self._unread:
                idle = 0.0
                seen += 1
                delivery = self._next()
                if holds_waiting(delivery):
                    self._holds_waiting = True
                    raise refusal(self._queue, "waiting")
                held = BrowsedMessage.of(delivery)
                if not self._renewal.is_copy(held):
                    yield held
                continue
            if self._error is not None:
                raise self._error
            self._news.clear()
            if self._received - len(self._acknowledged) >= self._capacity:
                await self.start()
            try:
                async with asyncio.timeout(_QUIET):
                    await self._news.wait()
            except TimeoutError:
                idle += _QUIET
                # Those that are not ready any more, but have not come, may be on their way to us.
                if idle >= _PATIENCE or (seen >= self.expected and not await self._ready()):
                    break
        if not seen:
            await self._refuse_stream()

    def _next(self) -> Delivery:
        delivery = self._unread.popleft()
        self._unread_bytes -= len(delivery.body)
        few = len(self._unread) <= _UNREAD_AGAIN and self._unread_bytes <= _MOST_UNREAD_BYTES // 2
        if self._holding and (few or not self._unread):
            self._holding = False
            self._connection.go_on()
        return delivery

    def _hold_if_due(self) -> None:
        many = len(self._unread) >= _MOST_UNREAD or self._unread_bytes >= _MOST_UNREAD_BYTES
        if many and not self._holding and not self._questions:
            self._holding = True
            self._connection.hold()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """While the broker is asked something we read, whatever comes before the answer."""
        self._questions += 1
        try:
            yield
        finally:
            self._questions -= 1
            self._hold_if_due()

    async def _ready(self) -> int:
        with self._asking():
            return int((await self._channel.declare_queue(Queue(self._queue), passive=True)).message_count)

    async def _refuse_stream(self) -> None:
        try:
            found = await is_stream(self._connection, self._queue)
        except BrokerError as error:
            log.debug("%s cannot be asked for a single message: %s", self._queue, error)
        else:
            if found:
                raise stream_error(self._queue)

    def ack(self, held: BrowsedMessage) -> None:
        """The queue may forget this message.

        Raises:
            BrokerError: the connection broke: the message is still there.
        """
        self._channel.ack(held.tag)
        self._acknowledged.add(held.tag)

    async def release(self, held: BrowsedMessage) -> None:
        """Leave this message in the queue: every one that is not acknowledged, as soon as that is clear."""
        await self._renewal.renew(held, self.ack)

    async def close(self) -> None:
        """Give back what was not acknowledged, in its old order."""
        try:
            if self._channel.is_open:
                await self._release_unread()
                await self._give_back()
                await self._channel.close()
        except BideError as error:
            log.debug("the look at %s ended: %s", self._queue, error)
        finally:
            with suppress(BideError):
                await self._connection.close()

    async def _release_unread(self) -> None:
        # What nobody asked for any more was delivered all the same, and the queue counts that.
        ending = asyncio.create_task(self._cancel())
        while self._unread or not ending.done():
            if self._unread:
                delivery = self._next()
                # A copy of a message that waits for its due time would wait from now on.
                is_due = self._renewal.is_due(deliveries_of(delivery)) and not self._holds_waiting
                if is_due and not self._renewal.is_copy(held := BrowsedMessage.of(delivery)):
                    await self.release(held)
            else:
                self._news.clear()
                await self._news.wait()
        await ending
        await self._renewal.finish()

    async def _cancel(self) -> None:
        try:
            for tag in self._tags:
                await self._channel.cancel(tag)
        finally:
            self._news.set()

    async def _give_back(self) -> None:
        """Give back in small steps, in the order of the queue.

        By one command, 50,000 messages kept a quorum queue of RabbitMQ 3.10.8 busy for minutes, in which it showed
        none: it opened its files anew for one message after the other. In small steps that was not seen.
        """
        tags = [tag for tag in range(1, self._received + 1) if tag not in self._acknowledged]
        if not tags:
            return
        before, wait = await self._ready(), True
        for start in range(0, len(tags), _BLOCK):
            block = tags[start : start + _BLOCK]
            for place in range(0, len(block), _TOGETHER):
                # Only what is still ours may be named. Rather than closing alone: from RabbitMQ 4.3 on, this does not
                # count as a failed delivery.
                self._channel.nack(block[place : place + _TOGETHER][-1], multiple=True)
            wait = wait and await self._counts(before + start + len(block))

    async def _counts(self, number: int) -> bool:
        """Wait until the broker counts so many messages; False if others seem to take them."""
        deadline = asyncio.get_running_loop().time() + _GIVING_BACK
        while await self._ready() < number:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_STEP)
        return True


@asynccontextmanager
async def looking(
    url: BrokerUrl, queue: str, renewal: DeliveryCountReset, *, prefetch: int = PREFETCH
) -> AsyncIterator[QueueBrowser]:
    """Look through a queue, over a connection of its own.

    Others cannot receive its messages meanwhile. At the end all messages that were not acknowledged go back to their
    places.

    Args:
        prefetch: messages that the broker sends at first. It sends more when these are held.

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
                f"there is no queue {queue!r} on the virtual host {url.vhost!r}",
                reply_code=error.reply_code,
            ) from error
        expected, others = counted.message_count, counted.consumer_count
        look = QueueBrowser(connection, channel, queue, renewal, expected=expected, others=others, prefetch=prefetch)
        await look.start()
    except BaseException:
        await connection.close()
        raise
    try:
        yield look
    finally:
        await look.close()
