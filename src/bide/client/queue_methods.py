"""The methods of a client that read queues."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bide.admin.apply import exists
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.amqp.reply_codes import is_refusal
from bide.amqp.url import BrokerUrl
from bide.client.private_queues import PrivateQueues
from bide.client.publisher import Publisher
from bide.client.reconnecting import ReconnectingConnection
from bide.delay.protocol import check_name
from bide.durations import DelayLike
from bide.errors import BrokerUnreachableError, ConnectionLostError
from bide.topology import Queue, Topology

if TYPE_CHECKING:
    from bide.client.consumer import Consumer
    from bide.client.conversation import Conversation, ConversationClient
    from bide.client.getting import Getting
    from bide.client.message import Message

_Result = TypeVar("_Result")


class QueueMethods:
    """Consume, get, count and purge the messages of a queue."""

    url: BrokerUrl
    _publisher: Publisher
    _consuming_connection: ReconnectingConnection
    _consumers: weakref.WeakSet[Consumer]
    _private_queues: PrivateQueues
    _getting: Getting | None = None

    async def exists(self, queue: str) -> bool:
        """Whether a queue of this name exists.

        Raises:
            InvalidNameError: the name is invalid.
            TargetNotFoundError: the queue exists, but could not be reached for half a minute, for example because its
                node is down.
            ClosedError: the client was closed.
            BrokerError: the broker cannot be reached, or this user may not see the queue.
        """
        check_name("queue", queue)
        connection = await self._within_timeout(self._connection_for(queue))
        return await exists(connection, Topology(queues=[Queue(queue)]))

    async def private_queue(self, *, bindings: Iterable[tuple[str, str]] = ()) -> str:
        """Declare a queue for this client alone, and return its name. :meth:`consume` and :meth:`get` take it.

        The queue is exclusive to the receiving connection: it takes messages while the client is connected, and is
        deleted with its messages when the connection closes or breaks. Consumers declare and bind it again when the
        client has reconnected. It suits replies, and events that each process should see. Messages cannot be delayed to
        it, because delayed messages outlive it: delay them to an exchange that it is bound to.

        Args:
            bindings: pairs of an exchange and a routing key.

        Raises:
            TargetNotFoundError: an exchange does not exist.
            BrokerError: the broker cannot be reached, or refuses.
        """
        name = self._private_queues.add(bindings)
        try:
            await self._within_timeout(self._connection_for(name))
        except BaseException:
            self._private_queues.forget(name)
            raise
        return name

    async def _connection_for(self, queue: str) -> Connection:
        """The connection for methods of this queue: private queues exist on the receiving connection only."""
        if queue not in self._private_queues:
            return await self._publisher.connection()
        while True:
            connection = await self._consuming_connection.connection()
            try:
                await self._private_queues.ensure(connection, queue)
            except ConnectionLostError as error:
                if connection.is_open or is_refusal(error):
                    raise
            else:
                return connection

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 100,
        timeout: DelayLike | None = None,
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        """The messages of a queue: ``async for message in client.consume("orders")``; see :class:`bide.Consumer`.

        Args:
            prefetch: the maximum number of unsettled messages, 1 to 65,535.
            timeout: end the iteration when no message comes for this long; None waits without a limit.
            arguments: consumer arguments, such as ``x-priority`` or ``x-stream-offset``.
            exclusive: refuse to share a classic queue with other consumers; quorum queues ignore this.

        Raises:
            InvalidInputError: an argument is invalid. Errors of the broker are raised for the first message.
        """
        # Imported here, because a client that only publishes does not need it.
        from bide.client.consumer import Consumer

        consumer = Consumer(
            self._consuming_connection,
            queue,
            prefetch=prefetch,
            timeout=timeout,
            arguments=arguments,
            exclusive=exclusive,
            private_queues=self._private_queues,
            conversation=self._conversation(queue),
        )
        self._consumers.add(consumer)
        return consumer

    async def get(self, queue: str) -> Message | None:
        """The next message of a queue, or None if the queue is empty. Settle it like a consumed message.

        Each call is a round trip. To receive all messages of a queue, :meth:`consume` is faster. An unsettled message
        returns to its queue when the client closes.

        Raises:
            InvalidNameError: the name is invalid.
            TargetNotFoundError: the queue does not exist.
            BrokerError: the broker cannot be reached, or refuses, as it does for a stream.
        """
        if self._getting is None:
            # Imported here, because a client that only publishes does not need it.
            from bide.client.getting import Getting

            self._getting = Getting(self._consuming_connection, self._private_queues)
        return await self._within_timeout(self._getting.get(queue, self._conversation(queue)))

    def _conversation(self, queue: str) -> Conversation:
        """The conversations of the messages of a queue. Their endpoint has the queue's name."""
        from bide.client.conversation import Conversation

        return Conversation(cast("ConversationClient", self), endpoint=queue, queue=queue)

    async def message_count(self, queue: str) -> int:
        """The number of messages in a queue that are ready for delivery: without unsettled ones.

        Raises:
            InvalidNameError: the name is invalid.
            TargetNotFoundError: the queue does not exist.
            QueueBusyError: the queue did not answer the broker for 5 s or longer.
            BrokerError: the broker cannot be reached, or refuses.
        """
        check_name("queue", queue)
        reply = await self._call(queue, lambda channel: queue_counts(channel, queue))
        return int(reply.message_count)

    async def purge(self, queue: str) -> int:
        """Discard all messages of a queue that are ready for delivery, and return their number.

        Raises:
            InvalidNameError: the name is invalid.
            TargetNotFoundError: the queue does not exist.
            BrokerError: the broker cannot be reached, or refuses. Streams cannot be purged.
        """
        check_name("queue", queue)
        return int((await self._call(queue, lambda channel: channel.purge_queue(queue))).message_count)

    async def _call(self, queue: str, method: Callable[[Channel], Awaitable[Any]]) -> Any:
        """Call a method on its own channel, again if the reply is lost with the connection, and return the reply."""
        return await self._within_timeout(self._repeat_if_lost(queue, method))

    async def _repeat_if_lost(self, queue: str, method: Callable[[Channel], Awaitable[Any]]) -> Any:
        while True:
            connection = await self._connection_for(queue)
            try:
                async with await connection.channel() as channel:
                    return await method(channel)
            except ConnectionLostError as error:
                if connection.is_open or is_refusal(error):
                    raise

    async def _within_timeout(self, operation: Awaitable[_Result]) -> _Result:
        """Run an operation, which may have to open a lost connection again, within the client's timeout."""
        try:
            async with asyncio.timeout(self._publisher.timeout.total_seconds()):
                return await operation
        except TimeoutError as error:
            raise self._unreachable_error() from error

    def _unreachable_error(self) -> BrokerUnreachableError:
        seconds = self._publisher.timeout.total_seconds()
        return BrokerUnreachableError(
            f"the connection to {self.url} broke and was not back within {seconds:g} s: check that the broker is "
            "running and can be reached, or connect with a longer timeout"
        )
