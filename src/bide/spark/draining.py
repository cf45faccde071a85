"""Take the messages of a queue into tables: they leave it when they are safe.

Spark does not tell a batch reader when its rows are written, so a reader cannot acknowledge them. Here the messages
are held on the driver, unacknowledged, over a connection with a thread of its own, while the caller's function
writes them; they are acknowledged when it returns. A crash in between leaves them in the queue, and the next
drain writes them once more: the column ``id`` is the same then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.arguments import whole_number
from bide.client.subscription import Subscription
from bide.client.sync import connect_sync
from bide.delay.protocol import check_name
from bide.delay.recognition import refusal
from bide.durations import DelayLike, parse_delay
from bide.error_queues.browsed_message import BrowsedMessage
from bide.error_queues.delay_queues import holds_waiting, refuse_delay_queue
from bide.error_queues.stream_check import is_stream, stream_error
from bide.errors import BideError, BrokerError, DeliveryLostError
from bide.runtime.logs import logger
from bide.spark.columns import QUEUE_COLUMNS, arrow_schema, table_schema
from bide.spark.queue_source import rows_of
from bide.topology import Queue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logger(__name__)

_PATIENCE: Final = 5.0
"""Seconds to wait for messages that the broker counts."""

_STREAMS_HINT: Final = "spark.read.format('rabbitmq') with the option stream reads it"

MOST_HELD: Final = 65_535
"""Unacknowledged messages that AMQP 0-9-1 lets a consumer have, and so the largest batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What a drain did.

    Attributes:
        messages: how many were written and acknowledged.
        batches: how often the function was called.
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
    """Write the messages of a queue, and take them out of it.

    Where ``write`` fails, its messages go back to the queue. Before RabbitMQ 4.3 a quorum queue counts that, and gives
    a message up at its delivery limit: one that comes near to it is replaced by a copy first, at the end of the queue.

    The messages of a batch are in the driver's memory. RabbitMQ takes them back when they are not acknowledged
    within its ``consumer_timeout`` (30 minutes unless configured): choose a batch that is written in that time.

    Args:
        spark: the session.
        queue: the queue's name.
        write: writes a DataFrame with the columns of a queue. It must have written it when it returns, and be ready
            to be given messages that it was given before, by a drain that did not come to its end.
        url: the broker; by default ``BIDE_URL``, or RabbitMQ's default on this machine.
        batch: messages at once at most, 1 to 65,535.
        limit: end after this many messages; None for all.
        quiet: the queue counts as empty when no message comes for so long.
        include_headers: with the column ``headers``.
        management_url: of the broker's management API, which has the queue's delivery limit; see
            :class:`bide.Endpoint`. Where it does not answer, RabbitMQ's default limit is assumed.

    Raises:
        InvalidInputError: an argument cannot be used.
        DelayQueueError: the queue belongs to a delay infrastructure.
        TargetNotFoundError: there is no such queue.
        DeliveryLostError: a batch was written, but the connection broke before it was acknowledged: its messages are
            still in the queue.
        BrokerError: the broker cannot be reached, or refuses.
    """
    most = whole_number("batch", batch, 1, MOST_HELD)
    left = None if limit is None else whole_number("limit", limit, 1, 2**63 - 1)
    seconds = parse_delay(quiet).total_seconds()
    check_name("queue", queue)
    columns = table_schema(QUEUE_COLUMNS, include_headers=include_headers)
    schema = arrow_schema(columns, QUEUE_COLUMNS)
    address = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url) if url else BrokerUrl.from_environment()
    done = batches = 0
    prefetch = most if left is None else min(most, left)
    with _Holder(address, queue, prefetch=prefetch, management_url=management_url) as holder:
        while left is None or done < left:
            held = holder.take(most if left is None else min(most, left - done), seconds)
            if not held:
                break
            table = pa.Table.from_batches([rows_of(queue, [one.message for one in held], schema)])
            write(spark.createDataFrame(table, schema=columns))
            holder.acknowledge(held)
            done += len(held)
            batches += 1
    return Drained(messages=done, batches=batches)


class _Holder:
    """Holds messages of a queue in a thread of its own, which answers the broker's heartbeats while others write."""

    def __init__(self, url: BrokerUrl, queue: str, *, prefetch: int, management_url: str | None) -> None:
        self._queue = queue
        self._client = connect_sync(url, declare=False)
        self._held: list[BrowsedMessage] = []
        self._holds_waiting = False
        try:
            self._client.wait_for(self._open(url, prefetch, management_url))
        except BaseException:
            self._client.close()
            raise

    async def _open(self, url: BrokerUrl, prefetch: int, management_url: str | None) -> None:
        self._renewal = await refuse_delay_queue(self._client.client, self._queue, management_url)
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
        """What is not acknowledged goes back to the queue."""
        channel = self._subscription.channel
        try:
            if channel.is_open:
                # Those that came and were not asked for were delivered all the same, and the queue counts that.
                came = [*self._held, *map(BrowsedMessage.of, await self._subscription.end())]
                # A copy of a message that waits for its due time would wait from now on.
                if not self._holds_waiting:
                    await self._renew(came)
                # Rather than closing alone: from RabbitMQ 4.3 on, this does not count as a failed delivery.
                channel.nack(0, multiple=True)
        except BideError as error:
            log.debug("the drain of %s ended: %s", self._queue, error)
        finally:
            await self._connection.close()

    def take(self, most: int, quiet: float) -> list[BrowsedMessage]:
        """Up to *most* messages; fewer when none comes for *quiet* seconds.

        Raises:
            BideError: the connection broke, or the queue was deleted.
        """
        return self._client.wait_for(self._take(most, quiet))

    async def _take(self, most: int, quiet: float) -> list[BrowsedMessage]:
        while came := await self._come(most, quiet):
            # Before they are written, and not only where that fails: a killed process gives nothing back
            # in order, and may be started again and again.
            renewed = await self._renew([one for one in came if not self._renewal.is_copy(one)])
            if held := [one for one in came if one.tag not in renewed]:
                self._held = held
                return held
        return []

    async def _renew(self, messages: list[BrowsedMessage]) -> set[int]:
        """Replace those by copies that come near to the queue's delivery limit; says which, by their tags."""
        renewed: set[int] = set()

        def acknowledge(held: BrowsedMessage) -> None:
            self._subscription.channel.ack(held.tag)
            renewed.add(held.tag)

        for one in messages:
            await self._renewal.renew(one, acknowledge)
        await self._renewal.finish()
        return renewed

    async def _come(self, most: int, quiet: float) -> list[BrowsedMessage]:
        found: list[BrowsedMessage] = []
        waited = 0.0
        while len(found) < most:
            try:
                async with asyncio.timeout(quiet):
                    delivery, _ = await self._subscription.next()
                if holds_waiting(delivery):
                    self._holds_waiting = True
                    raise refusal(self._queue, "waiting")
                found.append(BrowsedMessage.of(delivery))
            except TimeoutError:
                if found:
                    break
                if not waited and await is_stream(self._connection, self._queue):
                    raise stream_error(self._queue, hint=_STREAMS_HINT) from None
                waited += quiet
                if not (ready := await self._ready()):
                    break
                if waited >= _PATIENCE:
                    raise BrokerError(
                        f"{self._queue!r} has {ready:,} messages and gives none: another consumer has it for itself"
                    ) from None
        return found

    async def _ready(self) -> int:
        counted = await self._subscription.channel.declare_queue(Queue(self._queue), passive=True)
        return int(counted.message_count)

    def acknowledge(self, held: list[BrowsedMessage]) -> None:
        """Take them out of the queue, and wait until the broker has done it.

        Raises:
            DeliveryLostError: it is not known any more.
        """
        try:
            self._client.wait_for(self._acknowledge(held[-1].tag))
        except BideError as error:
            raise DeliveryLostError(
                f"{len(held):,} messages of {self._queue!r} were written, but could not be acknowledged ({error}): "
                "they are still in the queue, and the next drain writes them again, with the same ids"
            ) from error

    async def _acknowledge(self, tag: int) -> None:
        channel = self._subscription.channel
        channel.ack(tag, multiple=True)
        self._held = []
        # Acknowledgements are not answered. This is, and the broker handles it after them.
        await self._ready()
