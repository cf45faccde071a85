"""Pipelined, confirmed publishing on one connection."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from bide.amqp import codec
from bide.amqp.channel import Channel
from bide.amqp.confirms import Unconfirmed
from bide.amqp.connection import Connection
from bide.client.channel_closure import ChannelClosure
from bide.errors import BideError, InvalidInputError, PublishError
from bide.runtime.logs import logger

log = logger(__name__)


class PipelinedMessage(Unconfirmed):
    """A message that a :class:`PipelinedSender` sends.

    Attributes:
        values: the properties by their AMQP names.
    """

    __slots__ = ("_sender", "values")

    def __init__(self, exchange: str, routing_key: str, values: Mapping[str, Any], body: bytes) -> None:
        super().__init__(exchange, routing_key, values.get("message_id"), body)
        self.values = values
        self._sender: PipelinedSender[Any] | None = None

    def sent_by(self, sender: PipelinedSender[Any]) -> None:
        """Remember the sender, and forget an earlier return."""
        self._sender = sender
        self.returned = None

    def settle(self, error: BideError | None) -> None:
        """Pass the result on to the sender."""
        assert self._sender is not None
        self._sender.settled(self, error)


_Message = TypeVar("_Message", bound=PipelinedMessage)


class PipelinedSender(Generic[_Message]):
    """A publishing channel with confirms, opened again when the broker closes it.

    If it is not known for which message the broker closed the channel, the unconfirmed messages are sent again one at a
    time, until the rejected one is found.

    Args:
        on_result: called once for each message: with None if the broker has it, else with the error why the broker does
            not accept it or why it cannot be encoded. It is not called for unconfirmed messages if the connection
            breaks.
        failed: called with the error when no channel can be opened.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        on_result: Callable[[_Message, BideError | None], None],
        failed: Callable[[BideError], None],
    ) -> None:
        self._connection = connection
        self._on_result = on_result
        self._failed = failed
        self._send_queue: deque[_Message] = deque()
        self._unconfirmed: dict[_Message, None] = {}
        self._lost: list[_Message] = []
        self._suspects_left = 0
        self._channel: Channel | None = None
        self._open_task: asyncio.Task[None] | None = None

    def put(self, message: _Message) -> None:
        """Send a message as soon as possible."""
        self._send_queue.append(message)
        self._send_waiting()

    def close(self) -> None:
        """Send no more messages, and report no more results."""
        self._send_queue.clear()
        self._unconfirmed.clear()
        if self._open_task is not None:
            self._open_task.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abandon()

    def _send_waiting(self) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            if self._open_task is None and not self._lost:
                self._open_task = asyncio.create_task(self._open())
            return
        while self._send_queue and not (self._suspects_left and self._unconfirmed):
            self._send(channel, self._send_queue.popleft())

    def _send(self, channel: Channel, message: _Message) -> None:
        try:
            frames = codec.publish(
                channel.number,
                exchange=message.exchange,
                routing_key=message.routing_key,
                mandatory=True,
                encoded_properties=codec.properties(message.values),
                body=message.body,
                frame_max=self._connection.frame_max,
            )
        except InvalidInputError as error:
            self._on_result(message, error)
            return
        self._unconfirmed[message] = None
        message.sent_by(self)
        channel.post(b"".join(frames), message)

    async def _open(self) -> None:
        try:
            self._channel = await self._connection.channel(confirms=True)
        except BideError as error:
            self._failed(error)
            return
        finally:
            self._open_task = None
        self._send_waiting()

    def settled(self, message: _Message, error: BideError | None) -> None:
        """Handle the result of one message: a confirm, a refusal, or the close of the channel."""
        if message not in self._unconfirmed:
            # The sender was closed meanwhile.
            return
        del self._unconfirmed[message]
        if error is not None and not isinstance(error, PublishError):
            if not self._lost:
                self._connection.loop.call_soon(self._on_channel_closed, self._channel, error)
            self._lost.append(message)
            return
        self._suspects_left = max(self._suspects_left - 1, 0)
        self._on_result(message, error)
        if self._send_queue:
            self._send_waiting()

    def _on_channel_closed(self, channel: Channel | None, error: BideError) -> None:
        """Report the messages for which the broker closed the channel, and send the others again."""
        lost, self._lost = self._lost, []
        if channel is None or self._channel is not channel or not self._connection.is_open:
            return
        self._channel = None
        self._suspects_left = max(self._suspects_left - 1, 0)
        closure = ChannelClosure(error, channel.close_text, Counter(one.exchange for one in lost))
        rejected = [one for one in lost if closure.applies_to(one.exchange, one.body)]
        if not rejected:
            log.info(
                "the broker closed a channel with %d messages on it, which are sent one by one: %s", len(lost), error
            )
            self._suspects_left = len(lost)
        self._send_queue.extendleft(one for one in reversed(lost) if not closure.applies_to(one.exchange, one.body))
        for one in rejected:
            self._on_result(one, error)
        self._send_waiting()
