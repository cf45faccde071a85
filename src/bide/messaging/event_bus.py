"""Subscriber of an event bus: handlers for events, and a worker for retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.client.client import Client
from bide.client.forwarder import Forwarder
from bide.client.message import Message
from bide.client.publisher import Receipt
from bide.delay.protocol import HEADER_EXCHANGE
from bide.delay.received import SentMessage, restore
from bide.durations import format_delay, to_milliseconds
from bide.errors import ClosedError, DeliveryLostError, InvalidInputError
from bide.messages.prepared import PreparedMessage
from bide.patterns.event_bus import EventBusQueue
from bide.recoverability import copies
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import expiry_of
from bide.recoverability.report import HEADER_ERROR_MESSAGE, HEADER_FAILED_AT, HEADER_FAILED_QUEUE
from bide.recoverability.x_death import QueueDeaths
from bide.runtime.arguments import whole_number
from bide.runtime.cancellation import outcome_apart
from bide.runtime.logs import logger

log = logger(__name__)

HEADER_RETRY_FOR: Final = "bide-retry-for"
"""Header of a copy for a retry, with the queue that it is meant for."""

MAX_LIMIT: Final = 1000

_RETRY_WORKERS: Final = 50
"""How many messages of the retry queue are processed at the same time."""

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class EventBus:
    """A subscriber of an event bus: handles events and retries those that failed.

    For your own queues use :class:`bide.Endpoint`. Use this class on brokers that have such a bus already, or if every
    step of a retry should be a visible queue.

    Args:
        client: an open client; the bus does not close it.
        names: the exchange and the queues.
        limit: number of retries before a message is parked, 0 to 1,000.
        concurrency: number of events handled at the same time, 1 to 10,000.

    Raises:
        InvalidInputError: a value is out of range.
    """

    def __init__(self, client: Client, names: EventBusQueue, *, limit: int = 5, concurrency: int = 10) -> None:
        self._client = client
        self.names = names
        self._limit = whole_number("limit", limit, 0, MAX_LIMIT)
        self._concurrency = whole_number("concurrency", concurrency, 1, 10_000)
        self._forwarder = Forwarder(names.queue, client.forward, first_pause=_FIRST_PAUSE, longest_pause=_LONGEST_PAUSE)

    async def declare(self) -> None:
        """Declare the exchanges, queues and bindings.

        Raises:
            DeclarationMismatchError: an exchange or queue exists with other properties.
            BrokerError: the broker refuses, or cannot be reached.
        """
        await self._client.declare(self.names.topology())

    async def publish(self, body: bytes | str | None = None, *, key: str | None = None, **options: Any) -> Receipt:
        """Publish an event.

        Args:
            body: as for :meth:`bide.Client.publish`.
            key: the routing key; the queue's name if None.
            options: other arguments of :meth:`bide.Client.publish`.

        Raises:
            BideError: as :meth:`bide.Client.publish`.
        """
        return await self._client.publish(
            body, exchange=self.names.exchange, routing_key=self.names.queue if key is None else key, **options
        )

    async def run(self, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Handle events and process the retry queue until cancelled.

        Raises:
            TargetNotFoundError: a queue is missing.
            ConsumerCancelledError: a queue was deleted.
            BrokerError: the broker refuses, or cannot be reached at the start.
        """
        async with _task_group() as work:
            work.create_task(self.handle(handler))
            work.create_task(self.retry())

    async def handle(self, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Handle events until cancelled. The retry queue is left to other processes.

        An event is rejected without requeue if its handler raises, or if its ``expiration`` is over, counted from the
        end of its delay or its first failure. The handler sees the event as it was first sent: ``message.exchange`` and
        ``message.routing_key`` are the original ones. ``message.history.retries`` is the number of retries.

        Raises:
            TargetNotFoundError: the queue is missing.
            ConsumerCancelledError: the queue was deleted.
            BrokerError: the broker refuses, or cannot be reached at the start.
        """

        async def process(message: Message) -> None:
            if not self._is_for_this_queue(message):
                # The delay queue publishes to the bus, where bindings such as "#" route the retry to other queues too.
                log.debug("%s: dropping %s, a retry for another queue", self.names.queue, message.message_id)
                await _settle(message.ack)
                return
            if message.expired:
                log.info("%s: %s has expired", self.names.queue, message.message_id)
                await _settle(message.reject)
                return
            _, failure = await outcome_apart(handler, message)
            if failure is None:
                await _settle(message.ack)
                return
            reason = f"{type(failure).__name__}: {ExceptionText.of(failure).message}"
            log.warning("%s: %s failed: %s", self.names.queue, message.message_id, reason, exc_info=failure)
            await _settle(message.reject)

        await self._each(self.names.queue, process, at_once=self._concurrency)

    async def retry(self) -> None:
        """Send rejected messages through the delay queue, or park them, until cancelled.

        Any number of processes can do this. A message is parked if it was rejected after its last retry, if the
        sender's ``expiration`` is over, or if it reached the delivery limit because its processes died. It is
        acknowledged only after the broker has confirmed its copy: if the process is killed in between, both remain.

        Raises:
            TargetNotFoundError: the retry queue is missing.
            ConsumerCancelledError: the retry queue was deleted.
            BrokerError: the broker refuses, or cannot be reached at the start.
        """
        await self._each(self.names.retry_queue, self._forward, at_once=_RETRY_WORKERS)

    async def _each(self, queue: str, process: Callable[[Message], Awaitable[None]], *, at_once: int) -> None:
        async def worker() -> None:
            async for message in messages:
                await process(message)

        async with self._client.consume(queue, prefetch=at_once) as messages, _task_group() as workers:
            for _ in range(at_once):
                workers.create_task(worker())

    def _is_for_this_queue(self, message: Message) -> bool:
        return _raw(message).get(HEADER_RETRY_FOR) in (None, self.names.queue)

    async def _forward(self, message: Message) -> None:
        """Publish the copy until the broker confirms it. The message stays unacknowledged until then."""
        copy = self._copy(message, self._client.now())
        try:
            await self._forwarder.send(copy)
        except InvalidInputError as error:
            log.critical(
                "%s: %s cannot be forwarded and stays in %s: %s",
                self.names.queue,
                message.message_id,
                self.names.retry_queue,
                error,
            )
        except ClosedError:
            return
        else:
            await _settle(message.ack)

    def _copy(self, message: Message, now: datetime) -> PreparedMessage:
        """Copy a message of the retry queue to the delay queue or the parking queue.

        The broker counts dead-letterings in ``x-death`` only while a message is not republished. A copy leaves that
        header out, because RabbitMQ 4.0.1 and newer ignore it on publishes, and older releases may mistake the copy's
        next dead-lettering for a cycle and drop it. Copies therefore carry the count in a header of bide.

        Copies are sent directly to their queue, so that queues bound to the bus with a wildcard do not get them.
        """
        died = QueueDeaths.read(message.headers, self.names.queue)
        # A message without x-death was put into the retry queue by hand. It counts as one retry, to prevent a loop.
        count = 1 if died is None else died.count
        sent = _as_first_sent(message, died)
        expiration = message.expiration or (died.expiration if died is not None else None)
        expires_at = message.history.expires_at or expiry_of(
            expiration=expiration, due=message.due, sent_at=message.sent_at, received_at=message.received_at
        )
        retries = message.history.retries + count
        if died is not None and died.reason == "expired":
            history = message.history
            reason: str | None = _expired(expiration)
        else:
            history = message.history.with_failures((message.received_at,), attempts=count, expires_at=expires_at)
            reason = self._parking_reason(died, retries, expiration, expires_at, now)
        history = replace(history, first_due=copies.senders_due(sent, message.history))
        if reason is None:
            headers = replace(history, retries=retries).headers(max_failure_times=self._limit + 1)
            headers[HEADER_RETRY_FOR] = self.names.queue
            queue = self.names.delay_queue
        else:
            log.error("%s: parking %s: %s", self.names.queue, message.message_id, reason)
            headers = replace(history, retries=retries - 1).headers(max_failure_times=len(history.times))
            headers |= {
                HEADER_FAILED_QUEUE: self.names.queue,
                HEADER_FAILED_AT: to_milliseconds(now),
                HEADER_ERROR_MESSAGE: reason,
            }
            queue = self.names.parking_queue
        return copies.copy_of(sent, message.body, queue=queue, headers=headers, sent_by=message.sent_by)

    def _parking_reason(
        self,
        died: QueueDeaths | None,
        retries: int,
        expiration: timedelta | None,
        expires_at: datetime | None,
        now: datetime,
    ) -> str | None:
        if died is not None and died.reason == "delivery_limit":
            return "delivered up to the queue's limit and never settled: its processes died, or requeued it"
        if expires_at is not None and expires_at <= now:
            return _expired(expiration)
        if retries > self._limit:
            return f"rejected {retries} times (limit: {self._limit} retries)"
        return None


def _expired(expiration: timedelta | None) -> str:
    return f"its expiration{'' if expiration is None else f' of {format_delay(expiration)}'} is over"


def _as_first_sent(message: Message, died: QueueDeaths | None) -> SentMessage:
    """The message with its original address and ``expiration``, which dead-lettering changed.

    Copies keep both in headers of bide; other messages have both in ``x-death``.
    """
    sent = message.as_sent()
    if died is None or HEADER_EXCHANGE in _raw(message):
        return sent
    key = message.raw.routing_key if died.routing_key is None else died.routing_key
    first = restore(died.exchange, key, message.raw.values)
    values = dict(sent.values)
    if died.expiration is not None:
        values.setdefault("expiration", str(died.expiration // timedelta(milliseconds=1)))
    return replace(sent, exchange=first.exchange, routing_key=first.routing_key, values=values)


def _raw(message: Message) -> Mapping[str, Any]:
    headers: Mapping[str, Any] = message.raw.values.get("headers") or {}
    return headers


@asynccontextmanager
async def _task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error without an ExceptionGroup, and logs the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as errors:
        first, *others = errors.exceptions
        for error in others:
            log.error("another task failed too: %s: %s", type(error).__name__, error)
        raise first from None


async def _settle(settle: Callable[[], Awaitable[None]]) -> None:
    try:
        await settle()
    except DeliveryLostError as error:
        log.info("%s", error)
    except InvalidInputError:
        log.debug("the handler settled its message itself")
