"""The asynchronous client of a broker."""

from __future__ import annotations

import asyncio
import ssl
import weakref
from collections.abc import AsyncIterable, Generator, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bide.admin.apply import Applied, apply
from bide.admin.destroy import Removed, destroy
from bide.amqp.url import BrokerUrl
from bide.client.connection_watch import ConnectionWatch, OnDisconnected, OnReconnected
from bide.client.private_queues import PrivateQueues
from bide.client.publisher import OnLost, Publisher, Receipt, Stamp, checked_on_lost
from bide.client.queue_methods import QueueMethods
from bide.client.reconnecting import ReconnectingConnection
from bide.client.schedule_methods import ScheduleMethods
from bide.delay.clock import Clock
from bide.delay.protocol import DelayInfrastructure
from bide.durations import DelayLike, parse_delay
from bide.errors import BrokerUnreachableError, InvalidTopologyError
from bide.messages.outgoing import OutgoingMessage, takes
from bide.messages.prepared import PreparedMessage, check_message
from bide.runtime.arguments import whole_number
from bide.runtime.bounded_cache import BoundedCache
from bide.schedules.outgoing import SCHEDULE_ADVICE, OutgoingSchedule
from bide.topology import Topology

if TYPE_CHECKING:
    from bide.client.bulk.publish import BulkPublish
    from bide.client.consumer import Consumer
    from bide.delay.message_type import MessageType

_Result = TypeVar("_Result")


class Client(QueueMethods, ScheduleMethods):
    """A client of one broker. Create it with :func:`connect`.

    It has one connection for publishing and one for consuming, so that a broker that blocks publishers still gets
    acknowledgements. It opens lost connections again.
    """

    def __init__(
        self,
        url: BrokerUrl,
        publisher: Publisher,
        *,
        stamp: Stamp | None = None,
        wait: timedelta | None = None,
        on_disconnected: OnDisconnected | None = None,
        on_reconnected: OnReconnected | None = None,
    ) -> None:
        self.url = url
        self._publisher = publisher
        self._stamp = stamp
        self._wait = wait
        self._consuming_connection = ReconnectingConnection(replace(url, name=f"{url.name} (receiving)"))
        self._watch = ConnectionWatch(on_disconnected, on_reconnected)
        publisher.reconnecting.watch = self._consuming_connection.watch = self._watch
        publisher.reconnecting.on_leave = self._consuming_connection.leave
        self._private_queues = PrivateQueues()
        # Types of events whose exchanges exist.
        self._publications: BoundedCache[MessageType, None] = BoundedCache()
        # Weak references, so that a consumer that the caller has dropped is not kept.
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        self._consuming_connection.check_loop()
        try:
            if self._wait:
                await self._publisher.reconnecting.wait_for_broker(self._wait)
            await self._publisher.connection()
        except BaseException:
            await self._publisher.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client. Unsettled messages go back to their queues; unconfirmed publishes are in doubt."""
        try:
            await asyncio.gather(*(one.close() for one in list(self._consumers)))
            await asyncio.gather(self._consuming_connection.close(), self._publisher.close())
        except asyncio.CancelledError:
            await self._abort()
            raise

    async def _abort(self) -> None:
        """Close the connections without waiting for the broker, which may not answer."""
        closing = [asyncio.create_task(one) for one in (self._consuming_connection.close(), self._publisher.close())]
        # Let the closing tasks start: only a task that has started cuts its connection when it is cancelled.
        await asyncio.sleep(0)
        for task in closing:
            task.cancel()
        await asyncio.wait(closing)

    @property
    def connected(self) -> bool:
        """Whether the client is connected: its publishing connection is open, and the receiving one too if it was used.

        False while a lost connection is not back, and when the client or its event loop was closed. A connection whose
        loss the operating system has not reported yet counts as open, for two heartbeat intervals at most.
        """
        return self._publisher.reconnecting.is_open and not self._watch.is_lost

    def now(self) -> datetime:
        """The time in UTC by which delays are counted: this machine's, or that of an in-memory broker."""
        return self.url.transport.now()

    async def release(self) -> tuple[int, ...]:
        """The broker's release, such as ``(4, 3, 6)``.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        return (await self._within_timeout(self._publisher.connection())).release

    async def infrastructure(self) -> DelayInfrastructure:
        """The delay infrastructure in its variant for this broker.

        Raises:
            BrokerError: the broker cannot be reached.
        """
        return await self._within_timeout(self._publisher.infrastructure())

    @takes(OutgoingMessage, advice=SCHEDULE_ADVICE)
    async def publish(self, message: OutgoingMessage) -> Receipt:
        """Send a message and wait for its confirm. The parameters are the fields of :class:`OutgoingMessage`.

        Raises:
            InvalidInputError: or a subclass of it; nothing was sent.
            TargetNotFoundError: the queue or exchange does not exist.
            UnroutableError: no queue takes the message.
            PublishRefusedError: no queue stored the message.
            PublishInDoubtError: the connection broke before the confirm, and the message was not sent again:
                ``on_lost`` is ``"raise"``, or the time was up, or sending it again failed with another error, which is
                the cause.
            PublishError: the message was not sent in time.
            NotAppliedError: the delay infrastructure is missing and may not be declared.
            MessageTooLargeError: the body is over the broker's limit.
            ClosedError: the client was closed before the message was sent.
            BrokerError: the broker cannot be reached, or refuses.
        """
        return await self._send(message)

    async def _send(self, message: OutgoingMessage) -> Receipt:
        prepared = self._publisher.checker.check(message)
        if self._stamp is None:
            return await self._publisher.publish(prepared, mandatory=message.mandatory)
        with self._stamp(prepared) as headers:
            return await self._publisher.publish(prepared.stamped(headers), mandatory=message.mandatory)

    def publish_many(
        self,
        messages: Iterable[OutgoingMessage | OutgoingSchedule] | AsyncIterable[OutgoingMessage | OutgoingSchedule],
        *,
        window: int | None = None,
        on_lost: OnLost | None = None,
    ) -> BulkPublish:
        """Send many messages as fast as the broker accepts them, each confirmed; see :class:`bide.BulkPublish`.

        ::

            messages = (bide.OutgoingMessage(row, to="orders", delay="5m") for row in rows)
            async for result in client.publish_many(messages): ...

        The input may also contain :class:`bide.OutgoingSchedule`: messages with keys, which can be cancelled and
        replaced until they are due. They need a gate; see :meth:`schedule`. A schedule with a condition is invalid
        here, because only a gate can answer it. A schedule is on the broker when its record is confirmed.

        Messages are sent in the order of the input. Results come in the order of the broker's confirms, which may
        differ. A message that cannot be sent, or that the broker refuses, is reported as a result and does not hold up
        others. For an input of any length, memory holds only the window, and up to 1,000 messages, or 8 MB of bodies,
        read ahead from an asynchronous input.

        While the broker blocks publishers (an alarm), the publish waits. If the broker confirms nothing for the
        client's ``timeout`` without an alarm, the publish ends with an error.

        Args:
            messages: the input, read when there is room for more. An exception that it raises is raised again once the
                results of all earlier messages are known.
            window: the number of unconfirmed messages, 1 to 1,000,000; the client's ``max_in_flight`` if None. The
                bodies of unconfirmed messages have at most 64 MB together, unless a single body is larger.
            on_lost: what to do with messages whose confirms were lost with the connection; the client's own if None.
                ``"repeat"`` sends them again, ``"raise"`` ends with ``BulkInDoubtError``.

        Raises:
            InvalidInputError: an argument is invalid. Messages that cannot be sent are results.
            BulkPublishError: if awaited: some messages were not accepted; all others are on the broker.
            BulkInDoubtError: the broker stopped confirming, or the connection broke and ``on_lost`` is ``"raise"``. The
                error lists the messages in doubt, and those that were taken from the input and not sent. If awaited, it
                has the summary of all others.
            NotAppliedError: the delay infrastructure is missing and may not be declared.
            BrokerError: the broker cannot be reached, or refuses. If messages of an asynchronous input were read ahead,
                this error or NotAppliedError is the cause of a BulkInDoubtError that lists them.
        """
        # Imported here, so that "import bide" stays fast.
        from bide.client.bulk.publish import BulkPublish
        from bide.client.bulk.sender import BulkSender

        publisher = self._publisher
        sender = BulkSender(
            publisher,
            messages,
            make_schedules=self._bulk_schedules,
            window=publisher.max_in_flight if window is None else whole_number("window", window, 1, 1_000_000),
            on_lost=publisher.on_lost if on_lost is None else checked_on_lost(on_lost),
            timeout=publisher.timeout.total_seconds(),
        )
        return BulkPublish(sender)

    async def forward(self, message: PreparedMessage, *, mandatory: bool = True) -> Receipt:
        """Send a message that was made from a received one, and wait for its confirm.

        Raises:
            BideError: as :meth:`publish`.
        """
        return await self._publisher.publish(message, mandatory=mandatory)

    async def bind(self, queue: str) -> None:
        """Bind a queue to the delay infrastructure, which is declared if it is missing.

        Messages that other senders have delayed for the queue can then be delivered, even if the queue was deleted and
        declared again since.

        Raises:
            TargetNotFoundError: the queue does not exist.
            NotAppliedError: the infrastructure is missing and may not be declared.
            BrokerError: the broker cannot be reached, or refuses.
        """
        infrastructure = await self.infrastructure()
        message = check_message(OutgoingMessage(b"", to=queue, delay=infrastructure.resolution))
        try:
            await self._publisher.prepare(message)
        except TimeoutError as error:
            raise BrokerUnreachableError(
                f"the broker at {self.url} did not bind {queue!r} in time: check that it is running and not "
                "overloaded, and try again"
            ) from error

    async def declare(self, topology: Topology, *, external: Iterable[str] = ()) -> Applied:
        """Declare exchanges, queues and bindings. Items that exist with these properties stay unchanged.

        Temporary refusals of a busy broker are retried until nothing has succeeded for the client's ``timeout``. A
        retry leaves out the items that are already declared.

        Args:
            external: names of exchanges and queues that other programs declare, and that bindings and arguments may
                refer to.

        Raises:
            InvalidTopologyError: ``topology`` is not a Topology, contradicts itself, or has an exclusive or nameless
                queue. Nothing was declared.
            DeclarationMismatchError: an item exists with other properties.
            UnsupportedBrokerError: the broker lacks an exchange type.
            BrokerError: the broker cannot be reached, or refuses.
        """
        _check_topology(topology)
        _refuse_private_queues(topology)
        connection = await self._within_timeout(self._publisher.connection())
        return await apply(connection, topology, external=external, retry_for=self._publisher.timeout)

    async def destroy(self, topology: Topology, *, force: bool = False, external: Iterable[str] = ()) -> Removed:
        """Delete the exchanges and queues of a topology. Missing ones are not an error.

        Args:
            force: also delete queues that hold messages.
            external: as for :meth:`declare`.

        Raises:
            InvalidTopologyError: ``topology`` is not a Topology; nothing was deleted.
            NotEmptyError: queues hold messages and ``force`` is off. Everything that was deleted was declared again.
            QueueBusyError: a queue was too busy to count, and ``force`` is off. Everything that was deleted was
                declared again.
            BrokerError: the broker cannot be reached, or refuses.
        """
        _check_topology(topology)
        connection = await self._within_timeout(self._publisher.connection())
        return await destroy(connection, topology, force=force, external=external, retry_for=self._publisher.timeout)


class Connecting:
    """The result of :func:`connect`: ``async with`` opens and closes the client, ``await`` opens it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> Client:
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    def __await__(self) -> Generator[Any, None, Client]:
        return self._client.__aenter__().__await__()


def connect(
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
) -> Connecting:
    """Connect to a broker: ``async with bide.connect("amqp://localhost") as client``.

    Args:
        url: the broker's URL; None uses ``BIDE_URL``, or RabbitMQ's default URL on this machine.
        ssl_context: TLS settings, for an ``amqps://`` URL without such settings of its own.
        infrastructure: the delay infrastructure; ``Clock()`` if None.
        declare: declare the delay infrastructure at the first delayed message if it is missing.
        timeout: the limit for one publish, including reconnecting and sending again. For other calls, the limit for
            reconnecting and for retrying temporary refusals.
        wait: how long to try the first connection again while no broker can be reached, for a broker that starts at the
            same time; None tries once. A wrong password or virtual host is an error at once.
        on_lost: what to do with a message whose confirm was lost with the connection: ``"repeat"`` sends it again
            with the same message id, so that it arrives at least once; ``"raise"`` reports it as in doubt.
        max_in_flight: the maximum number of unconfirmed messages; further publishes wait.
        stamp: called with each message of :meth:`Client.publish`; returns a context manager that surrounds the sending
            and returns headers to add. ``bide.observability.tracing`` has one.
        on_disconnected: called with the error when a connection was lost and :attr:`Client.connected` becomes false.
        on_reconnected: called when :attr:`Client.connected` is true again; the client reconnects by itself. Both
            callbacks run in the event loop and must not block. The synchronous client calls them in its own thread.

    Raises:
        InvalidInputError: a value is invalid. Errors of the broker are raised when the client is opened.
    """
    address = (
        url if isinstance(url, BrokerUrl) else BrokerUrl.from_environment() if url is None else BrokerUrl.parse(url)
    )
    if ssl_context is not None:
        address = address.with_context(ssl_context)
    publisher = Publisher(
        address,
        infrastructure or Clock(),
        declare=declare,
        timeout=parse_delay(timeout),
        on_lost=checked_on_lost(on_lost),
        max_in_flight=whole_number("max_in_flight", max_in_flight, 1, 1_000_000),
    )
    client = Client(
        address,
        publisher,
        stamp=stamp,
        wait=None if wait is None else parse_delay(wait),
        on_disconnected=on_disconnected,
        on_reconnected=on_reconnected,
    )
    return Connecting(client)


def _check_topology(topology: Any) -> None:
    if not isinstance(topology, Topology):
        kind = type(topology).__name__
        raise InvalidTopologyError([f"it is of type {kind}: give a Topology, such as Topology(queues=[Queue('q')])"])


def _refuse_private_queues(topology: Topology) -> None:
    """Refuse queues that could not be used: the client declares, consumes and checks on different connections."""
    problems = [
        f"the queue {one.name!r} is exclusive, and could be used on one connection of the client only: use "
        "client.private_queue()"
        if one.exclusive
        else "a queue has no name, and the client could not say which one the broker chose: use client.private_queue()"
        for one in topology.queues
        if one.exclusive or not one.name
    ]
    if problems:
        raise InvalidTopologyError(problems)
