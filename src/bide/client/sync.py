"""The synchronous client: blocking calls, with one thread for all connections.

``with bide.connect_sync("amqp://localhost") as client: client.publish(b"...", to="orders", delay="5m")``
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from bide.admin.apply import Applied, Removed
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, Connecting, connect
from bide.client.publisher import OnLost, Receipt, Stamp
from bide.client.schedule_methods_sync import SyncScheduleMethods
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike, parse_delay
from bide.errors import ClosedError, InvalidInputError
from bide.messages.outgoing import OutgoingMessage, takes
from bide.topology import Topology

if TYPE_CHECKING:
    from bide.client.consumer import Consumer
    from bide.client.message import Message

_STOP_TIMEOUT: Final = 1.0
"""Seconds to wait for the calls of other threads to end, after the connections are closed."""

_MAX_BATCH: Final = 100
"""The number of messages that are passed from the client's thread to the caller's at once."""

_Result = TypeVar("_Result")


class SyncMessage:
    """A received message with the attributes of :class:`bide.Message`, and blocking methods to settle it."""

    def __init__(self, message: Message, client: SyncClient) -> None:
        self._message = message
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def ack(self) -> None:
        """See :meth:`bide.Message.ack`."""
        self._client.wait_for(self._message.ack())

    def requeue(self) -> None:
        """See :meth:`bide.Message.requeue`."""
        self._client.wait_for(self._message.requeue())

    def reject(self) -> None:
        """See :meth:`bide.Message.reject`."""
        self._client.wait_for(self._message.reject())

    def __repr__(self) -> str:
        return repr(self._message)


class SyncClient(SyncScheduleMethods):
    """A client whose calls block. Create it with :func:`connect_sync`. Several threads may use it at once.

    A process that forks must connect after the fork.
    """

    def __init__(self, connecting: Connecting) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bide", daemon=True)
        self._thread.start()
        self._closed = False
        self._submit_lock = threading.Lock()
        try:
            self._client: Client = self.wait_for(connecting.__aenter__())
        except BaseException:
            self._stop()
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
        if os.getpid() != self._pid:
            # The sockets and the event loop belong to the parent process, which still needs them.
            self._closed = True
            return
        try:
            self.wait_for(self._client.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._submit_lock:
            if self._closed:
                return
            self._closed = True
            # No more work is submitted to the loop after this.
            ended = asyncio.run_coroutine_threadsafe(_end_other_tasks(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, _Result], timeout: float | None = None) -> _Result:
        """Run a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, meanwhile or before, or belongs to another process.
            TimeoutError: the coroutine took longer than ``timeout`` seconds and was cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError:
            raise ClosedError("the client was closed") from None
        except BaseException:
            # If the caller is interrupted or times out, the coroutine must not continue.
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Start a coroutine in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
        """
        if os.getpid() != self._pid:
            work.close()
            raise ClosedError("this client belongs to the parent process: create another one after the fork")
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidInputError(
                "this client was called in its own thread, where the call would wait for itself: use its attribute "
                "'client' there"
            )
        with self._submit_lock:
            if self._closed:
                work.close()
                raise ClosedError("the client was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function soon in the client's thread.

        Raises:
            ClosedError: the client was closed, or belongs to another process.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this client belongs to the parent process: create another one after the fork")
        with self._submit_lock:
            if self._closed:
                raise ClosedError("the client was closed")
            self._loop.call_soon_threadsafe(function)

    @property
    def client(self) -> Client:
        """The client that does the work, for coroutines that run in its thread."""
        return self._client

    def release(self) -> tuple[int, ...]:
        """The broker's release, such as ``(4, 3, 6)``."""
        return self.wait_for(self._client.release())

    @takes(OutgoingMessage)
    def publish(self, message: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Client.publish`."""
        return self.wait_for(self._client._send(message))  # noqa: SLF001 (its twin's)

    def declare(self, topology: Topology, *, external: Iterable[str] = ()) -> Applied:
        """See :meth:`bide.Client.declare`."""
        return self.wait_for(self._client.declare(topology, external=external))

    def destroy(self, topology: Topology, *, force: bool = False, external: Iterable[str] = ()) -> Removed:
        """See :meth:`bide.Client.destroy`."""
        return self.wait_for(self._client.destroy(topology, force=force, external=external))

    @contextmanager
    def consume(
        self, queue: str, *, timeout: DelayLike | None = None, prefetch: int = 100, **options: Any
    ) -> Iterator[Iterator[SyncMessage]]:
        """The messages of a queue: ``with client.consume("orders") as messages: for message in messages: ...``.

        Args:
            queue: its name.
            timeout: end the iteration when no message comes for this long; None waits without a limit.
            prefetch: the maximum number of unsettled messages.
            options: the other options of :meth:`bide.Client.consume`.
        """
        consumer = self._client.consume(queue, prefetch=prefetch, **options)
        seconds = None if timeout is None else parse_delay(timeout).total_seconds()
        self.wait_for(consumer.__aenter__())
        try:
            yield self._messages(consumer, seconds)
        finally:
            self.wait_for(consumer.close())

    def _messages(self, consumer: Consumer, seconds: float | None) -> Iterator[SyncMessage]:
        while messages := self.wait_for(_next_messages(consumer, seconds)):
            for message in messages:
                # If the connection broke while earlier messages were handled, the broker delivers this one again.
                if not message.lost:
                    yield SyncMessage(message, self)


async def _end_other_tasks() -> None:
    """Wait for the other tasks of the loop, and cancel those that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, running = await asyncio.wait(others, timeout=_STOP_TIMEOUT)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _next_messages(consumer: Consumer, seconds: float | None) -> list[Message]:
    """The next message and all that are available already: passing messages between threads costs more than receiving
    them."""
    try:
        async with asyncio.timeout(seconds):
            first = await anext(consumer, None)
    except TimeoutError:
        return []
    messages = [first] if first is not None else []
    while messages and consumer.ready and len(messages) < _MAX_BATCH:
        messages.append(await anext(consumer))
    return messages


def connect_sync(
    url: str | BrokerUrl | None = None,
    *,
    infrastructure: DelayInfrastructure | None = None,
    declare: bool = True,
    timeout: DelayLike = timedelta(seconds=30),
    on_lost: OnLost = "repeat",
    max_in_flight: int = 10_000,
    stamp: Stamp | None = None,
) -> SyncClient:
    """Connect to a broker, for code without an event loop; the arguments are those of :func:`bide.connect`."""
    return SyncClient(
        connect(
            url,
            infrastructure=infrastructure,
            declare=declare,
            timeout=timeout,
            on_lost=on_lost,
            max_in_flight=max_in_flight,
            stamp=stamp,
        )
    )
