"""What makes an event bus work: handlers for its events, and the worker of its retry queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.arguments import whole_number
from bide.client.client import Client
from bide.client.message import Message
from bide.client.publisher import Receipt
from bide.delay.protocol import HEADER_EXCHANGE
from bide.delay.received import SentMessage, restore
from bide.durations import format_delay, to_milliseconds
from bide.errors import BrokerError, ClosedError, DeliveryLostError, InvalidInputError
from bide.messages.prepared import PreparedMessage
from bide.patterns.event_bus import EventBusQueue
from bide.recoverability import copies
from bide.recoverability.exception_text import ExceptionText
from bide.recoverability.history import expiry_of
from bide.recoverability.report import HEADER_ERROR_MESSAGE, HEADER_FAILED_AT, HEADER_FAILED_QUEUE
from bide.recoverability.x_death import QueueDeaths
from bide.runtime.backoff import Backoff
from bide.runtime.cancellation import outcome_apart
from bide.runtime.logs import logger

log = logger(__name__)

HEADER_RETRY_FOR: Final = "bide-retry-for"
"""Header of a copy that is tried again: the queue that it is meant for."""

MAX_LIMIT: Final = 1000

_WORKERS: Final = 50
"""Messages of the retry queue that are passed on at once."""

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class EventBus:
    """A subscriber of an event bus: handles its events, and retries what failed.

    Use :class:`bide.Endpoint` for queues of your own. This is for brokers where such a bus exists, and for those who
    want every step of a retry to be a queue that can be looked at.

    Args:
        client: opened; the bus does not close it.
        names: its exchange and queues.
        limit: retries before a message is parked, 0 to 1,000.
        concurrency: events handled at once, 1 to 10,000.

    Raises:
        InvalidInputError: a value is out of range.
    """

    def __init__(self, client: Client, names: EventBusQueue, *, limit: int = 5, concurrency: int = 10) -> None:
        self._client = client
        self.names = names
        self._limit = whole_number("limit", limit, 0, MAX_LIMIT)
        self._concurrency = whole_number("concurrency", concurrency, 1, 10_000)

    async def declare(self) -> None:
        """Declare its exchanges, queues and bindings.

        Raises:
            DeclarationMismatchError: something exists with other properties.
            BrokerError: the broker cannot be reached, or refuses.
        """
        await self._client.declare(self.names.topology())

    async def publish(self, body: bytes | str | None = None, *, key: str | None = None, **options: Any) -> Receipt:
        """Publish an event; the options are those of :meth:`bide.Client.publish`.

        Args:
            key: its routing key; the queue's name if None.

        Raises:
            BideError: as :meth:`bide.Client.publish`.
        """
        return await self._client.publish(
            body, exchange=self.names.exchange, routing_key=self.names.queue if key is None else key, **options
        )

    async def run(self, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Handle events, and look after the retry queue, until cancelled.

        Raises:
            TargetNotFoundError: a queue is missing.
            ConsumerCancelledError: a queue was deleted.
            BrokerError: the broker cannot be reached at the start, or refuses.
        """
        async with _together() as work:
            work.create_task(self.handle(handler))
            work.create_task(self.retry())

    async def handle(self, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Handle events until cancelled, and leave the retry queue to others.

        An event whose handler raises is rejected without requeue, and so is one whose ``expiration`` is over since it
        was delayed or first failed. The handler sees it as it was sent: ``message.exchange`` and
        ``message.routing_key`` are those of the first sending, and ``message.history.retries`` is how often it came
        back.

        Raises:
            TargetNotFoundError: the queue is missing.
            ConsumerCancelledError: the queue was deleted.
            BrokerError: the broker cannot be reached at the start, or refuses.
        """

        async def take(message: Message) -> None:
            if not self._is_for_us(message):
                # The delay queue releases into the bus, where a binding such as "#" brings it to others as well.
                log.debug("%s: %s is tried again for another queue", self.names.queue, message.message_id)
                await _settle(message.ack)
                return
            if message.expired:
                log.info("%s: %s is past its expiration", self.names.queue, message.message_id)
                await _settle(message.reject)
                return
            _, failure = await outcome_apart(handler, message)
            if failure is None:
                await _settle(message.ack)
                return
            reason = f"{type(failure).__name__}: {ExceptionText.of(failure).message}"
            log.warning("%s: %s failed: %s", self.names.queue, message.message_id, reason, exc_info=failure)
            await _settle(message.reject)

        await self._each(self.names.queue, take, at_once=self._concurrency)

    async def retry(self) -> None:
        """Send what was rejected through the delay queue, or park it, until cancelled. Any number may do so at once.

        Parked is what was rejected once more than there are retries, what is past the sender's ``expiration``, and what
        the queue gave up itself, because the processes that had it died. A message is acknowledged only when the broker
        has confirmed its copy: a process that is killed between the two leaves both.

        Raises:
            TargetNotFoundError: the retry queue is missing.
            ConsumerCancelledError: the retry queue was deleted.
            BrokerError: the broker cannot be reached at the start, or refuses.
        """
        await self._each(self.names.retry_queue, self._pass_on, at_once=_WORKERS)

    async def _each(self, queue: str, take: Callable[[Message], Awaitable[None]], *, at_once: int) -> None:
        async def worker() -> None:
            async for message in messages:
                await take(message)

        async with self._client.consume(queue, prefetch=at_once) as messages, _together() as workers:
            for _ in range(at_once):
                workers.create_task(worker())

    def _is_for_us(self, message: Message) -> bool:
        return _raw(message).get(HEADER_RETRY_FOR) in (None, self.names.queue)

    async def _pass_on(self, message: Message) -> None:
        """Publish the successor until the broker has it: the message stays unacknowledged meanwhile."""
        copy = self._successor(message, self._client.now())
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                await self._client.forward(copy)
            except InvalidInputError as error:
                log.critical(
                    "%s: %s cannot be passed on: it stays in %s: %s",
                    self.names.queue,
                    message.message_id,
                    self.names.retry_queue,
                    error,
                )
                return
            except ClosedError:
                return
            except BrokerError as error:
                log.error("%s: cannot pass on %s yet: %s", self.names.queue, message.message_id, error)
                await asyncio.sleep(backoff.next())
            else:
                break
        await _settle(message.ack)

    def _successor(self, message: Message, now: datetime) -> PreparedMessage:
        """The copy that takes the place of a message in the retry queue: for the delay queue, or parked.

        The broker counts in ``x-death`` only as long as a message is dead-lettered on and on. A copy starts without:
        from 4.0.1 on the broker ignores the header on what is published, and before, it may take the copy's next hop
        for a cycle, and drop it. So copies carry the count of those before in a header of ours.

        Copies go straight to their queue: one that is bound to the bus with a wildcard must not get them.
        """
        departure = QueueDeaths.read(message.headers, self.names.queue)
        # A message that was put there by hand counts too: nothing goes round uncounted.
        count = 1 if departure is None else departure.count
        sent = _as_first_sent(message, departure)
        expiration = message.expiration or (departure.expiration if departure is not None else None)
        expires_at = message.history.expires_at or expiry_of(
            expiration=expiration, due=message.due, sent_at=message.sent_at, received_at=message.received_at
        )
        retries = message.history.retries + count
        if departure is not None and departure.reason == "expired":
            history = message.history
            why: str | None = _expired(expiration)
        else:
            history = message.history.with_failures((message.received_at,), attempts=count, expires_at=expires_at)
            why = self._why_not_again(departure, retries, expiration, expires_at, now)
        history = replace(history, first_due=copies.senders_due(sent, message.history))
        if why is None:
            headers = replace(history, retries=retries).headers(max_times=self._limit + 1)
            headers[HEADER_RETRY_FOR] = self.names.queue
            queue = self.names.delay_queue
        else:
            log.error("%s: %s is parked: %s", self.names.queue, message.message_id, why)
            headers = replace(history, retries=retries - 1).headers(max_times=len(history.times))
            headers |= {
                HEADER_FAILED_QUEUE: self.names.queue,
                HEADER_FAILED_AT: to_milliseconds(now),
                HEADER_ERROR_MESSAGE: why,
            }
            queue = self.names.parking_queue
        return copies.copy_of(sent, message.body, queue=queue, headers=headers, sent_by=message.sent_by)

    def _why_not_again(
        self,
        departure: QueueDeaths | None,
        retries: int,
        expiration: timedelta | None,
        expires_at: datetime | None,
        now: datetime,
    ) -> str | None:
        if departure is not None and departure.reason == "delivery_limit":
            return "delivered up to the queue's limit without an end: the processes that had it died, or gave it back"
        if expires_at is not None and expires_at <= now:
            return _expired(expiration)
        if retries > self._limit:
            return f"rejected {retries} times (limit: {self._limit} retries)"
        return None


def _expired(expiration: timedelta | None) -> str:
    return f"its expiration{'' if expiration is None else f' of {format_delay(expiration)}'} is over"


def _as_first_sent(message: Message, departure: QueueDeaths | None) -> SentMessage:
    """The message with the address and the ``expiration`` that dead-lettering took off it.

    A copy has them in headers of ours. Otherwise ``x-death`` has the first address of the message.
    """
    sent = message.as_sent()
    if departure is None or HEADER_EXCHANGE in _raw(message):
        return sent
    key = message.raw.routing_key if departure.routing_key is None else departure.routing_key
    arrival = restore(departure.exchange, key, message.raw.values)
    values = dict(sent.values)
    if departure.expiration is not None:
        values.setdefault("expiration", str(departure.expiration // timedelta(milliseconds=1)))
    return replace(sent, exchange=arrival.exchange, routing_key=arrival.routing_key, values=values)


def _raw(message: Message) -> Mapping[str, Any]:
    headers: Mapping[str, Any] = message.raw.values.get("headers") or {}
    return headers


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out by itself, as that of a single task would; others are logged."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as errors:
        first, *others = errors.exceptions
        for error in others:
            log.error("and at the same time: %s: %s", type(error).__name__, error)
        raise first from None


async def _settle(how: Callable[[], Awaitable[None]]) -> None:
    try:
        await how()
    except DeliveryLostError as error:
        log.info("%s", error)
    except InvalidInputError:
        log.debug("the handler settled its message itself")
