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
from bide.amqp.acked_queues import AckedQueues
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
_ACKS_TIMEOUT: Final = 10.0
"""Seconds to wait until quorum queues have the acknowledgements."""
_CLOSE_TIMEOUT: Final = 5.0
"""Seconds to wait for the broker's answer to the closing of a channel."""


@dataclass(slots=True, kw_only=True)
class _Call:
    replies: tuple[type[Frame], ...]
    future: asyncio.Future[Any]


@dataclass(slots=True, kw_only=True)
class _Consumer:
    on_message: Callable[[Delivery], None]
    on_end: Callable[[BideError], None]


class Channel:
    """A channel. Calls may overlap: the broker answers them in order.

    When the broker closes the channel, every waiting call and publish fails with the reason.

    Attributes:
        confirms: the unconfirmed publishes.
        closed_with: why the channel is closed; None while it is open.
        close_text: the broker's reply text, if the broker closed the channel.
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
        self._consumer_count = 0
        self._last_delivery_tag = 0
        self._acked_queues = AckedQueues(self._acks)
        self._incoming: Assembly | None = None
        self._closing = False
        self._closed_fully: asyncio.Future[None] = connection.loop.create_future()

    @property
    def is_open(self) -> bool:
        """Whether the channel can be used."""
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
        """Open the channel on the broker."""
        await self.call(codec.method(20, 10, b"\x00"), commands.Channel.OpenOk)

    def probe(self) -> None:
        """Open and close the channel, to make the broker answer."""
        self._write(codec.method(20, 10, b"\x00"))
        self.abandon()

    def round_trip(self) -> asyncio.Future[Any]:
        """Make the broker answer, by a call in which no queue takes part, and that needs no permission."""
        return self.call(methods.flow(), commands.Channel.FlowOk)

    async def confirm_select(self) -> None:
        """Switch publisher confirms on."""
        await self.call(codec.method(85, 10, b"\x00"), commands.Confirm.SelectOk)

    async def close(self) -> None:
        """Close the channel and wait for the broker's answer; unacknowledged messages are then back in their queues."""
        try:
            await self.settle_acks()
        finally:
            # Close it even if the wait is cancelled.
            self.abandon()
        done, _ = await asyncio.wait({self._closed_fully}, timeout=_CLOSE_TIMEOUT)
        if not done:
            log.debug("the broker did not answer the closing of channel %s", self.number)

    async def settle_acks(self) -> None:
        """Wait until quorum queues have the acknowledgements sent so far, as far as that can be known."""
        self.flush_acks()
        if self.closed_with is not None:
            return
        try:
            async with asyncio.timeout(_ACKS_TIMEOUT):
                await self._acked_queues.have_acks(self)
        except (BideError, TimeoutError) as error:
            log.debug("acknowledgements of channel %s may be lost: %r", self.number, error)

    @property
    def prefetch_is_full(self) -> bool:
        """Whether as many deliveries are unsettled as the prefetch allows for one consumer."""
        return self._last_delivery_tag - self._acks.acks.settled_count >= self._acks.prefetch

    def abandon(self) -> None:
        """Close the channel without waiting: unconfirmed publishes fail, unacknowledged messages are requeued."""
        if self.closed_with is not None:
            return
        self.flush_acks()
        self._write(codec.method(20, 40, codec.short(200), codec.short_string("closed"), b"\x00\x00\x00\x00"))
        # The channel number stays in use until the broker has answered.
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
        """Declare an exchange, or only check that it exists (passive)."""
        return self.call(methods.declare_exchange(exchange, passive=passive), commands.Exchange.DeclareOk)

    def declare_queue(self, queue: Queue, *, passive: bool = False) -> asyncio.Future[Any]:
        """Declare a queue, or only check that it exists (passive); the reply has its counts."""
        return self.call(methods.declare_queue(queue, passive=passive), commands.Queue.DeclareOk)

    def bind(self, binding: Binding) -> asyncio.Future[Any]:
        """Create a binding."""
        return self.call(methods.bind(binding), commands.Queue.BindOk, commands.Exchange.BindOk)

    def unbind(self, binding: Binding) -> asyncio.Future[Any]:
        """Remove a binding; a missing binding is not an error."""
        return self.call(methods.unbind(binding), commands.Queue.UnbindOk, commands.Exchange.UnbindOk)

    def delete_queue(self, name: str, *, if_empty: bool = False, if_unused: bool = False) -> asyncio.Future[Any]:
        """Delete a queue; the reply has the number of messages deleted with it."""
        return self.call(methods.delete_queue(name, if_empty=if_empty, if_unused=if_unused), commands.Queue.DeleteOk)

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> asyncio.Future[Any]:
        """Delete an exchange."""
        return self.call(methods.delete_exchange(name, if_unused=if_unused), commands.Exchange.DeleteOk)

    def purge_queue(self, name: str) -> asyncio.Future[Any]:
        """Discard the ready messages of a queue; the reply has their number."""
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

        The future fails with ``UnroutableError`` for a returned message, with ``PublishRefusedError`` for a negative
        confirm, and with the channel's error if the channel closes first. Confirms must be on.

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
        """Send an encoded message; its ``settle`` is called with the result. Confirms must be on.

        Raises:
            BideError: the channel is closed; nothing was sent.
        """
        if self.closed_with is not None:
            raise self.closed_with
        self.confirms.add(message)
        self.connection.send(frames)

    # -- receiving

    async def qos(self, prefetch: int) -> None:
        """Set the prefetch: the number of unacknowledged deliveries per consumer; 0 for no limit."""
        await self.call(methods.qos(prefetch), commands.Basic.QosOk)
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
        """Start a consumer and return its tag; with ``no_ack`` the broker treats deliveries as acknowledged.

        Args:
            on_message: called for each delivery, in order.
            on_end: called once, after the last delivery: the channel closed, or the broker cancelled the consumer.
        """
        self._consumer_count += 1
        tag = _CONSUMER_TAG.format(self._consumer_count)
        self._consumers[tag] = _Consumer(on_message=on_message, on_end=on_end)
        try:
            await self.call(
                methods.consume(queue, tag, arguments, exclusive=exclusive, no_ack=no_ack), commands.Basic.ConsumeOk
            )
        except BaseException:
            self._consumers.pop(tag, None)
            raise
        self._acked_queues.consumed(queue, tag, arguments, exclusive=exclusive, no_ack=no_ack)
        return tag

    async def cancel(self, tag: str) -> None:
        """Cancel a consumer. Its unacknowledged messages stay with the channel until the channel closes.

        Deliveries may still come until the broker has answered.
        """
        answer = self.call(methods.cancel(tag), commands.Basic.CancelOk)
        self._acked_queues.cancelling(tag, no_wait=False)
        await answer
        self._consumers.pop(tag, None)

    def cancel_nowait(self, tag: str) -> None:
        """Cancel a consumer without waiting; see :meth:`cancel`."""
        self._send(methods.cancel(tag, no_wait=True))
        self._acked_queues.cancelling(tag, no_wait=True)

    async def get(self, queue: str) -> Delivery | None:
        """Get one message, or None if the queue is empty. The message must be settled like any delivery."""
        answer = self.call(methods.get(queue), commands.Basic.GetEmpty)
        self._acked_queues.getting(queue)
        reply: Delivery | None = await answer
        if reply is not None:
            self._acked_queues.got(queue)
        return reply

    def ack(self, delivery_tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a delivery, or all up to this one. A single acknowledgement waits briefly for others."""
        if self.closed_with is not None:
            raise self.closed_with
        if multiple:
            self._settle(delivery_tag, 80, codec.bits(multiple), multiple=True)
        else:
            self._acks.add(delivery_tag)

    def nack(self, delivery_tag: int, *, multiple: bool = False, requeue: bool = True) -> None:
        """Requeue or dead-letter a delivery. A quorum queue of 4.3 does not count it as a failed attempt."""
        self._settle(delivery_tag, 120, codec.bits(multiple, requeue), multiple=multiple, requeued=requeue)

    def reject(self, delivery_tag: int, *, requeue: bool = True) -> None:
        """Requeue or dead-letter a delivery. A quorum queue counts it as a failed attempt."""
        self._settle(delivery_tag, 90, codec.bits(requeue), requeued=requeue)

    def flush_acks(self) -> None:
        """Send the acknowledgements that wait for others."""
        if self.closed_with is None:
            self._acks.flush()

    def _settle(
        self, delivery_tag: int, method: int, how: bytes, *, multiple: bool = False, requeued: bool = False
    ) -> None:
        self._send(codec.method(codec.BASIC_CLASS, method, codec.long_long(delivery_tag), how))
        self._acks.settled(delivery_tag, multiple=multiple, requeued=requeued)

    def _send(self, payload: bytes) -> None:
        if self.closed_with is not None:
            raise self.closed_with
        # Keep the order: acknowledgements that wait go first.
        self.flush_acks()
        self._write(payload)

    def _write(self, payload: bytes) -> None:
        self.connection.send(codec.frame(codec.METHOD, self.number, payload))

    # -- frames from the connection

    def on_method(self, method: Frame) -> None:
        """Handle a method frame of this channel."""
        match method:
            case commands.Channel.Close():
                self._on_close(method)
            case commands.Channel.CloseOk() if self._closing:
                self._free_number()
            case _ if self._closing:
                # The broker sent it before it read the close method: ignore it.
                return
            case commands.Basic.Cancel():
                self._on_cancel(method)
            case commands.Channel.Flow():
                self._write(codec.method(20, 21, codec.bits(bool(method.active))))
            case _:
                self._on_reply(method)

    def _on_reply(self, method: Frame) -> None:
        if not self._calls or not isinstance(method, self._calls[0].replies):
            self.connection.abort(f"the broker sent an unexpected {method.name} on channel {self.number}")
            return
        call = self._calls.popleft()
        if not call.future.done():
            call.future.set_result(None if isinstance(method, commands.Basic.GetEmpty) else method)

    def on_message(self, message: Delivery | Return) -> None:
        """Handle a method frame that announces a message."""
        self._incoming = Assembly(message)

    def on_header(self, size: int, values: Mapping[str, Any]) -> None:
        """Handle a content header of this channel."""
        if self._incoming is None:
            raise ValueError("a content header without a method")
        if self._incoming.header(size, values):
            self._on_complete(self._incoming.message)

    def on_body(self, payload: bytes) -> None:
        """Handle a body frame of this channel."""
        if self._incoming is None:
            raise ValueError("a body without a method")
        if self._incoming.body(payload):
            self._on_complete(self._incoming.message)

    def _on_complete(self, message: Delivery | Return) -> None:
        self._incoming = None
        if self._closing:
            return
        if isinstance(message, Return):
            self.confirms.returned(message)
        elif message.message_count is not None:
            self._on_got(message)
        else:
            self._last_delivery_tag = message.delivery_tag
            consumer = self._consumers.get(message.consumer_tag)
            if consumer is not None:
                consumer.on_message(message)
            # A delivery to a consumer that was just cancelled stays unsettled. It is requeued when the channel closes.

    def _on_got(self, delivery: Delivery) -> None:
        if not self._calls or commands.Basic.GetEmpty not in self._calls[0].replies:
            self.connection.abort(f"the broker sent an unexpected Basic.GetOk on channel {self.number}")
            return
        call = self._calls.popleft()
        if not call.future.done():
            call.future.set_result(delivery)

    def _on_cancel(self, method: Any) -> None:
        consumer = self._consumers.pop(method.consumer_tag, None)
        if consumer is not None:
            self._acked_queues.deleted(method.consumer_tag)
            consumer.on_end(
                ConsumerCancelledError("the broker cancelled the consumer: its queue was deleted, or lost its leader")
            )

    def _on_close(self, method: Any) -> None:
        self._write(codec.method(20, 41))
        if self._closing:
            # Both sides closed at once: the broker answers our close method too.
            return
        self.close_text = method.reply_text or ""
        self._close(reply_codes.channel_error(method.reply_code or 0, self.close_text))
        self._free_number()

    def fail(self, error: BideError) -> None:
        """Fail everything that waits: the connection is lost."""
        self._close(error)
        self._free_number()

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
        """Wait until the broker has closed the channel too, which frees its number."""
        await asyncio.shield(self._closed_fully)

    def _free_number(self) -> None:
        if not self._closed_fully.done():
            self._closed_fully.set_result(None)
            self.connection.forget(self.number)
