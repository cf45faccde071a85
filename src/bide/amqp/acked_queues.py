"""The queues that a channel's acknowledgements go to, and the wait for their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from pamqp import commands
from pamqp.base import Frame

from bide.amqp import methods
from bide.amqp.acks import AckSender
from bide.amqp.delivery import Delivery
from bide.errors import BideError
from bide.topology import Queue

_WAIT: Final = 1.0
"""Seconds in which a busy quorum queue is expected to answer 32 commands."""
_PAUSE: Final = 0.02
_LOWEST_PRIORITY: Final = -(1 << 31)


class AckedChannel(Protocol):
    """The channel that the acknowledgements were sent on; see :class:`bide.amqp.channel.Channel`."""

    @property
    def prefetch_is_full(self) -> bool:
        """Whether as many deliveries are unsettled as the prefetch allows for one consumer."""

    def call(self, payload: bytes, *replies: type[Frame]) -> asyncio.Future[Any]:
        """Send a method and return a future of its reply."""

    def round_trip(self) -> asyncio.Future[Any]:
        """Make the broker answer."""

    def declare_queue(self, queue: Queue, *, passive: bool = False) -> asyncio.Future[Any]:
        """Declare or check a queue, and return a future of the reply with its counts."""

    async def consume(
        self,
        queue: str,
        *,
        on_message: Callable[[Delivery], None],
        on_end: Callable[[BideError], None],
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Start a consumer and return its tag."""

    async def cancel(self, tag: str) -> None:
        """Cancel a consumer."""


class AckedQueues:
    """The queues whose messages a channel settles.

    The broker's side of a channel sends a quorum queue at most 32 commands without an answer, and holds later commands
    back. If the channel closes meanwhile, the commands held back are lost, and their messages are redelivered
    (``rabbit_fifo_client.erl``). AMQP has no reply to an acknowledgement. But when the queue answers a later method, it
    has received the acknowledgements sent before.
    """

    def __init__(self, acks: AckSender) -> None:
        self._acks = acks
        self._queues: set[str] = set()
        self._consumed: dict[str, str] = {}
        """The queue of each consumer."""
        self._exclusive: set[str] = set()
        self._sources = 0
        """The number of consumers and of messages of ``basic.get`` so far."""
        self._cancelled_without_answer = False

    def consumed(
        self, queue: str, tag: str, arguments: Mapping[str, Any] | None, *, exclusive: bool, no_ack: bool
    ) -> None:
        """Record a new consumer."""
        self._sources += 1
        # An acknowledgement to a stream only gives credit for more deliveries.
        if no_ack or "x-stream-offset" in (arguments or ()):
            return
        self._queues.add(queue)
        self._consumed[tag] = queue
        if exclusive:
            self._exclusive.add(tag)

    def cancelling(self, tag: str, *, no_wait: bool) -> None:
        """Record that a cancellation was sent."""
        queue = self._consumed.pop(tag, None)
        if queue is not None:
            self._cancelled_without_answer |= no_wait and self._acks.may_be_held_back
            self._add_barrier(queue)

    def deleted(self, tag: str) -> None:
        """Record that the broker cancelled a consumer: its queue has nothing more to settle."""
        self._queues.discard(self._consumed.pop(tag, ""))

    def getting(self, queue: str) -> None:
        """Record that a ``basic.get`` was sent."""
        self._add_barrier(queue)

    def got(self, queue: str) -> None:
        """Record a message of ``basic.get``."""
        self._sources += 1
        self._queues.add(queue)
        self._acks.got()

    def _add_barrier(self, queue: str) -> None:
        if self._queues <= {queue}:
            self._acks.add_barrier()

    async def have_acks(self, channel: AckedChannel) -> None:
        """Wait until quorum queues have the acknowledgements sent so far, as far as that can be known.

        Raises:
            BideError: the channel is closed.
        """
        if self._acks.may_be_held_back:
            await self._ask_queues(channel)
        elif self._cancelled_without_answer:
            # Before 4.0, a cancellation does not send what was held back. That follows a moment later.
            await channel.round_trip()

    async def _ask_queues(self, channel: AckedChannel) -> None:
        await channel.call(methods.qos(1), commands.Basic.QosOk)
        until = asyncio.get_running_loop().time() + _WAIT
        for queue in self._queues.copy():
            await self._ask(channel, queue, until=until)

    async def _ask(self, channel: AckedChannel, queue: str, *, until: float) -> None:
        """Wait until a queue certainly has the acknowledgements, or for some time if that cannot be known.

        While messages wait in the queue, the queue fills the prefetch of its consumer again as it receives
        acknowledgements. If no message waits, another consumer is started and cancelled, which the queue answers after
        it has received the acknowledgements. (The other consumer must not take a message. If the first consumer were
        cancelled instead, the next consumer of an ordered queue would overtake unsettled messages.)
        """
        tag = next((tag for tag, one in self._consumed.items() if one == queue), None)
        if tag in self._exclusive:
            await channel.cancel(tag)
            return
        may_fill = tag is not None and self._sources == 1
        while not (may_fill and channel.prefetch_is_full):
            found = await channel.declare_queue(Queue(queue), passive=True)
            # Both counts are 0 if a quorum queue is too busy to count.
            if found.message_count and not found.consumer_count:
                # A cancelled consumer counts while it has an unsettled message.
                return
            if found.consumer_count and not found.message_count:
                await channel.cancel(await _consume_last(channel, queue))
                return
            if not may_fill and asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(_PAUSE)  # the broker reports no event when a queue has acknowledgements


async def _consume_last(channel: AckedChannel, queue: str) -> str:
    # What this consumer receives stays unsettled, and is requeued when the channel closes.
    last = {"x-priority": _LOWEST_PRIORITY}
    return await channel.consume(queue, on_message=lambda _: None, on_end=lambda _: None, arguments=last)
