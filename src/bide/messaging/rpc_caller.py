"""The caller of RPC over RabbitMQ: sends requests and waits for replies.

The server is :mod:`bide.messaging.rpc_server`, the topology :func:`bide.patterns.rpc.rpc`::

    async with Caller(client) as prices:
        reply = await prices.call("apples", to="prices", timeout="2s")

A request expires with its caller's timeout, so that servers do not handle it in vain. A later reply is dropped and
counted, and never mistaken for the reply to another request.

If the caller's connection is lost, all pending calls fail, because their reply queue is gone; the next call connects
again. The same happens if the broker refuses a request, for example one over its size limit or to an exchange that the
user may not write to: the broker closes the channel, and pending replies are lost. With ``ephemeral``, each call has
its own channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self

from bide.admin.apply import exists
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.client.broker_state import too_large
from bide.client.channel_closure import ChannelClosure
from bide.client.client import Client
from bide.client.message import Message
from bide.client.reconnecting import ReconnectingConnection
from bide.delay.protocol import ExchangeTarget
from bide.durations import DelayLike, format_delay, parse_delay
from bide.errors import (
    BideError,
    ClosedError,
    InvalidDelayError,
    InvalidInputError,
    RemoteError,
    ReplyLostError,
    ReplyTimeoutError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message, new_message_id
from bide.patterns.rpc import DIRECT_REPLY_TO
from bide.runtime.logs import logger
from bide.topology import Exchange, Queue, Topology

log = logger(__name__)

Replies = Literal["direct", "instance", "ephemeral"]
"""How a :class:`Caller` receives replies; see :func:`bide.patterns.rpc.rpc`."""

ERROR_HEADER: Final = "rpc-error"
"""Header of a reply with the error of the server, in one line."""

_REPLY_QUEUE: Final = Queue("", durable=False, exclusive=True, auto_delete=True)
"""The broker names this queue, and deletes it with its consumer."""


class _ReplyChannel:
    """A channel for requests and replies, with the pending calls."""

    def __init__(self, connection: Connection, channel: Channel, *, single: bool) -> None:
        self.connection = connection
        self.channel = channel
        self.reply_to = DIRECT_REPLY_TO
        self.late = 0
        self.exchanges: set[str] = set()
        self._single = single
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}

    @classmethod
    async def open(cls, connection_source: ReconnectingConnection, replies: Replies) -> Self:
        connection = await connection_source.connection()
        channel = await connection.channel(confirms=True)
        self = cls(connection, channel, single=replies == "ephemeral")
        try:
            if replies != "direct":
                self.reply_to = (await channel.declare_queue(_REPLY_QUEUE)).queue
            await channel.consume(self.reply_to, on_message=self._on_reply, on_end=self._on_end, no_ack=True)
        except BaseException:
            channel.abandon()
            raise
        return self

    def expect(self, correlation_id: str) -> asyncio.Future[Delivery]:
        """Register a pending call, and return a future for its reply."""
        future: asyncio.Future[Delivery] = self.connection.loop.create_future()
        self._waiting[correlation_id] = future
        return future

    def forget(self, correlation_id: str) -> None:
        """Unregister a pending call."""
        future = self._waiting.pop(correlation_id, None)
        if future is not None:
            future.cancel()

    def _on_reply(self, delivery: Delivery) -> None:
        # On a channel with a single call, the reply needs no correlation id.
        correlation_id = next(iter(self._waiting), None) if self._single else delivery.values.get("correlation_id")
        future = self._waiting.pop(correlation_id, None) if isinstance(correlation_id, str) else None
        if future is None or future.done():
            self.late += 1
            log.debug("dropped a late reply: %s", correlation_id)
        else:
            future.set_result(delivery)

    def _on_end(self, error: BideError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            _fail(future, error)
        # If only the reply queue was deleted, the channel is still open but of no use.
        self.channel.abandon()


class Caller:
    """Sends requests and waits for their replies. Any number of calls can be pending at the same time.

    Args:
        client: names the broker; the caller opens its own connection.
        replies: ``direct`` (RabbitMQ's direct reply-to), ``instance`` (a queue for this caller) or ``ephemeral`` (a
            queue for each call). For a queue shared by all callers you need no caller: publish with ``reply_to`` and
            ``correlation_id``, and consume the replies.
        timeout: the default time from sending a request to its reply.

    Raises:
        InvalidInputError: an argument is invalid.
    """

    def __init__(self, client: Client, *, replies: Replies = "direct", timeout: DelayLike = "30s") -> None:
        if replies not in ("direct", "instance", "ephemeral"):
            raise InvalidInputError(
                f"replies={replies!r} is not a kind of reply queue: give 'direct', 'instance' or 'ephemeral'"
            )
        self._replies = replies
        self._timeout = _parse_timeout(timeout)
        self._connection = ReconnectingConnection(replace(client.url, name=f"{client.url.name} (calls)"))
        self._current: _ReplyChannel | None = None
        self._opening = asyncio.Lock()
        self._late_before = 0
        self._size_limit: int | None = None
        self._closed = False

    @property
    def late(self) -> int:
        """Number of replies that came after their call had ended. With ``ephemeral`` they are not received at all."""
        return self._late_before + (self._current.late if self._current is not None else 0)

    async def __aenter__(self) -> Self:
        if self._replies == "ephemeral":
            await self._connection.connection()
        else:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Pending calls fail."""
        self._closed = True
        await self._connection.close()

    async def call(
        self,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        to: str | None = None,
        exchange: str | None = None,
        routing_key: str = "",
        timeout: DelayLike | None = None,  # noqa: ASYNC109 (the request carries it too)
        headers: Mapping[str, Any] | None = None,
        type: str | None = None,
    ) -> Message:
        """Send a request and wait for its reply. The reply needs no acknowledgement.

        Args:
            body, json, to, exchange, routing_key, headers, type: as for :meth:`bide.Client.publish`.
            timeout: time from now to the reply; the caller's default if None. The request expires with it.

        Raises:
            InvalidInputError: an argument is invalid; nothing was sent.
            UnroutableError: the server's queue does not exist.
            TargetNotFoundError: the exchange does not exist.
            ReplyTimeoutError: no reply came in time. The server may have done the work.
            ReplyLostError: the connection was lost, or the broker refused another call's request, and the reply cannot
                arrive any more. The server may have done the work.
            RemoteError: the server failed.
            BrokerError: the broker refuses, or cannot be reached; nothing was sent.
        """
        if self._closed:
            raise ClosedError("the caller was closed")
        limit = self._timeout if timeout is None else _parse_timeout(timeout)
        request = check_message(
            OutgoingMessage(
                body,
                json=json,
                to=to,
                exchange=exchange,
                routing_key=routing_key,
                headers=headers,
                type=type,
                correlation_id=new_message_id(),
                reply_to=DIRECT_REPLY_TO,  # a valid placeholder: the actual one depends on the channel
                expiration=limit,
                persistent=False,
            )
        )
        correlation_id = str(request.values["correlation_id"])
        sent = asyncio.Event()
        try:
            async with asyncio.timeout(limit.total_seconds()):
                delivery = await self._exchange(request, correlation_id, sent)
        except TimeoutError:
            raise ReplyTimeoutError(
                f"no reply from {request.target} within {format_delay(limit)}: the server may have done the work; "
                "repeat the call only if the work may be done twice"
                if sent.is_set()
                else f"the request to {request.target} was not sent within {format_delay(limit)}: the broker is "
                "unreachable, or blocks publishers",
                correlation_id=correlation_id,
            ) from None
        reply = Message(delivery, None, datetime.now(UTC))
        if ERROR_HEADER in reply.headers:
            raise RemoteError(
                f"the server of {request.target} failed: {reply.headers[ERROR_HEADER]}", correlation_id=correlation_id
            )
        return reply

    async def _exchange(self, request: PreparedMessage, correlation_id: str, sent: asyncio.Event) -> Delivery:
        if self._size_limit is not None and len(request.body) > self._size_limit:
            # The broker would close the channel, and the other calls would lose their replies.
            raise too_large(request, self._size_limit)
        single = self._replies == "ephemeral"
        while True:
            replies = await _ReplyChannel.open(self._connection, "ephemeral") if single else await self._open()
            try:
                if isinstance(request.target, ExchangeTarget):
                    await _check_exchange(replies, request.target.exchange)
                await replies.connection.writable()
                if not replies.channel.is_open:
                    # The broker closed the channel because of another request, and this one was not sent.
                    continue
                reply = replies.expect(correlation_id)
                sent.set()
                await self._send(replies.channel, request, replies.reply_to)
                return await reply
            finally:
                replies.forget(correlation_id)
                if single:
                    # Closing the channel ends the consumer, and with it the queue.
                    replies.channel.abandon()

    async def _send(self, channel: Channel, request: PreparedMessage, reply_to: str) -> None:
        values = {**request.wire_values(None, datetime.now(UTC)), "reply_to": reply_to}
        target = request.target
        exchange, key = (
            (target.exchange, target.routing_key) if isinstance(target, ExchangeTarget) else ("", target.queue)
        )
        try:
            await channel.publish(exchange=exchange, routing_key=key, values=values, body=request.body)
        except UnroutableError as error:
            raise UnroutableError(
                f"no queue is bound for the request to {target}: start a server, or check the target",
                message_id=request.message_id,
            ) from error
        except BideError as error:
            if channel.is_open:
                raise
            what = "the connection was lost"
            if channel.connection.is_open:
                self._raise_if_refused(channel, request, exchange, error)
                what = "the broker closed the channel"
            raise ReplyLostError(
                f"{what} before the request to {target} was confirmed ({error}): the server may do the work; repeat "
                "the call only if the work may be done twice",
                correlation_id=str(values["correlation_id"]),
            ) from error

    def _raise_if_refused(self, channel: Channel, request: PreparedMessage, exchange: str, error: BideError) -> None:
        """Raise the broker's error if this request made the broker close the channel."""
        if not channel.close_text:
            return
        closure = ChannelClosure(error, channel.close_text, channel.confirms.failed)
        self._size_limit = closure.limit or self._size_limit
        if closure.applies_to(exchange, request.body):
            raise error if closure.limit is None else too_large(request, closure.limit) from error

    async def _open(self) -> _ReplyChannel:
        async with self._opening:
            current = self._current
            if current is not None and current.channel.is_open:
                return current
            if current is not None:
                self._late_before += current.late
                self._current = None
            self._current = await _ReplyChannel.open(self._connection, self._replies)
            return self._current


async def _check_exchange(replies: _ReplyChannel, exchange: str) -> None:
    # A publish to a missing exchange closes the channel, and all pending calls would lose their replies.
    if exchange not in replies.exchanges:
        if not await exists(replies.connection, Topology([Exchange(exchange)])):
            raise TargetNotFoundError(
                f"the exchange {exchange!r} does not exist: declare it, and bind the queue of the servers"
            )
        replies.exchanges.add(exchange)


def _parse_timeout(timeout: DelayLike) -> timedelta:
    limit = parse_delay(timeout)
    if not limit:
        raise InvalidDelayError("the timeout is zero, which leaves no time for a reply: give more")
    return limit


def _fail(future: asyncio.Future[Delivery], error: BideError) -> None:
    if not future.done():
        future.set_exception(
            ReplyLostError(
                f"the reply cannot arrive any more ({error}): the server may have done the work; repeat the call only "
                "if the work may be done twice"
            )
        )
        # If the call ended with another error, this exception is never retrieved; reading it avoids asyncio's warning.
        future.exception()
