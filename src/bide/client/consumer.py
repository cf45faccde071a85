"""Consumers: messages of a queue as an iterator that survives lost connections."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from bide.client.conversation import Conversation
from bide.client.message import Message
from bide.client.private_queues import PrivateQueues
from bide.client.reconnecting import ReconnectingConnection
from bide.client.subscription import Subscription, retire_with
from bide.delay.protocol import check_name
from bide.durations import DelayLike, parse_delay
from bide.errors import AccessRefusedError, BideError, BrokerError, ConsumerCancelledError, TargetNotFoundError
from bide.runtime.arguments import whole_number
from bide.runtime.logs import logger

log = logger(__name__)

MAX_PREFETCH: Final = 65535

_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts to subscribe. The pause doubles after each attempt."""


class Consumer:
    """Messages of one queue, as an asynchronous iterator.

    It subscribes when the first message is requested, and again when the connection breaks. It then drops messages that
    it had received and not yet yielded, because the broker delivers them again. Several tasks may iterate over it.

    Close it, or leave its ``async with`` block, to return all unsettled messages to their queue. When nothing refers to
    a consumer anymore, as after a ``break`` out of ``async for message in client.consume(...)``, messages that it had
    not yet yielded go back to their queue; the others can still be settled.

    Args:
        prefetch: the maximum number of unsettled messages, 1 to 65,535.
        timeout: end the iteration when no message comes for this long; None waits without a limit. The consumer stays
            open, and a new iteration continues.
        arguments: consumer arguments, such as ``x-priority`` or ``x-stream-offset``.
        exclusive: refuse to share a classic queue with other consumers. Quorum queues ignore this: declare them with
            ``x-single-active-consumer``.
        private_queues: the queues that the consumer declares again on each connection.

    Attributes:
        conversation: sends the replies, commands and events that the messages cause; None if they can cause none.
    """

    def __init__(
        self,
        reconnecting: ReconnectingConnection,
        queue: str,
        *,
        prefetch: int = 100,
        timeout: DelayLike | None = None,
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
        private_queues: PrivateQueues | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        check_name("queue", queue)
        self.queue = queue
        self._reconnecting = reconnecting
        self._prefetch = whole_number("prefetch", prefetch, 1, MAX_PREFETCH)
        self._timeout = None if timeout is None else parse_delay(timeout).total_seconds()
        self._arguments = arguments
        self._exclusive = exclusive
        self.conversation = conversation
        self._private_queues = PrivateQueues() if private_queues is None else private_queues
        self._subscription: Subscription | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._subscribe_lock = asyncio.Lock()
        self._was_subscribed = False
        self._stopped_subscription: Subscription | None = None
        self._closed = False
        self._subscribe_timeout: asyncio.Timeout | None = None

    @property
    def closed(self) -> bool:
        """Whether the consumer was closed."""
        return self._closed

    @property
    def subscribed(self) -> bool:
        """Whether the consumer is subscribed now."""
        return self._subscription is not None and self._subscription.channel.is_open

    @property
    def ready(self) -> int:
        """The number of messages available without waiting."""
        return self._subscription.ready if self._subscription is not None else 0

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        await self._ensure_subscribed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __anext__(self) -> Message:
        if self._timeout is None:
            return await self._next()
        if not self._was_subscribed:
            # Otherwise a slow connection would look like an empty queue.
            await self._ensure_subscribed()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._next()
        except TimeoutError:
            if not limit.expired():
                raise
            raise StopAsyncIteration from None

    async def _next(self) -> Message:
        while True:
            subscription = await self._ensure_subscribed()
            if subscription is None:
                raise StopAsyncIteration
            try:
                delivery, received_at = await subscription.next()
            except BideError as error:
                self._on_ended(subscription, error)
            else:
                return Message(delivery, subscription, received_at, self.conversation)

    def stop(self) -> None:
        """Stop receiving. Messages not yet yielded go back to the queue; the others can still be settled."""
        self._mark_closed()
        subscription = self._detach_subscription()
        if subscription is not None:
            self._stopped_subscription = subscription
            subscription.stop()

    async def close(self) -> None:
        """Close the consumer. Unsettled messages go back to the queue, and tasks that wait for a message get none."""
        self._mark_closed()
        subscription = self._detach_subscription() or self._stopped_subscription
        self._stopped_subscription = None
        if subscription is not None:
            await subscription.close()

    def _mark_closed(self) -> None:
        self._closed = True
        timeout, self._subscribe_timeout = self._subscribe_timeout, None
        if timeout is not None:
            # A task that is subscribing could otherwise wait for a long time if the broker is down.
            timeout.reschedule(asyncio.get_running_loop().time())

    async def _ensure_subscribed(self) -> Subscription | None:
        """The subscription, or None when the consumer is closed.

        Raises:
            TargetNotFoundError: the queue does not exist.
            AccessRefusedError: this user may not read from the queue, or another consumer uses it exclusively.
            BrokerError: the broker cannot be reached, or refuses. Raised before the first subscription only; later
                failures are retried.
        """
        async with self._subscribe_lock:
            if self._closed or self._subscription is not None:
                return self._subscription
            try:
                async with asyncio.timeout(None) as self._subscribe_timeout:
                    subscription = await self._subscribe()
            except TimeoutError:
                if self.closed:
                    return None
                raise
            finally:
                self._subscribe_timeout = None
            if self.closed:
                subscription.channel.abandon()
                return None
            self._subscription = subscription
            self._finalizer = retire_with(self, subscription)
            self._was_subscribed = True
            return subscription

    async def _subscribe(self) -> Subscription:
        pause = _FIRST_PAUSE
        while True:
            connection = await self._reconnecting.connection()
            try:
                await self._private_queues.ensure(connection, self.queue)
                return await Subscription.open(
                    connection,
                    self.queue,
                    prefetch=self._prefetch,
                    arguments=self._arguments,
                    exclusive=self._exclusive,
                )
            except BrokerError as error:
                if connection.is_open and not (self._was_subscribed and _is_temporary(error)):
                    raise
                log.info("cannot consume from %s yet: %s", self.queue, error)
                await asyncio.sleep(pause)  # before the next attempt
                pause = min(pause * 2, _LONGEST_PAUSE)

    def _on_ended(self, subscription: Subscription, error: BideError) -> None:
        if self._closed or self._subscription is not subscription:
            # Another task has handled it already.
            return
        self._detach_subscription()
        if isinstance(error, ConsumerCancelledError):
            raise ConsumerCancelledError(f"{error} ({self.queue!r})", reply_code=error.reply_code) from error
        if subscription.channel.connection.is_open:
            # The broker closed only this channel: an acknowledgement timeout, or an invalid settlement.
            log.warning("the broker closed the channel of the consumer of %s: %s", self.queue, error)
        else:
            log.info("consuming from %s again after: %s", self.queue, error)

    def _detach_subscription(self) -> Subscription | None:
        subscription, self._subscription = self._subscription, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return subscription


def _is_temporary(error: BrokerError) -> bool:
    """Whether a refusal may be temporary: the queue or its leader may not be back yet after an outage, or the broker
    may not have noticed yet that the previous connection is lost."""
    if isinstance(error, TargetNotFoundError):
        return "inaccessible" in str(error)
    if isinstance(error, AccessRefusedError):
        return "exclusive use" in str(error)
    return True
