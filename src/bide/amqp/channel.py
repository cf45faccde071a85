"""One channel of a connection: calls, confirmed publishes, deliveries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from pamqp import commands
from pamqp.base import Frame

from bide.amqp import codec, methods, reply_codes
from bide.amqp.acks import AckSender
from bide.amqp.confirms import Awaited, Confirms, Unconfirmed, fail
from bide.amqp.delivery import Assembly, Delivery, Return
from bide.errors import BideError, ClosedError, ConsumerCancelledError
from bide.runtime.logs import logger
from bide.topology import Binding, Exchange, Queue

if TYPE_CHECKING:
    from bide.amqp.frame_sink import FrameSink

log = logger(__name__)

_CONSUMER_TAG: Final = "bide-{}"
_CLOSE_GRACE: Final = 5.0
_ACKS_LATE: Final = 1.0
"""Seconds after the last acknowledgement from which on the broker is taken to have passed it on."""
_ACKS_TAKEN: Final = 0.05
"""Seconds; a broker with cores to spare was seen to pass on what it held back within 10 ms."""
_ACKS_TAKEN_FACTOR: Final = 2.0
"""The same for a broker without, in times that it took for an answer."""


@dataclass(slots=True, kw_only=True)
class _Call:
    replies: tuple[type[Frame], ...]
    future: asyncio.Future[Any]


@dataclass(slots=True, kw_only=True)
class _Consumer:
    on_message: Callable[[Delivery], None]
    on_end: Callable[[BideError], None]


class Channel:
    """A channel. Calls may overlap: the broker answers them in the order in which they were sent.

    When the broker closes the channel, every waiting call and publish fails with the reason.

    Attributes:
        confirms: the publishes that wait for their confirms.
        closed_with: why the channel is closed, or None while it can be used.
        close_text: the broker's own words, where it was the broker that closed it.
    """

    def __init__(self, connection: FrameSink, number: int) -> None:
        self.connection = connection
        self.number = number
        self.closed_with: BideError | None = None
        self.close_text = ""
        self.confirms = Confirms()
        self._acks = AckSender(connection.loop, self._write)
        self._calls: deque[_Call] = deque()
        self._consumers: dict[str, _Consumer] = {}
        self._consumers_made = 0
        self._incoming: Assembly | None = None
        self._closing = False
        self._gone: asyncio.Future[None] = connection.loop.create_future()

    @property
    def is_open(self) -> bool:
        """Whether it can still be used."""
        return self.closed_with is None

    @property
    def is_waiting(self) -> bool:
        """Whether a call waits for its reply, or a message for its confirm."""
        return bool(self._calls or self.confirms)

    def call(self, payload: bytes, *replies: type[Frame]) -> asyncio.Future[Any]:
        """Send a method and return a future of its reply.

        Raises:
            BideError: the channel is closed, with the reason why.
        """
        if self.closed_with is not None:
            raise self.closed_with
        future: asyncio.Future[Any] = self.connection.loop.create_future()
        self._calls.append(_Call(replies=replies, future=future))
        self._acks.flush()
        self._write(payload)
        return future

    async def open(self) -> None:
        """Open it on the broker."""
        await self.call(codec.method(20, 10, b"\x00"), commands.Channel.OpenOk)

    def probe(self) -> None:
        """Open and close it, for the sake of an answer."""
        self._write(codec.method(20, 10, b"\x00"))
        self.abandon()

    async def confirm_select(self) -> None:
        """Switch publisher confirms on."""
        await self.call(codec.method(85, 10, b"\x00"), commands.Confirm.SelectOk)

    async def close(self) -> None:
        """Close it and wait for the broker to do so: what is unacknowledged is back in its queue then."""
        try:
            await self.settle_up()
        finally:
            # Also when the wait is cancelled.
            self.abandon()
        done, _ = await asyncio.wait({self._gone}, timeout=_CLOSE_GRACE)
        if not done:
            log.debug("the broker did not answer the closing of channel %s", self.number)

    async def settle_up(self) -> None:
        """Leave quorum queues the time to take in the acknowledgements of late.

        The broker passes on 32 at a time, and forgets the others when the channel closes: their messages come again.
        It answers no acknowledgement, but whatever else a channel asks, it answers in turn: then it has read them all,
        and how long that took says how busy it is. (To cancel the consumers would wait for their queues, but then
        another consumer gets what comes after the messages that are to go back.)
        """
        self.flush_acks()
        clock = self.connection.loop.time
        begun = clock()
        if self.closed_with is not None or begun - self._acks.sent_at > _ACKS_LATE:
            return
        # It asks for what is so already: that messages flow.
        flow = self.call(codec.method(20, 20, codec.bits(True)), commands.Channel.FlowOk)
        done, _ = await asyncio.wait({flow}, timeout=_CLOSE_GRACE)
        if not done or flow.exception() is not None:
            return
        answered = clock()
        wait = max(self._acks.sent_at + _ACKS_TAKEN - answered, _ACKS_TAKEN_FACTOR * (answered - begun))
        await asyncio.sleep(wait)

    def abandon(self) -> None:
        """Close it without waiting; unconfirmed publishes fail, unacknowledged deliveries go back to their queues."""
        if self.closed_with is not None:
            return
        self.flush_acks()
        self._write(codec.method(20, 40, codec.short(200), codec.short_string("closed"), b"\x00\x00\x00\x00"))
        # Its number stays taken until the broker has answered.
        self._closing = True
        self._close(ClosedError("the channel was closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            self.abandon()

    # -- topology

    def declare_exchange(self, exchange: Exchange, *, passive: bool = False) -> asyncio.Future[Any]:
        """Declare an exchange, or only ask whether it exists."""
        return self.call(methods.declare_exchange(exchange, passive=passive), commands.Exchange.DeclareOk)

    def declare_queue(self, queue: Queue, *, passive: bool = False) -> asyncio.Future[Any]:
        """Declare a queue, or only ask whether it exists; the reply has its counts."""
        return self.call(methods.declare_queue(queue, passive=passive), commands.Queue.DeclareOk)

    def bind(self, binding: Binding) -> asyncio.Future[Any]:
        """Make a binding."""
        return self.call(methods.bind(binding), commands.Queue.BindOk, commands.Exchange.BindOk)

    def unbind(self, binding: Binding) -> asyncio.Future[Any]:
        """Remove a binding; a missing binding is not an error."""
        return self.call(methods.unbind(binding), commands.Queue.UnbindOk, commands.Exchange.UnbindOk)

    def delete_queue(self, name: str, *, if_empty: bool = False, if_unused: bool = False) -> asyncio.Future[Any]:
        """Delete a queue; the reply has the number of messages that went with it."""
        return self.call(methods.delete_queue(name, if_empty=if_empty, if_unused=if_unused), commands.Queue.DeleteOk)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> asyncio.Future[Any]:
        """Delete an exchange."""
        return self.call(methods.delete_exchange(name, if_unused=if_unused), commands.Exchange.DeleteOk)

    def purge_queue(self, name: str) -> asyncio.Future[Any]:
        """Throw away the ready messages of a queue; the reply has their number."""
        return self.call(methods.purge_queue(name), commands.Queue.PurgeOk)

    # -- publishing

    def publish(
        self,
        *,
        exchange: str,
        routing_key: str,
        values: Mapping[str, Any],
        body: bytes,
        mandatory: bool = True,
    ) -> asyncio.Future[None]:
        """Send a message and return a future of its confirm.

        The future fails with ``UnroutableError`` for a returned message, ``PublishRefusedError`` for a negative
        confirm, and with the reason of the closing if the channel closes first. Confirms must be on.

        Args:
            values: properties by their AMQP names.

        Raises:
            BideError: the channel is closed; nothing was sent.
            InvalidInputError: a value cannot be encoded; nothing was sent.
        """
        frames = codec.publish(
            self.number,
            exchange=exchange,
            routing_key=routing_key,
            mandatory=mandatory,
            encoded_properties=codec.properties(values),
            body=body,
            frame_max=self.connection.frame_max,
        )
        message = Awaited(exchange, routing_key, values.get("message_id"), body, loop=self.connection.loop)
        self.post(b"".join(frames), message)
        return message.future

    def post(self, frames: bytes, message: Unconfirmed) -> None:
        """Send an encoded message, whose ``settle`` is called with the result. Confirms must be on.

        Raises:
            BideError: the channel is closed; nothing was sent.
        """
        if self.closed_with is not None:
            raise self.closed_with
        self.confirms.add(message)
        self.connection.send(frames)

    # -- receiving

    async def qos(self, prefetch: int) -> None:
        """At most this many unacknowledged deliveries per consumer; 0 for any number."""
        await self.call(codec.method(60, 10, codec.long(0), codec.short(prefetch), b"\x00"), commands.Basic.QosOk)
        self._acks.expect(prefetch)

    async def consume(
        self,
        queue: str,
        *,
        on_message: Callable[[Delivery], None],
        on_end: Callable[[BideError], None],
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        no_ack: bool = False,
    ) -> str:
        """Start a consumer and return its tag; with ``no_ack`` deliveries count as acknowledged when they are sent.

        Args:
            on_message: called for every delivery, in order.
            on_end: called once, when no more deliveries will come: the channel closed, or the broker cancelled.
        """
        self._consumers_made += 1
        tag = _CONSUMER_TAG.format(self._consumers_made)
        self._consumers[tag] = _Consumer(on_message=on_message, on_end=on_end)
        try:
            await self.call(
                codec.method(
                    60,
                    20,
                    b"\x00\x00",
                    codec.short_string(queue),
                    codec.short_string(tag),
                    codec.bits(False, no_ack, exclusive, False),
                    codec.table(arguments),
                ),
                commands.Basic.ConsumeOk,
            )
        except BaseException:
            self._consumers.pop(tag, None)
            raise
        return tag

    async def cancel(self, tag: str) -> None:
        """Stop a consumer; what it was sent and has not acknowledged stays with it until the channel closes.

        Deliveries come until the broker has answered.
        """
        await self.call(codec.method(60, 30, codec.short_string(tag), b"\x00"), commands.Basic.CancelOk)
        self._consumers.pop(tag, None)

    def cancel_nowait(self, tag: str) -> None:
        """Stop a consumer without waiting; see :meth:`cancel`."""
        self._send(codec.method(60, 30, codec.short_string(tag), b"\x01"))

    async def get(self, queue: str) -> Delivery | None:
        """Take one message, or None when the queue is empty. It must be settled like any delivery."""
        reply: Delivery | None = await self.call(
            codec.method(60, 70, b"\x00\x00", codec.short_string(queue), b"\x00"), commands.Basic.GetEmpty
        )
        return reply

    def ack(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a delivery, or all up to this one; single ones wait a moment for others."""
        if self.closed_with is not None:
            raise self.closed_with
        if multiple:
            self._settle(delivery_tag, 80, codec.bits(multiple), multiple=True)
        else:
            self._acks.add(delivery_tag)

    def nack(self, delivery_tag: int, *, multiple: bool = False, requeue: bool = True) -> None:
        """Give a delivery back to its queue, or let it be dead-lettered; a quorum queue of 4.3 counts no attempt."""
        self._settle(delivery_tag, 120, codec.bits(multiple, requeue), multiple=multiple)

    def reject(self, delivery_tag: int, *, requeue: bool = True) -> None:
        """Give a delivery back to its queue, counted as a failed attempt, or let it be dead-lettered."""
        self._settle(delivery_tag, 90, codec.bits(requeue))

    def flush_acks(self) -> None:
        """Send the acknowledgements that wait for others."""
        if self.closed_with is None:
            self._acks.flush()

    def _settle(self, delivery_tag: int, method: int, how: bytes, *, multiple: bool = False) -> None:
        self._send(codec.method(codec.BASIC_CLASS, method, codec.long_long(delivery_tag), how))
        self._acks.settled(delivery_tag, multiple=multiple)

    def _send(self, payload: bytes) -> None:
        if self.closed_with is not None:
            raise self.closed_with
        # What was acknowledged before goes before.
        self.flush_acks()
        self._write(payload)

    def _write(self, payload: bytes) -> None:
        self.connection.send(codec.frame(codec.METHOD, self.number, payload))

    # -- what the connection hands over

    def on_method(self, method: Frame) -> None:
        """A method frame for this channel."""
        match method:
            case commands.Channel.Close():
                self._on_close(method)
            case commands.Channel.CloseOk() if self._closing:
                self._end()
            case _ if self._closing:
                # What was under way when we closed it.
                return
            case commands.Basic.Cancel():
                self._on_cancel(method)
            case commands.Channel.Flow():
                self._write(codec.method(20, 21, codec.bits(bool(method.active))))
            case _:
                self._answer(method)

    def _answer(self, method: Frame) -> None:
        if not self._calls or not isinstance(method, self._calls[0].replies):
            self.connection.abort(f"an unexpected {method.name} came on channel {self.number}")
            return
        call = self._calls.popleft()
        if not call.future.done():
            call.future.set_result(None if isinstance(method, commands.Basic.GetEmpty) else method)

    def on_message(self, message: Delivery | Return) -> None:
        """A method frame that announces a message."""
        self._incoming = Assembly(message)

    def on_header(self, size: int, values: Mapping[str, Any]) -> None:
        """A content header for this channel."""
        if self._incoming is None:
            raise ValueError("a content header without a method")
        if self._incoming.header(size, values):
            self._complete(self._incoming.message)

    def on_body(self, payload: bytes) -> None:
        """A piece of a body for this channel."""
        if self._incoming is None:
            raise ValueError("a body without a method")
        if self._incoming.body(payload):
            self._complete(self._incoming.message)

    def _complete(self, message: Delivery | Return) -> None:
        self._incoming = None
        if self._closing:
            return
        if isinstance(message, Return):
            self.confirms.returned(message)
        elif message.message_count is not None:
            self._on_got(message)
        else:
            consumer = self._consumers.get(message.consumer_tag)
            if consumer is not None:
                consumer.on_message(message)
            # A delivery for a consumer that was just cancelled stays unsettled and returns when the channel closes.

    def _on_got(self, delivery: Delivery) -> None:
        if not self._calls or commands.Basic.GetEmpty not in self._calls[0].replies:
            self.connection.abort(f"an unexpected Basic.GetOk came on channel {self.number}")
            return
        call = self._calls.popleft()
        if not call.future.done():
            call.future.set_result(delivery)

    def _on_cancel(self, method: Any) -> None:
        consumer = self._consumers.pop(method.consumer_tag, None)
        if consumer is not None:
            consumer.on_end(
                ConsumerCancelledError("the broker cancelled the consumer: its queue was deleted, or lost its leader")
            )

    def _on_close(self, method: Any) -> None:
        self._write(codec.method(20, 41))
        if self._closing:
            # Both closed at once: the broker answers ours too.
            return
        self.close_text = method.reply_text or ""
        self._close(reply_codes.channel_error(method.reply_code or 0, self.close_text))
        self._end()

    def fail(self, error: BideError) -> None:
        """The connection is gone: everything that waits gets the error."""
        self._close(error)
        self._end()

    def _close(self, error: BideError) -> None:
        if self.closed_with is not None:
            return
        self.closed_with = error
        self._acks.drop()
        calls, self._calls = self._calls, deque()
        for call in calls:
            fail(call.future, error)
        self.confirms.fail(error)
        consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            consumer.on_end(error)

    async def gone(self) -> None:
        """Wait until the broker has closed it too, which frees its number."""
        await asyncio.shield(self._gone)

    def _end(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
            self.connection.forget(self.number)
