"""The caller's side of requests and replies.

The server's side is :mod:`bide.messaging.rpc_server`, the topology :func:`bide.patterns.rpc.rpc`::

    async with Caller(client) as prices:
        reply = await prices.call("apples", to="prices", timeout="2s")

A request expires with its caller's timeout, so that no server handles it in vain. A reply that comes
after that is dropped and counted, and is never taken for the reply to another request. When the caller's connection
breaks, all calls under way fail at once, since the way back is gone; the next call makes a new one. So it is where the
broker refuses a request, as one over its size limit or to an exchange that this user may not write to: it closes the
channel, and the replies to all others are lost. With ``ephemeral`` each call has a channel of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self

from bide.admin.apply import exists
from bide.amqp import reply_codes
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.client.broker_state import too_large
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
"""How replies come back to a :class:`Caller`; see :func:`bide.patterns.rpc.rpc`."""

ERROR_HEADER: Final = "rpc-error"
"""Header of a reply with what went wrong in the server, in a line."""

_TEMPORARY: Final = Queue("", durable=False, exclusive=True, auto_delete=True)
"""Named by the broker, and gone with its consumer."""


class _ReplyChannel:
    """A channel that requests go out by and replies come back by, and the calls that wait for these."""

    def __init__(self, connection: Connection, channel: Channel, *, single: bool) -> None:
        self.connection = connection
        self.channel = channel
        self.reply_to = DIRECT_REPLY_TO
        self.late = 0
        self.exchanges: set[str] = set()
        self._single = single
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}

    @classmethod
    async def open(cls, link: ReconnectingConnection, replies: Replies) -> Self:
        connection = await link.connection()
        channel = await connection.channel(confirms=True)
        self = cls(connection, channel, single=replies == "ephemeral")
        try:
            if replies != "direct":
                self.reply_to = (await channel.declare_queue(_TEMPORARY)).queue
            await channel.consume(self.reply_to, on_message=self._on_reply, on_end=self._on_end, no_ack=True)
        except BaseException:
            channel.abandon()
            raise
        return self

    def expect(self, correlation_id: str) -> asyncio.Future[Delivery]:
        """A future of the reply with this correlation id."""
        future: asyncio.Future[Delivery] = self.connection.loop.create_future()
        self._waiting[correlation_id] = future
        return future

    def forget(self, correlation_id: str) -> None:
        """Stop waiting for this reply."""
        future = self._waiting.pop(correlation_id, None)
        if future is not None:
            future.cancel()

    def _on_reply(self, delivery: Delivery) -> None:
        # Where there is one call alone, its reply needs no correlation id.
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
            _lose(future, error)
        # Where the broker took the reply queue away, the channel is as good as closed: no reply comes by it any more.
        self.channel.abandon()


class Caller:
    """Sends requests and waits for their replies. Any number of calls may be under way at once.

    Args:
        client: says which broker; the caller has a connection of its own.
        replies: ``direct`` (RabbitMQ's direct reply-to), ``instance`` (a queue for this caller) or ``ephemeral`` (a
            queue for each call). With one queue for all callers there is nothing to wait for: publish with ``reply_to``
            and a ``correlation_id``, and consume the replies anywhere.
        timeout: for a call that does not say; from its sending to its reply.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    def __init__(self, client: Client, *, replies: Replies = "direct", timeout: DelayLike = "30s") -> None:
        if replies not in ("direct", "instance", "ephemeral"):
            raise InvalidInputError(
                f"replies={replies!r} is not a kind of reply queue: give 'direct', 'instance' or 'ephemeral'"
            )
        self._replies = replies
        self._timeout = _patience(timeout)
        self._link = ReconnectingConnection(replace(client.url, name=f"{client.url.name} (calls)"))
        self._current: _ReplyChannel | None = None
        self._opening = asyncio.Lock()
        self._late_before = 0
        self._largest: int | None = None
        self._closed = False

    @property
    def late(self) -> int:
        """Replies that came after their call had ended. With ``ephemeral`` these come nowhere."""
        return self._late_before + (self._current.late if self._current is not None else 0)

    async def __aenter__(self) -> Self:
        if self._replies == "ephemeral":
            await self._link.connection()
        else:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Calls under way fail."""
        self._closed = True
        await self._link.close()

    async def call(
        self,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        to: str | None = None,
        exchange: str | None = None,
        routing_key: str = "",
        timeout: DelayLike | None = None,  # noqa: ASYNC109 (it goes with the request, too)
        headers: Mapping[str, Any] | None = None,
        type: str | None = None,
    ) -> Message:
        """Send a request and wait for its reply, which needs no settling.

        Args:
            body, json, to, exchange, routing_key, headers, type: as for :meth:`bide.Client.publish`.
            timeout: from now to the reply; the caller's own if None. The request expires with it.

        Raises:
            InvalidInputError: in one of its kinds; nothing was sent.
            UnroutableError: there is no server's queue.
            TargetNotFoundError: there is no such exchange.
            ReplyTimeoutError: no reply came in time. Whether the work was done is not known.
            ReplyLostError: the connection broke, or the broker refused another call's request, and the way back is
                gone. Whether the work was done is not known.
            RemoteError: the server failed.
            BrokerError: the broker cannot be reached, or refuses; nothing was sent.
        """
        if self._closed:
            raise ClosedError("the caller was closed")
        patience = self._timeout if timeout is None else _patience(timeout)
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
                reply_to=DIRECT_REPLY_TO,  # of the right form; the real one is known later
                expiration=patience,
                persistent=False,
            )
        )
        correlation_id = str(request.values["correlation_id"])
        sent = asyncio.Event()
        try:
            async with asyncio.timeout(patience.total_seconds()):
                delivery = await self._exchange(request, correlation_id, sent)
        except TimeoutError:
            raise ReplyTimeoutError(
                f"no reply from {request.target} within {format_delay(patience)}: it is not known whether the work was "
                "done; ask again only what may be done twice"
                if sent.is_set()
                else f"the request to {request.target} was not sent within {format_delay(patience)}: the broker was "
                "not reached, or takes no publishes at the moment",
                correlation_id=correlation_id,
            ) from None
        reply = Message(delivery, None, datetime.now(UTC))
        if ERROR_HEADER in reply.headers:
            raise RemoteError(
                f"the server of {request.target} failed: {reply.headers[ERROR_HEADER]}", correlation_id=correlation_id
            )
        return reply

    async def _exchange(self, request: PreparedMessage, correlation_id: str, sent: asyncio.Event) -> Delivery:
        if self._largest is not None and len(request.body) > self._largest:
            # It would take the way back of the others along.
            raise too_large(request, self._largest)
        single = self._replies == "ephemeral"
        while True:
            way = await _ReplyChannel.open(self._link, "ephemeral") if single else await self._open()
            try:
                if isinstance(request.target, ExchangeTarget):
                    await _check_exchange(way, request.target.exchange)
                await way.connection.writable()
                if not way.channel.is_open:
                    # The broker closed it for another request meanwhile, and this one was not sent.
                    continue
                reply = way.expect(correlation_id)
                sent.set()
                await self._send(way.channel, request, way.reply_to)
                return await reply
            finally:
                way.forget(correlation_id)
                if single:
                    # The queue goes with its consumer.
                    way.channel.abandon()

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
                f"no queue takes the request to {target}: is there a server?", message_id=request.message_id
            ) from error
        except BideError as error:
            if channel.is_open:
                raise
            what = "the connection broke"
            if channel.connection.is_open:
                self._judge(channel, request, exchange, error)
                what = "the broker closed the channel"
            raise ReplyLostError(
                f"{what} before the request to {target} was confirmed ({error}): it is not known whether the work is "
                "done",
                correlation_id=str(values["correlation_id"]),
            ) from error

    def _judge(self, channel: Channel, request: PreparedMessage, exchange: str, error: BideError) -> None:
        """Raise what the broker closed the channel with, if that was for this request."""
        size = reply_codes.size_limit(channel.close_text)
        if size is not None:
            _, self._largest = size
            if len(request.body) > self._largest:
                raise too_large(request, self._largest) from error
        elif channel.close_text:
            was_alone = channel.confirms.failed.total() == 1
            if was_alone or reply_codes.subject(channel.close_text) == exchange:
                raise error

    async def _open(self) -> _ReplyChannel:
        async with self._opening:
            current = self._current
            if current is not None and current.channel.is_open:
                return current
            if current is not None:
                self._late_before += current.late
                self._current = None
            self._current = await _ReplyChannel.open(self._link, self._replies)
            return self._current


async def _check_exchange(way: _ReplyChannel, exchange: str) -> None:
    # A publish to a missing exchange closes the channel, and with it the way back of all other calls.
    if exchange not in way.exchanges:
        if not await exists(way.connection, Topology([Exchange(exchange)])):
            raise TargetNotFoundError(
                f"the exchange {exchange!r} does not exist: declare it, and bind the servers' queue"
            )
        way.exchanges.add(exchange)


def _patience(timeout: DelayLike) -> timedelta:
    patience = parse_delay(timeout)
    if not patience:
        raise InvalidDelayError("the timeout is zero, and no reply is as quick: give more")
    return patience


def _lose(future: asyncio.Future[Delivery], error: BideError) -> None:
    if not future.done():
        future.set_exception(
            ReplyLostError(f"the way back for the reply is gone ({error}): it is not known whether the work was done")
        )
        # The call may have ended with an error of its own, and then this one is not retrieved.
        future.exception()
