"""One consumer on one channel: what a :class:`bide.Consumer` has until the connection breaks."""

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
    """What the broker sent and nobody has taken yet.

    It knows nothing of the subscription: the connection holds on to it, and must not keep that alive.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._deliveries: deque[tuple[Delivery, datetime]] = deque()
        self._error: BideError | None = None
        self._retired = False
        self._news = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        if self._retired:
            self._channel.nack(delivery.delivery_tag)
            return
        if self._error is not None:
            # The channel is about to close, and it goes back then.
            return
        self._deliveries.append((delivery, self._channel.connection.now()))
        self._news.set()

    def end(self, error: BideError) -> None:
        if not isinstance(error, ConsumerCancelledError):
            # They cannot be settled any more, and the broker delivers them again.
            self._deliveries.clear()
        self._error = error
        self._news.set()

    async def get(self) -> tuple[Delivery, datetime]:
        # Several may wait, and all of them wake.
        while not self._deliveries:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
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


class Subscription:
    """A consumer on a channel of its own, which is closed when nothing refers to the subscription any more.

    The consumer and every unsettled message refer to it. So a message can be settled as long as somebody has it, and
    what nobody has any more goes back to its queue.
    """

    def __init__(self, channel: Channel, inbox: _Inbox, tag: str) -> None:
        self.channel = channel
        self._inbox = inbox
        self._tag = tag
        self._in_hand = 0
        weakref.finalize(self, _in_loop, channel.connection.loop, channel.abandon).atexit = False

    @classmethod
    async def open(
        cls, connection: Connection, queue: str, *, prefetch: int, arguments: Mapping[str, Any] | None, exclusive: bool
    ) -> Subscription:
        """Start to consume.

        Raises:
            BideError: the broker refuses, or the connection broke.
        """
        channel = await connection.channel()
        inbox = _Inbox(channel)
        try:
            await channel.qos(prefetch)
            tag = await channel.consume(
                queue, on_message=inbox.put, on_end=inbox.end, arguments=arguments, exclusive=exclusive
            )
        except BaseException:
            # A caller that was cancelled must not leave a consumer behind that hoards messages.
            channel.abandon()
            raise
        return cls(channel, inbox, tag)

    async def next(self) -> tuple[Delivery, datetime]:
        """The next delivery, and when it came.

        Raises:
            BideError: no more will come, with the reason.
        """
        delivery = await self._inbox.get()
        self._in_hand += 1
        return delivery

    @property
    def ready(self) -> int:
        """How many deliveries :meth:`next` has without waiting."""
        return self._inbox.ready

    def settled(self) -> None:
        """One of the deliveries that were handed out is settled."""
        self._in_hand -= 1

    async def end(self) -> list[Delivery]:
        """Take no more, and hand out all that came before.

        Raises:
            BideError: the connection broke.
        """
        await self.channel.cancel(self._tag)
        return self._inbox.empty()

    def stop(self) -> None:
        """Take no more and give back what was not handed out, and tell those who wait that none will come."""
        if self.channel.is_open:
            self._give_back()
        self._inbox.end(ClosedError("the consumer was stopped"))

    async def close(self) -> None:
        """Give back what is not settled, and tell those who wait that nothing will come, before anything more does."""
        self._inbox.end(ClosedError("the consumer was closed"))
        await self.channel.close()

    def _give_back(self) -> None:
        self.channel.cancel_nowait(self._tag)
        self._inbox.give_back()

    def retire(self) -> None:
        """Take no more and give back what was not handed out; what was can still be settled."""
        if not self.channel.is_open:
            return
        if self._in_hand:
            self._give_back()
        else:
            self.channel.abandon()


def retire_with(owner: object, subscription: Subscription) -> weakref.finalize[..., Any]:
    """Retire a subscription when its owner is gone; the result's ``detach`` calls that off."""
    finalizer = weakref.finalize(owner, _in_loop, subscription.channel.connection.loop, subscription.retire)
    finalizer.atexit = False
    return finalizer


def _in_loop(loop: asyncio.AbstractEventLoop, work: Any) -> None:
    # The last reference may go in any thread.
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        log.debug("the event loop is closed, and its connections with it")
