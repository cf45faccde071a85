"""What makes an event bus work: handlers for its events, and the worker of its retry queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from bide.checks import whole_number
from bide.client import Client
from bide.delay.infrastructure import HEADER_EXCHANGE
from bide.duration import to_milliseconds
from bide.errors import ClosedError, DeliveryLostError, InvalidInputError
from bide.message import Message
from bide.patterns.event_bus import EventBusQueue
from bide.publisher import Receipt
from bide.recoverability import successor
from bide.recoverability.report import HEADER_FAILED_AT, HEADER_FAILED_QUEUE

log = logging.getLogger(__name__)

_WORKERS: Final = 50
"""Messages of the retry queue that are passed on at once."""

_PAUSE: Final = 1.0


class EventBus:
    """A subscriber of an event bus: handles its events, and retries what failed.

    Use :class:`bide.Endpoint` for queues of your own. This is for brokers where such a bus exists, and for those who
    want every step of a retry to be a queue that can be looked at.

    Args:
        client: opened; the bus does not close it.
        names: its exchange and queues.
        limit: retries before a message is parked, 0 to 1,000.
        concurrency: events handled at once.

    Raises:
        InvalidInputError: a value is out of range.
    """

    def __init__(self, client: Client, names: EventBusQueue, *, limit: int = 5, concurrency: int = 10) -> None:
        self._client = client
        self.names = names
        self._limit = whole_number("limit", limit, 0, 1000)
        self._concurrency = whole_number("concurrency", concurrency, 1, 10_000)

    async def declare(self) -> None:
        """Declare its exchanges, queues and bindings.

        Raises:
            DeclarationMismatchError: something exists with other properties.
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

        An event whose handler raises is rejected without requeue.

        Raises:
            BrokerError: the broker cannot be reached at the start, or refuses.
        """
        async with asyncio.TaskGroup() as work:
            work.create_task(self.handle(handler))
            work.create_task(self.retry())

    async def handle(self, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Handle events until cancelled, and leave the retry queue to others.

        Raises:
            BrokerError: the broker cannot be reached at the start, or refuses.
        """

        async def take(message: Message) -> None:
            try:
                await handler(message)
            except Exception as error:  # noqa: BLE001 (whatever a handler raises is its failure)
                log.warning("%s: %s failed: %s", self.names.queue, message.message_id, error)
                await _settle(message.reject)
            else:
                await _settle(message.ack)

        await self._each(self.names.queue, take, at_once=self._concurrency)

    async def retry(self) -> None:
        """Send what was rejected through the delay queue, or park it, until cancelled. Any number may do so at once.

        Raises:
            BrokerError: the broker cannot be reached at the start, or refuses.
        """
        await self._each(self.names.retry_queue, self._pass_on, at_once=_WORKERS)

    async def _each(self, queue: str, take: Callable[[Message], Awaitable[None]], *, at_once: int) -> None:
        async def worker() -> None:
            async for message in messages:
                await take(message)

        async with self._client.consume(queue, prefetch=at_once) as messages, asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(worker())

    async def _pass_on(self, message: Message) -> None:
        retries = retries_of(message, self.names.queue)
        history = replace(message.history, retries=retries)
        sent = message.as_sent()
        exchange, routing_key = _first_address(message)
        sent = replace(sent, exchange=exchange, routing_key=routing_key)
        # By the default exchange: a queue that is bound to the bus with a wildcard must not get a copy.
        if retries > self._limit:
            log.error("%s: %s is parked after %d retries", self.names.queue, message.message_id, self._limit)
            now = to_milliseconds(datetime.now(UTC))
            headers = {
                **replace(history, retries=self._limit).headers(places=0),
                HEADER_FAILED_QUEUE: self.names.queue,
                HEADER_FAILED_AT: now,
            }
            copy = successor.parked(
                sent, message.body, queue=self.names.parking_queue, headers=headers, sent_by=message.sent_by
            )
        else:
            copy = successor.counted(
                sent,
                message.body,
                queue=self.names.delay_queue,
                history=history,
                places=0,
                sent_by=message.sent_by,
            )
        while True:
            try:
                await self._client.forward(copy)
            except (ClosedError, InvalidInputError):
                raise
            except Exception as error:  # noqa: BLE001 (the message is in hand, and nothing is lost meanwhile)
                log.error("%s: cannot pass on %s yet: %s", self.names.queue, message.message_id, error)
                await asyncio.sleep(_PAUSE)
            else:
                break
        await _settle(message.ack)


def retries_of(message: Message, queue: str) -> int:
    """The number of the retry that comes next for a message which that queue has rejected.

    The broker counts rejections in ``x-death`` as long as the message is dead-lettered; in a copy the count starts
    again (below RabbitMQ 4.0.1 it would go on, but the broker would take the copy's next hop for a cycle). So copies
    carry the number of those before.
    """
    return message.history.retries + sum(
        count
        for death in _deaths(message)
        if death.get("queue") == queue and death.get("reason") == "rejected"
        if isinstance(count := death.get("count"), int)
    )


def _first_address(message: Message) -> tuple[str, str]:
    """Where the event was first sent to: its first death knows, unless it is a copy that says so itself."""
    raw: Mapping[str, Any] = message.raw.values.get("headers") or {}
    deaths = _deaths(message)
    if HEADER_EXCHANGE in raw or not deaths:
        return message.exchange, message.routing_key
    oldest = deaths[-1]
    keys = oldest.get("routing-keys")
    key = keys[0] if isinstance(keys, list) and keys else message.routing_key
    return str(oldest.get("exchange", message.exchange)), str(key)


def _deaths(message: Message) -> list[Mapping[str, Any]]:
    found = message.headers.get("x-death")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


async def _settle(how: Callable[[], Awaitable[None]]) -> None:
    try:
        await how()
    except DeliveryLostError as error:
        log.info("%s", error)
    except InvalidInputError:
        log.debug("the handler settled its message itself")
