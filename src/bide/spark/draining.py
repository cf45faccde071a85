"""Drain of a queue into tables: messages are acknowledged after they are written.

Spark does not notify a batch reader when its rows are written, so a reader cannot acknowledge messages. A drain
consumes them on the driver, in a separate thread that keeps the connection alive, and acknowledges a batch after the
caller's function has written it. After a crash in between, the messages are still in the queue, and the next drain
writes them again with the same values in the column ``id``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.amqp.url import BrokerUrl
from bide.client.subscription import Subscription
from bide.client.sync import connect_sync
from bide.delay.protocol import check_name
from bide.durations import DelayLike, parse_delay
from bide.error_queues.browsed_message import BrowsedMessage
from bide.error_queues.delay_queues import refuse_delay_queue, refuse_waiting
from bide.error_queues.stream_check import is_stream, stream_error
from bide.errors import BideError, BrokerError, DeliveryLostError
from bide.runtime.arguments import whole_number
from bide.runtime.logs import logger
from bide.runtime.wording import quantity
from bide.spark.columns import QUEUE_COLUMNS, arrow_schema, table_schema
from bide.spark.queue_source import rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logger(__name__)

_TIMEOUT: Final = 5.0
"""Seconds to wait for messages that are ready according to the broker."""

_STREAMS_HINT: Final = "spark.read.format('rabbitmq') with the option stream reads it"

MAX_PREFETCH: Final = 65_535
"""The largest prefetch count of AMQP 0-9-1, which limits a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The result of a drain.

    Attributes:
        messages: how many messages were written and acknowledged.
        batches: how many times ``write`` was called.
    """

    messages: int
    batches: int


def drain(
    spark: SparkSession,
    queue: str,
    *,
    write: Callable[[DataFrame], object],
    url: str | BrokerUrl | None = None,
    batch: int = 10_000,
    limit: int | None = None,
    quiet: DelayLike = timedelta(seconds=1),
    include_headers: bool = False,
    management_url: str | None = None,
) -> Drained:
    """Write the messages of a queue to a table, and remove them from the queue.

    When ``write`` fails, its messages are requeued. Before RabbitMQ 4.3, a quorum queue counts each requeue of a
    message, and dead-letters or drops a message that exceeds its delivery limit. To avoid that, a message that is close
    to the limit is replaced by a copy at the end of the queue before it is written.

    The driver holds the messages of a batch in memory. RabbitMQ requeues messages that are not acknowledged within its
    ``consumer_timeout`` (30 minutes by default), so choose a batch that is written in less time.

    Args:
        spark: the session.
        queue: the name of the queue.
        write: writes a DataFrame with the columns of a queue. It has to return after everything is written. After an
            interrupted drain, it is called again with the same messages.
        url: the URL of the broker; by default ``BIDE_URL``, or RabbitMQ's default on this machine.
        batch: the largest number of messages in a batch, 1 to 65,535.
        limit: stop after this many messages; None for all.
        quiet: a batch ends when no message arrives for this long. If the queue is empty then, the drain ends.
        include_headers: whether the DataFrame has the column ``headers``.
        management_url: the URL of the management API, which knows the delivery limit of the queue; see
            :class:`bide.Endpoint`. Without an answer, RabbitMQ's default limit is assumed.

    Raises:
        InvalidInputError: an argument is invalid.
        DelayQueueError: the queue belongs to a delay infrastructure.
        TargetNotFoundError: the queue does not exist.
        DeliveryLostError: a batch was written, but the connection broke before the broker confirmed its removal. The
            messages are usually still in the queue.
        BrokerError: the broker cannot be reached, or refuses.
    """
    max_batch = whole_number("batch", batch, 1, MAX_PREFETCH)
    most = None if limit is None else whole_number("limit", limit, 1, 2**63 - 1)
    seconds = parse_delay(quiet).total_seconds()
    check_name("queue", queue)
    columns = table_schema(QUEUE_COLUMNS, include_headers=include_headers)
    schema = arrow_schema(columns, QUEUE_COLUMNS)
    address = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url) if url else BrokerUrl.from_environment()
    done = batches = 0
    prefetch = max_batch if most is None else min(max_batch, most)
    with _DrainConsumer(address, queue, prefetch=prefetch, management_url=management_url) as consumer:
        while most is None or done < most:
            held = consumer.receive(max_batch if most is None else min(max_batch, most - done), seconds)
            if not held:
                break
            table = pa.Table.from_batches([rows_of(queue, [one.message for one in held], schema)])
            write(spark.createDataFrame(table, schema=columns))
            consumer.acknowledge(held)
            done += len(held)
            batches += 1
    return Drained(messages=done, batches=batches)


class _DrainConsumer:
    """Consumes a queue in a separate thread, which keeps answering heartbeats while the caller writes."""

    def __init__(self, url: BrokerUrl, queue: str, *, prefetch: int, management_url: str | None) -> None:
        self._queue = queue
        self._client = connect_sync(url, declare=False)
        self._held: list[BrowsedMessage] = []
        try:
            self._client.wait_for(self._open(url, prefetch, management_url))
        except BaseException:
            self._client.close()
            raise

    async def _open(self, url: BrokerUrl, prefetch: int, management_url: str | None) -> None:
        self._delivery_count = await refuse_delay_queue(self._client.client, self._queue, management_url)
        self._connection = await Connection.open(url)
        try:
            self._subscription = await Subscription.open(
                self._connection, self._queue, prefetch=prefetch, arguments=None, exclusive=False
            )
        except BaseException:
            await self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._client.wait_for(self._close())
        finally:
            self._client.close()

    async def _close(self) -> None:
        """Requeue the messages that are not acknowledged."""
        channel = self._subscription.channel
        try:
            if channel.is_open:
                # The queue counts the delivery of prefetched messages too, even of those that were never used.
                delivered = [*self._held, *map(BrowsedMessage.of, await self._subscription.end())]
                await self._renew(delivered)
                # Closing the channel would requeue too, but since RabbitMQ 4.3 only a nack leaves the count unchanged.
                channel.nack(0, multiple=True)
        except BideError as error:
            log.debug("the drain of %s ended: %s", self._queue, error)
        finally:
            await self._connection.close()

    def receive(self, most: int, quiet: float) -> list[BrowsedMessage]:
        """Receive up to *most* messages; fewer if none arrives for *quiet* seconds.

        Raises:
            BideError: the connection broke, or the queue was deleted.
        """
        return self._client.wait_for(self._receive_renewed(most, quiet))

    async def _receive_renewed(self, most: int, quiet: float) -> list[BrowsedMessage]:
        while received := await self._receive(most, quiet):
            # Renewed before each write, not only after a failed one: a process that is killed does not run the code
            # after a failed write, and the queue counts a delivery each time the process starts.
            renewed = await self._renew([one for one in received if not self._delivery_count.is_copy(one)])
            if held := [one for one in received if one.tag not in renewed]:
                self._held = held
                return held
        return []

    async def _renew(self, messages: list[BrowsedMessage]) -> set[int]:
        """Replace messages that are close to the delivery limit by copies; returns the tags of the replaced ones."""
        renewed: set[int] = set()

        def acknowledge(held: BrowsedMessage) -> None:
            self._subscription.channel.ack(held.tag)
            renewed.add(held.tag)

        for one in messages:
            await self._delivery_count.renew(one, acknowledge)
        await self._delivery_count.finish()
        return renewed

    async def _receive(self, most: int, quiet: float) -> list[BrowsedMessage]:
        found: list[BrowsedMessage] = []
        begun, is_checked, is_empty = time.monotonic(), False, False
        while len(found) < most:
            try:
                async with asyncio.timeout(0 if is_empty else quiet):
                    delivery, _ = await self._subscription.next()
                refuse_waiting(delivery, self._delivery_count)
                found.append(BrowsedMessage.of(delivery))
                is_empty = False
            except TimeoutError:
                if found or is_empty:
                    break
                if not is_checked and await is_stream(self._connection, self._queue):
                    raise stream_error(self._queue, hint=_STREAMS_HINT) from None
                is_checked = True
                if not (ready := await self._ready()):
                    # Messages that a slow broker was sending are not ready. They arrive before its second answer.
                    await self._ready()
                    is_empty = True
                    continue
                if time.monotonic() - begun >= _TIMEOUT:
                    raise BrokerError(
                        f"the queue {self._queue!r} has {quantity(ready, 'message')} and delivered none within "
                        f"{_TIMEOUT:g} s: another consumer has a higher priority, or is the single active consumer. "
                        "Stop that consumer"
                    ) from None
        return found

    async def _ready(self) -> int:
        return int((await queue_counts(self._subscription.channel, self._queue)).message_count)

    def acknowledge(self, held: list[BrowsedMessage]) -> None:
        """Acknowledge messages, and wait until the broker has removed them from the queue.

        Raises:
            DeliveryLostError: the messages are not acknowledged, because the connection is lost.
        """
        try:
            self._client.wait_for(self._acknowledge(held[-1].tag))
        except BideError as error:
            raise DeliveryLostError(
                f"{quantity(len(held), 'written message')} of {self._queue!r} could not be acknowledged ({error}): "
                "the next drain writes those that are still in the queue again, with the same ids"
            ) from error

    async def _acknowledge(self, tag: int) -> None:
        channel = self._subscription.channel
        channel.ack(tag, multiple=True)
        self._held = []
        # The broker does not answer an ack. It answers this declare, and handles it after the ack.
        await self._ready()
