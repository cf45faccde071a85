"""One AMQP consumer on one channel, for a :class:`bide.Consumer` on one connection."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.errors import BideError, ClosedError, ConsumerCancelledError
from bide.runtime.logs import logger

log = logger(__name__)


class _Inbox:
    """Deliveries that were received and not yet passed to the application.

    An inbox has no reference to the subscription, because the connection refers to the inbox and must not keep the
    subscription alive.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._deliveries: deque[tuple[Delivery, datetime]] = deque()
        self._error: BideError | None = None
        self._retired = False
        self._has_changed = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        if self._retired:
            self._channel.nack(delivery.delivery_tag)
            return
        if self._error is not None:
            # The channel is about to close, and the broker then requeues the message.
            return
        self._deliveries.append((delivery, self._channel.connection.now()))
        self._has_changed.set()

    def end(self, error: BideError) -> None:
        if not isinstance(error, ConsumerCancelledError):
            # These deliveries can no longer be settled, and the broker delivers the messages again.
            self._deliveries.clear()
        self._error = error
        self._has_changed.set()

    async def get(self) -> tuple[Delivery, datetime]:
        # Several tasks may wait, and all of them wake.
        while not self._deliveries:
            if self._error is not None:
                raise self._error
            self._has_changed.clear()
            await self._has_changed.wait()
        return self._deliveries.popleft()

    @property
    def ready(self) -> int:
        return len(self._deliveries)

    def empty(self) -> list[Delivery]:
        found = [delivery for delivery, _ in self._deliveries]
        self._deliveries.clear()
        return found

    def give_back(self) -> None:
        self._retired = True
        while self._deliveries:
            delivery, _ = self._deliveries.popleft()
            self._channel.nack(delivery.delivery_tag)


class DeliveryChannel:
    """A channel with deliveries, which is closed when nothing refers to it anymore.

    Every unsettled message refers to it. So a message can be settled as long as the application has a reference to it.

    Attributes:
        unsettled: the number of deliveries that the application has and has not settled.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unsettled = 0
        weakref.finalize(self, _call_in_loop, channel.connection.loop, channel.abandon).atexit = False

    def delivered(self) -> None:
        """Record that the application has got a delivery."""
        self.unsettled += 1

    def settled(self) -> None:
        """Record that the application has settled a delivery."""
        self.unsettled -= 1


class Subscription(DeliveryChannel):
    """A consumer on its own channel.

    The :class:`bide.Consumer` and every unsettled message refer to it.
    """

    def __init__(self, channel: Channel, inbox: _Inbox, tag: str) -> None:
        super().__init__(channel)
        self._inbox = inbox
        self._tag = tag

    @classmethod
    async def open(
        cls, connection: Connection, queue: str, *, prefetch: int, arguments: Mapping[str, Any] | None, exclusive: bool
    ) -> Subscription:
        """Start to consume.

        Raises:
            BideError: the broker refuses, or the connection was lost.
        """
        channel = await connection.channel()
        inbox = _Inbox(channel)
        try:
            await channel.qos(prefetch)
            tag = await channel.consume(
                queue, on_message=inbox.put, on_end=inbox.end, arguments=arguments, exclusive=exclusive
            )
        except BaseException:
            # If the caller was cancelled, no consumer must stay behind and hold messages.
            channel.abandon()
            raise
        return cls(channel, inbox, tag)

    async def next(self) -> tuple[Delivery, datetime]:
        """The next delivery, and the time of its receipt.

        Raises:
            BideError: no more deliveries will come; the error is the reason.
        """
        delivery = await self._inbox.get()
        self.delivered()
        return delivery

    @property
    def ready(self) -> int:
        """The number of deliveries that :meth:`next` returns without waiting."""
        return self._inbox.ready

    async def end(self) -> list[Delivery]:
        """Cancel the consumer, and return all deliveries received before that.

        Raises:
            BideError: the connection was lost.
        """
        await self.channel.cancel(self._tag)
        return self._inbox.empty()

    def stop(self) -> None:
        """Cancel the consumer, requeue deliveries not yet passed on, and raise an error in tasks that wait."""
        if self.channel.is_open:
            self._give_back()
        self._inbox.end(ClosedError("the consumer was stopped"))

    async def close(self) -> None:
        """Close the channel, which requeues unsettled messages, and raise an error in tasks that wait."""
        self._inbox.end(ClosedError("the consumer was closed"))
        await self.channel.close()

    def _give_back(self) -> None:
        self.channel.cancel_nowait(self._tag)
        self._inbox.give_back()

    def retire(self) -> None:
        """Cancel the consumer and requeue deliveries not yet passed on; the others can still be settled."""
        if not self.channel.is_open:
            return
        if self.unsettled:
            self._give_back()
        else:
            self.channel.abandon()


def retire_with(owner: object, subscription: Subscription) -> weakref.finalize[..., Any]:
    """Retire a subscription when its owner is garbage-collected; the result's ``detach`` prevents that."""
    finalizer = weakref.finalize(owner, _call_in_loop, subscription.channel.connection.loop, subscription.retire)
    finalizer.atexit = False
    return finalizer


def _call_in_loop(loop: asyncio.AbstractEventLoop, work: Any) -> None:
    # The last reference may be dropped in any thread.
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        log.debug("the event loop is closed, and its connections with it")
