"""The synchronous client: blocking calls, with one thread for all connections.

``with bide.connect_sync("amqp://localhost") as client: client.publish(b"...", to="orders", delay="5m")``
"""

from __future__ import annotations

import concurrent.futures
import ssl
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from bide.admin.apply import Applied
from bide.admin.destroy import Removed
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, Connecting, connect
from bide.client.client_thread import ClientThread
from bide.client.connection_watch import OnDisconnected, OnReconnected
from bide.client.publish_result import PublishSummary
from bide.client.publisher import OnLost, Receipt, Stamp
from bide.client.schedule_methods_sync import SyncScheduleMethods
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike
from bide.messages.outgoing import OutgoingMessage, takes
from bide.messages.prepared import PreparedMessage
from bide.schedules.outgoing import SCHEDULE_ADVICE, OutgoingSchedule
from bide.topology import Topology

if TYPE_CHECKING:
    from bide.client.consumer import Consumer
    from bide.client.message import Message
    from bide.client.message_sync import SyncMessage

_MAX_BATCH: Final = 100
"""The number of messages that are passed from the client's thread to the caller's at once."""

_Result = TypeVar("_Result")


class SyncClient(SyncScheduleMethods):
    """A client whose calls block. Create it with :func:`connect_sync`. Several threads may use it at once.

    A process that forks must connect after the fork.
    """

    def __init__(self, connecting: Connecting) -> None:
        self._thread = ClientThread()
        self._closed = False
        try:
            self._client: Client = self.wait_for(connecting.__aenter__())
        except BaseException:
            self._thread.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Calls in other threads fail."""
        if self._closed:
            return
        self._closed = True
        if self._thread.belongs_to_parent:
            # The sockets and the event loop belong to the parent process, which still needs them.
            return
        try:
            self.wait_for(self._client.close())
        finally:
            self._thread.stop()

    def wait_for(self, work: Coroutine[Any, Any, _Result], timeout: DelayLike | None = None) -> _Result:
        """Run a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, meanwhile or before, or belongs to another process.
            TimeoutError: the coroutine took longer than ``timeout`` and was cancelled.
            InvalidDelayError: ``timeout`` is invalid; the coroutine was not started.
            InvalidInputError: it was called in the client's thread.
        """
        return self._thread.wait_for(work, timeout)

    def submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Start a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
            InvalidInputError: it was called in the client's thread.
        """
        return self._thread.submit(work)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function soon in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
        """
        self._thread.call(function)

    @property
    def client(self) -> Client:
        """The client that does the work, for coroutines that run in its thread."""
        return self._client

    @property
    def url(self) -> BrokerUrl:
        """The broker's URL."""
        return self._client.url

    @property
    def connected(self) -> bool:
        """See :attr:`bide.Client.connected`. False in a process that was forked after the client was made."""
        return not self._thread.belongs_to_parent and self._client.connected

    def now(self) -> datetime:
        """See :meth:`bide.Client.now`."""
        return self._client.now()

    def release(self) -> tuple[int, ...]:
        """See :meth:`bide.Client.release`."""
        return self.wait_for(self._client.release())

    def infrastructure(self) -> DelayInfrastructure:
        """See :meth:`bide.Client.infrastructure`."""
        return self.wait_for(self._client.infrastructure())

    @takes(OutgoingMessage, advice=SCHEDULE_ADVICE)
    def publish(self, message: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Client.publish`."""
        return self.wait_for(self._client._send(message))  # noqa: SLF001 (its twin's)

    def publish_many(
        self,
        messages: Iterable[OutgoingMessage | OutgoingSchedule],
        *,
        window: int | None = None,
        on_lost: OnLost | None = None,
    ) -> PublishSummary:
        """Send many messages, and wait until all of them are confirmed; see :meth:`bide.Client.publish_many`.

        The input is read in the caller's thread. Results are those of ``await client.publish_many(...)``. To publish
        many messages in several calls, use :class:`bide.BulkPublisher`.

        Raises:
            InvalidInputError: an argument is invalid.
            BulkPublishError: some messages were not accepted; all others are on the broker.
            BulkInDoubtError: the publish ended early. The error lists the messages in doubt and those not sent, and has
                the summary of all others.
            ClosedError: the client was closed, or belongs to the parent process.
        """
        # Imported here, so that "import bide" stays fast.
        from bide.client.bulk.batches import publish_all

        return publish_all(self._thread, self._client, messages, window=window, on_lost=on_lost)

    def forward(self, message: PreparedMessage, *, mandatory: bool = True) -> Receipt:
        """See :meth:`bide.Client.forward`."""
        return self.wait_for(self._client.forward(message, mandatory=mandatory))

    def bind(self, queue: str) -> None:
        """See :meth:`bide.Client.bind`."""
        self.wait_for(self._client.bind(queue))

    def exists(self, queue: str) -> bool:
        """See :meth:`bide.Client.exists`."""
        return self.wait_for(self._client.exists(queue))

    def declare(self, topology: Topology, *, external: Iterable[str] = ()) -> Applied:
        """See :meth:`bide.Client.declare`."""
        return self.wait_for(self._client.declare(topology, external=external))

    def destroy(self, topology: Topology, *, force: bool = False, external: Iterable[str] = ()) -> Removed:
        """See :meth:`bide.Client.destroy`."""
        return self.wait_for(self._client.destroy(topology, force=force, external=external))

    def private_queue(self, *, bindings: Iterable[tuple[str, str]] = ()) -> str:
        """See :meth:`bide.Client.private_queue`."""
        return self.wait_for(self._client.private_queue(bindings=bindings))

    def get(self, queue: str) -> SyncMessage | None:
        """See :meth:`bide.Client.get`."""
        from bide.client.message_sync import SyncMessage

        message = self.wait_for(self._client.get(queue))
        return None if message is None else SyncMessage(message, self._thread)

    def message_count(self, queue: str) -> int:
        """See :meth:`bide.Client.message_count`."""
        return self.wait_for(self._client.message_count(queue))

    def purge(self, queue: str) -> int:
        """See :meth:`bide.Client.purge`."""
        return self.wait_for(self._client.purge(queue))

    @contextmanager
    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 100,
        timeout: DelayLike | None = None,
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
    ) -> Iterator[Iterator[SyncMessage]]:
        """The messages of a queue: ``with client.consume("orders") as messages: for message in messages: ...``.

        The parameters are those of :meth:`bide.Client.consume`.
        """
        consumer = self._client.consume(
            queue, prefetch=prefetch, timeout=timeout, arguments=arguments, exclusive=exclusive
        )
        self.wait_for(consumer.__aenter__())
        try:
            yield self._messages(consumer)
        finally:
            self.wait_for(consumer.close())

    def _messages(self, consumer: Consumer) -> Iterator[SyncMessage]:
        from bide.client.message_sync import SyncMessage

        while messages := self.wait_for(_next_messages(consumer)):
            for message in messages:
                # If the connection broke while earlier messages were handled, the broker delivers this one again.
                if not message.lost:
                    yield SyncMessage(message, self._thread)


async def _next_messages(consumer: Consumer) -> list[Message]:
    """The next message and all that are available already: passing messages between threads costs more than receiving
    them."""
    first = await anext(consumer, None)
    messages = [first] if first is not None else []
    while messages and consumer.ready and len(messages) < _MAX_BATCH:
        messages.append(await anext(consumer))
    return messages


def connect_sync(
    url: str | BrokerUrl | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    infrastructure: DelayInfrastructure | None = None,
    declare: bool = True,
    timeout: DelayLike = timedelta(seconds=30),
    wait: DelayLike | None = None,
    on_lost: OnLost = "repeat",
    max_in_flight: int = 10_000,
    stamp: Stamp | None = None,
    on_disconnected: OnDisconnected | None = None,
    on_reconnected: OnReconnected | None = None,
) -> SyncClient:
    """Connect to a broker, for code without an event loop; the arguments are those of :func:`bide.connect`.

    Raises:
        InvalidInputError: a value is invalid.
        BrokerError: the broker cannot be reached, or refuses.
    """
    return SyncClient(
        connect(
            url,
            ssl_context=ssl_context,
            infrastructure=infrastructure,
            declare=declare,
            timeout=timeout,
            wait=wait,
            on_lost=on_lost,
            max_in_flight=max_in_flight,
            stamp=stamp,
            on_disconnected=on_disconnected,
            on_reconnected=on_reconnected,
        )
    )
