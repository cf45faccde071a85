"""FastStream's RabbitMQ broker: delayed messages, and retries with backoff.

::

    broker = RabbitBroker("amqp://localhost")
    delays = DelayMiddleware(broker, backoff=["5s", "30s", "5m"])
    broker.add_middleware(delays)

    await broker.publish("pay, please", "reminders", headers=delayed("3d"))
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import aio_pika
from aio_pika.message import decode_expiration, encode_expiration
from faststream import BaseMiddleware
from faststream.exceptions import AckMessage, IgnoredException, NackMessage, RejectMessage
from faststream.rabbit import RabbitBroker, RabbitExchange
from faststream.rabbit.parser import AioPikaParser

from bide.client.client import Client, Connecting
from bide.client.schedule_result import ScheduleResult
from bide.delay.clock import Clock
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidInputError
from bide.integrations.aio_pika import AioPikaDelays
from bide.recoverability.history import HEADER_RETRIES
from bide.runtime.backoff import Backoff
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from faststream import ContextRepo
    from faststream.rabbit import RabbitMessage
    from faststream.rabbit.response import RabbitPublishCommand

log = logger(__name__)

HEADER: Final = "bide-delay"
"""The header of :func:`delayed`. The middleware removes it.

Without the middleware, aio-pika refuses its value, so that no message is sent without its delay.
"""

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds before a message whose retry cannot be sent goes back to its queue."""

Publish = Callable[["RabbitPublishCommand"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Delayed:
    """A delay among the headers of a message; see :func:`delayed`.

    Attributes:
        key: the key of the schedule, if it is one.
        retries: how often the message was retried with backoff.
    """

    delay: timedelta
    key: str | None = None
    retries: int = 0


def delayed(delay: DelayLike, *, key: str | None = None) -> dict[str, Any]:
    """Headers that delay a message: ``publish(..., headers=delayed("5m"))``.

    Add others with ``{**delayed("5m"), "name": "value"}``.

    Args:
        delay: the time from the publish to the delivery.
        key: store the message as a schedule, which :meth:`DelayMiddleware.cancel` cancels while it waits.

    Raises:
        InvalidDelayError: the delay cannot be read, or is negative.
    """
    return {HEADER: Delayed(parse_delay(delay), key)}


class DelayMiddleware:
    """A middleware of FastStream's broker that delays messages in ``Clock``.

    Messages with the headers of :func:`delayed` wait on the broker. The broker's own connection publishes them, and
    waits for the confirm. Handlers receive messages with the headers that were sent.

    A handler that raises ``NackMessage(delay="30s")`` gets the message again after that time, as often as it does so.
    With ``backoff``, a handler that fails, or that raises ``NackMessage()``, gets the message again after the first
    delay, then after the second, and so on. After the last one, an error is left to the subscriber's ``ack_policy``,
    and ``NackMessage`` rejects the message.

    If the next attempt cannot be sent, the message goes back to its queue after a pause of a second. The pause doubles
    up to a minute, until a retry can be sent.

    In FastStream's ``TestRabbitBroker``, delayed messages arrive at once, and nothing is retried.

    Args:
        broker: the broker; add the middleware to it last.
        infrastructure: the delay infrastructure; ``Clock()`` if None.
        backoff: the delays of retries, such as ``["5s", "30s", "5m"]`` or :func:`bide.exponential`; none by default.
        schedules: ``bide.connect(...)`` for messages with keys. It is connected when it is first needed.
    """

    def __init__(
        self,
        broker: RabbitBroker,
        *,
        infrastructure: Clock | None = None,
        backoff: Iterable[DelayLike] = (),
        schedules: Connecting | None = None,
    ) -> None:
        self.backoff = tuple(parse_delay(one) for one in backoff)
        self.pauses = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._broker = broker
        self._delays = AioPikaDelays(infrastructure)
        self._schedules = schedules
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    def __call__(self, msg: Any, /, *, context: ContextRepo) -> _Scope:
        """The middleware of one message, for FastStream."""
        return _Scope(msg, context=context, delays=self)

    async def cancel(self, key: str) -> ScheduleResult:
        """Cancel the message that waits under a key.

        Returns:
            A result with the outcome ``CANCELLED``, ``TOO_LATE`` or ``NOT_FOUND``.

        Raises:
            BideError: as :meth:`bide.Client.cancel`.
        """
        return await (await self._schedule_client(key)).cancel(key)

    async def close(self) -> None:
        """Close the connections for messages with keys."""
        if self._client is not None:
            await self._client.close()

    async def publish(self, call_next: Publish, command: RabbitPublishCommand) -> Any:
        """Publish a message, through the delay infrastructure if it has the headers of :func:`delayed`."""
        found = _delay_of(command)
        if found is None:
            return await call_next(command)
        command = _without_delay(command)
        connection = await self._connection()
        if connection is None:
            return await call_next(command)
        message = await self._encoded(command)
        if found.key is not None:
            return await self._schedule(message, command, found.delay, found.key)
        target: Target = QueueTarget(command.destination)
        if command.exchange.name:
            target = ExchangeTarget(command.exchange.name, command.destination, command.exchange.type.value)

        async def publish(exchange: str, routing_key: str, routed: aio_pika.Message) -> Any:
            sent = copy.copy(command)
            sent.body = routed
            sent.exchange = RabbitExchange(exchange, declare=False, robust=False)
            sent.destination = routing_key
            return await call_next(sent)

        headers = {HEADER_RETRIES: found.retries} if found.retries else {}
        return await self._delays.publish(
            publish, message, target, connection=connection, delay=found.delay, headers=headers
        )

    async def retry(self, message: RabbitMessage, subscriber: Any, delayed: Delayed) -> bool:
        """Send a message to its queue again, and acknowledge it. False, without doing so, with a TestRabbitBroker."""
        if await self._connection() is None:
            return False
        raw = message.raw_message
        sent = self._restored(message)
        # With CC or BCC, the broker would send the retry to the queues in these headers too.
        headers: dict[str, Any] = {name: value for name, value in message.headers.items() if name not in ("CC", "BCC")}
        headers[HEADER] = delayed
        again = aio_pika.Message(
            raw.body,
            headers=headers,
            content_type=raw.content_type,
            content_encoding=raw.content_encoding,
            delivery_mode=raw.delivery_mode,
            priority=sent["priority"],
            expiration=decode_expiration(sent["expiration"]),
            correlation_id=raw.correlation_id,
            reply_to=raw.reply_to,
            message_id=raw.message_id,
            timestamp=raw.timestamp,
            type=raw.type,
            app_id=raw.app_id,
        )
        # The name of the queue with the prefix of its router, which has no public name.
        await self._broker.publish(again, subscriber._queue_obj.name)  # noqa: SLF001 (there is no public attribute)
        await message.ack()
        return True

    def restored_headers(self, message: RabbitMessage) -> dict[str, Any]:
        """The headers with which a received message was sent."""
        return dict(self._restored(message)["headers"])

    def _restored(self, message: RabbitMessage) -> Mapping[str, Any]:
        """The headers, priority and expiration with which a received message was sent, by their AMQP names."""
        raw = message.raw_message
        received = {
            "headers": raw.headers,
            "priority": raw.priority,
            "expiration": encode_expiration(raw.expiration),
        }
        return self._delays.delays.restore(raw.exchange or "", raw.routing_key or "", received).values

    async def _connection(self) -> aio_pika.abc.AbstractConnection | None:
        """The broker's connection; None with FastStream's ``TestRabbitBroker``."""
        return await self._broker.connect()

    async def _encoded(self, command: RabbitPublishCommand) -> aio_pika.Message:
        """The message as FastStream's producer would encode it."""
        producer: Any = self._broker.config.producer
        return await AioPikaParser.encode_message(
            command.body,
            headers=command.headers,
            correlation_id=command.correlation_id,
            reply_to=command.reply_to or None,
            serializer=producer.serializer,
            codec=producer.codec,
            id_generator=producer.id_generator,
            **command.message_options,
        )

    async def _schedule(
        self, message: aio_pika.Message, command: RabbitPublishCommand, delay: timedelta, key: str
    ) -> None:
        """Store a message as a schedule."""
        client = await self._schedule_client(key)
        expiration = encode_expiration(message.expiration)
        exchange = command.exchange.name
        await client.schedule(
            message.body,
            key=key,
            delay=delay,
            to=None if exchange else command.destination,
            exchange=exchange or None,
            routing_key=command.destination if exchange else "",
            headers=message.headers,
            message_id=message.message_id,
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            type=message.type,
            user_id=message.user_id,
            app_id=message.app_id,
            timestamp=message.timestamp,
            persistent=message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT,
            priority=message.priority,
            expiration=None if expiration is None else f"{expiration}ms",
        )

    async def _schedule_client(self, key: str) -> Client:
        if self._schedules is None:
            raise InvalidInputError(
                f"the key {key!r} needs a client for schedules: give DelayMiddleware(..., "
                "schedules=bide.connect('amqp://...'))"
            )
        async with self._connecting:
            if self._client is None:
                self._client = await self._schedules
        return self._client


class _Scope(BaseMiddleware["RabbitPublishCommand", Any]):
    """The middleware of one message."""

    def __init__(self, msg: Any, /, *, context: ContextRepo, delays: DelayMiddleware) -> None:
        super().__init__(msg, context=context)
        self._delays = delays

    async def publish_scope(self, call_next: Publish, cmd: RabbitPublishCommand) -> Any:
        """Publish a message that may have a delay."""
        return await self._delays.publish(call_next, cmd)

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
        """Call the handler with the headers that were sent, and send the message again if it is to be retried."""
        retries = (msg.raw_message.headers or {}).get(HEADER_RETRIES)
        msg.headers = self._delays.restored_headers(msg)
        try:
            return await call_next(msg)
        except Exception as error:
            if msg.committed is not None:
                raise
            try:
                decided = self._decide(error, retries if isinstance(retries, int) else 0)
                is_sent = decided and await self._delays.retry(msg, self.context.get_local("handler_"), decided)
            except RejectMessage:
                raise
            except Exception:
                pause = self._delays.pauses.next()
                log.exception(
                    "cannot retry %r, which failed: %r; requeueing it in %.1f s", msg.message_id, error, pause
                )
                # Without a pause, the handler would get the message again at once, for as long as the cause lasts.
                await asyncio.sleep(pause)
                # This error must not reach FastStream, which would apply the ack_policy: it rejects the message.
                raise NackMessage from error
            if decided is None or not is_sent:
                raise
            self._delays.pauses.reset()
            log.warning("%r failed, and is handled again in %s: %r", msg.message_id, decided.delay, error)
            raise AckMessage from error

    def _decide(self, error: Exception, retries: int) -> Delayed | None:
        """The delay after which a message is handled again; None if it is not handled again.

        Raises:
            RejectMessage: the handler raised ``NackMessage``, and no retry is left.
        """
        if isinstance(error, NackMessage) and "delay" in error.extra_options:
            return Delayed(parse_delay(error.extra_options["delay"]), retries=retries)
        backoff = self._delays.backoff
        if not backoff or (isinstance(error, IgnoredException) and not isinstance(error, NackMessage)):
            return None
        if retries < len(backoff):
            return Delayed(backoff[retries], retries=retries + 1)
        if isinstance(error, NackMessage):
            raise RejectMessage from error
        return None


def _delay_of(command: RabbitPublishCommand) -> Delayed | None:
    """The delay among the headers of a message."""
    for headers in (command.headers, command.body.headers if isinstance(command.body, aio_pika.Message) else None):
        if headers and isinstance(found := headers.get(HEADER), Delayed):
            return found
    return None


def _without_delay(command: RabbitPublishCommand) -> RabbitPublishCommand:
    """A copy without the header of the delay. The original stays unchanged: a publisher may reuse its headers."""
    plain = copy.copy(command)
    plain.headers = {name: value for name, value in (command.headers or {}).items() if name != HEADER}
    if isinstance(command.body, aio_pika.Message):
        plain.body = copy.copy(command.body)
        plain.body.headers = {name: value for name, value in command.body.headers.items() if name != HEADER}
    return plain
