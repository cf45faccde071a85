"""A queue browser: reads the messages of a queue and leaves them there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.queue_counts import queue_counts
from bide.amqp.url import BrokerUrl
from bide.error_queues.browsed_message import BrowsedMessage, deliveries_of
from bide.error_queues.delay_queues import refuse_waiting
from bide.error_queues.delivery_count import DeliveryCountReset
from bide.error_queues.stream_check import is_stream, stream_error
from bide.errors import BideError, BrokerError, TargetNotFoundError
from bide.runtime.logs import logger
from bide.topology import Queue

log = logger(__name__)

_QUIET: Final = 0.1
"""Seconds without a message after which the broker is asked whether more are ready."""

_TIMEOUT: Final = 5.0
"""Seconds without a message after which browsing ends although the broker counts more: other consumers receive them, or
the queue cannot deliver them."""

_MAX_NEW: Final = 1000
"""The limit for messages that arrive while browsing, or a tenth of the initial number of messages if that is more."""

_REQUEUE_TIMEOUT: Final = 5.0
"""Seconds to wait until the broker counts the requeued messages as ready, so that the next browser finds them."""

_POLL_INTERVAL: Final = 0.005
"""Seconds between two counts of ready messages: the broker does not report when it has requeued messages."""

_PER_NACK: Final = 32
"""Messages that one basic.nack requeues."""

_PER_WAIT: Final = 512
"""Messages after which the browser waits until they are requeued. RabbitMQ merges nacks if more than 32 are pending,
and the merged ones would requeue more messages than :data:`_PER_NACK` allows."""

PREFETCH: Final = 50_000
"""Prefetch of one consumer. When that many messages are unacknowledged, the browser starts another consumer.

Without a prefetch, a quorum queue would deliver only 2,000 messages.
"""

_PAUSE_AT: Final = 2000
_RESUME_AT: Final = 500
_PAUSE_AT_BYTES: Final = 64 << 20
"""Unread messages, and their bytes, at which reading from the connection pauses and resumes, to limit memory."""


class QueueBrowser:
    """Reads the messages of a queue. Create it with :func:`browse`.

    Attributes:
        expected: number of messages that were ready at the start.
        others: number of other consumers at the start. Messages that they hold are not seen.
    """

    def __init__(
        self,
        connection: Connection,
        channel: Channel,
        queue: str,
        count_reset: DeliveryCountReset,
        *,
        expected: int,
        others: int,
        prefetch: int,
    ) -> None:
        self.expected = expected
        self.others = others
        self._prefetch = prefetch
        self._capacity = 0
        self._count_reset = count_reset
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._unread: deque[Delivery] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._error: BideError | None = None
        self._received = 0
        self._acknowledged: set[int] = set()
        self._tags: list[str] = []
        self._paused = False
        self._pending_requests = 0

    async def start(self) -> None:
        """Start a consumer. Each further consumer doubles the total prefetch, but adds at most :data:`PREFETCH`.

        Raises:
            BrokerError: the broker refuses.
        """
        prefetch = min(max(self._prefetch, self._capacity), PREFETCH)
        with self._request():
            await self._channel.qos(prefetch)
            self._tags.append(await self._channel.consume(self._queue, on_message=self.put, on_end=self.end))
        self._capacity += prefetch

    def put(self, delivery: Delivery) -> None:
        """Receive a message from the broker."""
        self._unread.append(delivery)
        self._unread_bytes += len(delivery.body)
        self._received = delivery.delivery_tag
        self._changed.set()
        self._pause_if_full()

    def end(self, error: BideError) -> None:
        """Record that the broker stopped sending messages."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[BrowsedMessage]:
        """Yield every message that is in the queue now, and perhaps some that arrive meanwhile.

        Raises:
            DelayQueueError: the queue holds delayed messages.
            BrokerError: the connection was lost, or the queue was deleted or is a stream.
        """
        seen, most = 0, self.expected + max(_MAX_NEW, self.expected // 10)
        idle = 0.0
        while seen < most:
            if self._unread:
                idle = 0.0
                seen += 1
                delivery = self._next()
                refuse_waiting(delivery, self._count_reset)
                held = BrowsedMessage.of(delivery)
                if not self._count_reset.is_copy(held):
                    yield held
                continue
            if self._error is not None:
                raise self._error
            self._changed.clear()
            if self._received - len(self._acknowledged) >= self._capacity:
                await self.start()
            try:
                async with asyncio.timeout(_QUIET):
                    await self._changed.wait()
            except TimeoutError:
                idle += _QUIET
                # Messages that are no longer ready but have not arrived yet may be on their way to this consumer.
                if idle >= _TIMEOUT or (seen >= self.expected and await self._is_empty()):
                    break
        if not seen:
            await self._refuse_stream()

    def _next(self) -> Delivery:
        delivery = self._unread.popleft()
        self._unread_bytes -= len(delivery.body)
        few = len(self._unread) <= _RESUME_AT and self._unread_bytes <= _PAUSE_AT_BYTES // 2
        if self._paused and (few or not self._unread):
            self._paused = False
            self._connection.resume_reading()
        return delivery

    def _pause_if_full(self) -> None:
        many = len(self._unread) >= _PAUSE_AT or self._unread_bytes >= _PAUSE_AT_BYTES
        if many and not self._paused and not self._pending_requests:
            self._paused = True
            self._connection.pause_reading()

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Keep reading while the broker has to answer a request, because messages arrive before the answer."""
        self._pending_requests += 1
        try:
            yield
        finally:
            self._pending_requests -= 1
            self._pause_if_full()

    async def _ready_count(self) -> int:
        """The number of ready messages; 0 while the queue is too busy to count."""
        with self._request():
            return int((await self._channel.declare_queue(Queue(self._queue), passive=True)).message_count)

    async def _is_empty(self) -> bool:
        with self._request():
            return not (await queue_counts(self._channel, self._queue)).message_count

    async def _refuse_stream(self) -> None:
        try:
            found = await is_stream(self._connection, self._queue)
        except BrokerError as error:
            log.debug("cannot fetch a single message from %s: %s", self._queue, error)
        else:
            if found:
                raise stream_error(self._queue)

    def ack(self, held: BrowsedMessage) -> None:
        """Acknowledge a message, which removes it from the queue.

        Raises:
            BrokerError: the connection was lost: the message is still in the queue.
        """
        self._channel.ack(held.tag)
        self._acknowledged.add(held.tag)

    async def release(self, held: BrowsedMessage) -> None:
        """Leave a message in the queue. Call this for each message that is not acknowledged, as soon as possible."""
        await self._count_reset.renew(held, self.ack)

    async def close(self) -> None:
        """Requeue all messages that were not acknowledged, in their original order."""
        try:
            if self._channel.is_open:
                await self._release_unread()
                await self._requeue_all()
                await self._channel.close()
        except BideError as error:
            log.debug("browsing %s ended: %s", self._queue, error)
        finally:
            with suppress(BideError):
                await self._connection.close()

    async def _release_unread(self) -> None:
        # Unread messages were delivered too, and the queue counted that.
        ending = asyncio.create_task(self._cancel())
        while self._unread or not ending.done():
            if self._unread:
                delivery = self._next()
                needs_reset = self._count_reset.needs_reset(deliveries_of(delivery))
                if needs_reset and not self._count_reset.is_copy(held := BrowsedMessage.of(delivery)):
                    await self.release(held)
            else:
                self._changed.clear()
                await self._changed.wait()
        await ending
        await self._count_reset.finish()

    async def _cancel(self) -> None:
        try:
            for tag in self._tags:
                await self._channel.cancel(tag)
        finally:
            self._changed.set()

    async def _requeue_all(self) -> None:
        """Requeue in small steps, in the order of the queue.

        After one command for 50,000 messages, a quorum queue of RabbitMQ 3.10.8 opened its segment files once per
        message, was busy for minutes, and delivered nothing meanwhile. Small steps did not cause this.
        """
        tags = [tag for tag in range(1, self._received + 1) if tag not in self._acknowledged]
        if not tags:
            return
        before, wait = await self._ready_count(), True
        for start in range(0, len(tags), _PER_WAIT):
            block = tags[start : start + _PER_WAIT]
            for index in range(0, len(block), _PER_NACK):
                # A nack may only name an unsettled delivery. Closing the channel would requeue too, but from
                # RabbitMQ 4.3 on that counts as a failed delivery, and a nack does not.
                self._channel.nack(block[index : index + _PER_NACK][-1], multiple=True)
            wait = wait and await self._wait_until_ready(before + start + len(block))

    async def _wait_until_ready(self, number: int) -> bool:
        """Wait until the broker counts this many ready messages; False if other consumers seem to take them."""
        deadline = asyncio.get_running_loop().time() + _REQUEUE_TIMEOUT
        while await self._ready_count() < number:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_INTERVAL)  # the broker reports no event for a requeue
        return True


@asynccontextmanager
async def browse(
    url: BrokerUrl, queue: str, count_reset: DeliveryCountReset, *, prefetch: int = PREFETCH
) -> AsyncIterator[QueueBrowser]:
    """Browse a queue over a connection of its own.

    Meanwhile, other consumers cannot receive its messages. At the end, messages that were not acknowledged return to
    their positions in the queue.

    Args:
        prefetch: number of messages that the broker sends at first; it sends more when they are all unacknowledged.

    Raises:
        TargetNotFoundError: the queue does not exist.
        BrokerError: the broker refuses or cannot be reached, or the queue is a stream.
    """
    connection = await Connection.open(url)
    try:
        channel = await connection.channel()
        try:
            counted = await queue_counts(channel, queue)
        except TargetNotFoundError as error:
            raise TargetNotFoundError(
                f"there is no queue {queue!r} on the virtual host {url.vhost!r} of {connection.address}: check its "
                "name and the URL",
                reply_code=error.reply_code,
            ) from error
        expected, others = counted.message_count, counted.consumer_count
        browser = QueueBrowser(
            connection, channel, queue, count_reset, expected=expected, others=others, prefetch=prefetch
        )
        await browser.start()
    except BaseException:
        await connection.close()
        raise
    try:
        yield browser
    finally:
        await browser.close()
