"""The client: publish now or later, receive, declare."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from bide.admin.apply import Applied, apply
from bide.amqp.url import BrokerUrl
from bide.checks import whole_number
from bide.consumer import Consumer
from bide.delay.clock import Clock
from bide.delay.infrastructure import DelayInfrastructure
from bide.duration import DelayLike, DueTimeLike, parse_delay
from bide.errors import InvalidInputError
from bide.link import Link
from bide.outgoing import Outgoing
from bide.publisher import OnLost, Publisher, Receipt
from bide.topology import Topology


class Client:
    """A client of one broker. Make it with :func:`connect`.

    It keeps one connection for publishing and one for receiving, so that a broker that blocks publishers still gets
    acknowledgements, and opens them again when they break.
    """

    def __init__(self, url: BrokerUrl, publisher: Publisher) -> None:
        self.url = url
        self._publisher = publisher
        self._receiving = Link(replace(url, name=f"{url.name} (receiving)"))
        # A consumer that the caller has dropped must not be kept.
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        try:
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
        """Close: unsettled messages go back to their queues, unconfirmed publishes are reported as in doubt."""
        await asyncio.gather(*(one.close() for one in list(self._consumers)))
        await asyncio.gather(self._receiving.close(), self._publisher.close())

    async def release(self) -> tuple[int, ...]:
        """The broker's release, such as ``(4, 3, 6)``."""
        return (await self._publisher.connection()).release

    async def infrastructure(self) -> DelayInfrastructure:
        """The delay infrastructure as it is used on this broker."""
        return await self._publisher.infrastructure()

    async def publish(
        self,
        body: bytes | str | None = None,
        *,
        json: Any = None,
        to: str | None = None,
        exchange: str | None = None,
        routing_key: str = "",
        delay: DelayLike | None = None,
        deliver_at: DueTimeLike | None = None,
        isolated: bool = False,
        mandatory: bool = True,
        headers: Mapping[str, Any] | None = None,
        message_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        type: str | None = None,
        user_id: str | None = None,
        app_id: str | None = None,
        timestamp: datetime | None = None,
        persistent: bool = True,
        priority: int | None = None,
        expiration: DelayLike | None = None,
    ) -> Receipt:
        """Send a message and wait until the broker has it.

        Args:
            body: bytes, or text that is sent as UTF-8.
            json: instead of a body: anything that serialises as JSON.
            to: the queue that it goes to.
            exchange: instead of a queue: the exchange that it goes to, with its ``routing_key``.
            delay: how long from now; at least this long, rounded up to the infrastructure's resolution.
            deliver_at: instead of a delay: the due time, with a time zone. One in the past is delivered at once.
            isolated: reach the queue over a release queue of its own (one hop more), so that if it refuses messages
                only its own wait. Exchanges always are. Only for delayed messages with ``Clock``.
            mandatory: an undelayed message that no queue takes is an error rather than dropped.
            message_id: kept; made if it is None.
            persistent: survive a restart of the broker in classic queues (quorum queues always do).
            priority: 0 to 255. A delayed message carries it in a header, and bide's consumer restores it.
            expiration: how long the message is of use in its queue. A delayed message carries it in a header;
                see ``Message.expired``.

        Raises:
            InvalidInputError: in one of its kinds; nothing was sent.
            TargetNotFoundError: the queue or exchange does not exist.
            UnroutableError: no queue takes it.
            PublishRefusedError: no queue stored it.
            PublishInDoubtError: the connection broke before the confirm, and ``on_lost`` is ``"raise"``, or there was
                no time left to repeat.
            BrokerError: the broker cannot be reached, or refuses.
        """
        message = Outgoing.make(
            body,
            json=json,
            to=to,
            exchange=exchange,
            routing_key=routing_key,
            delay=delay,
            deliver_at=deliver_at,
            isolated=isolated,
            headers=headers,
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
            content_type=content_type,
            content_encoding=content_encoding,
            type=type,
            user_id=user_id,
            app_id=app_id,
            timestamp=timestamp,
            persistent=persistent,
            priority=priority,
            expiration=expiration,
        )
        return await self._publisher.publish(message, mandatory=mandatory)

    def consume(
        self,
        queue: str,
        *,
        prefetch: int = 100,
        arguments: Mapping[str, Any] | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        """The messages of a queue: ``async for message in client.consume("orders")``; see :class:`bide.Consumer`.

        Args:
            prefetch: at most this many unsettled messages, 1 to 65,535.
            arguments: of the consumer, such as ``x-priority`` or ``x-stream-offset``.
            exclusive: refuse to share a classic queue with other consumers; quorum queues ignore it.

        Raises:
            InvalidInputError: a bad name or prefetch. Errors of the broker come with the first message.
        """
        consumer = Consumer(self._receiving, queue, prefetch=prefetch, arguments=arguments, exclusive=exclusive)
        self._consumers.add(consumer)
        return consumer

    async def declare(self, topology: Topology) -> Applied:
        """Declare exchanges, queues and bindings; what exists as wanted is left as it is.

        Raises:
            InvalidTopologyError: the topology contradicts itself; nothing was declared.
            DeclarationMismatchError: something exists with other properties.
        """
        return await apply(await self._publisher.connection(), topology)


class Connecting:
    """What :func:`connect` returns: ``async with`` opens and closes the client, ``await`` opens it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> Client:
        return await self._client.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    def __await__(self) -> Any:
        return self._client.__aenter__().__await__()


def connect(
    url: str | BrokerUrl | None = None,
    *,
    infrastructure: DelayInfrastructure | None = None,
    declare: bool = True,
    timeout: DelayLike = timedelta(seconds=30),
    on_lost: OnLost = "repeat",
    max_in_flight: int = 10_000,
) -> Connecting:
    """Connect to a broker: ``async with bide.connect("amqp://localhost") as client``.

    Args:
        url: of the broker; None takes ``BIDE_URL``, or RabbitMQ's default on this machine.
        infrastructure: how delays are made; ``Clock()`` if None.
        declare: put the delay infrastructure on the broker at the first delayed message where it is missing.
        timeout: for one publish, reconnecting and repeating included.
        on_lost: what to do with a message whose confirm was lost with the connection: ``"repeat"`` sends it again
            with the same message id, so that it arrives at least once; ``"raise"`` reports it as in doubt.
        max_in_flight: messages sent and not yet confirmed; further publishes wait.

    Raises:
        InvalidInputError: a value cannot be used. Errors of the broker come when the client is opened.
    """
    if on_lost not in ("repeat", "raise"):
        raise InvalidInputError(f"on_lost={on_lost!r}: give 'repeat' or 'raise'")
    address = (
        url if isinstance(url, BrokerUrl) else BrokerUrl.from_environment() if url is None else BrokerUrl.parse(url)
    )
    publisher = Publisher(
        address,
        infrastructure or Clock(),
        declare=declare,
        timeout=parse_delay(timeout),
        on_lost=on_lost,
        max_in_flight=whole_number("max_in_flight", max_in_flight, 1, 1_000_000),
    )
    return Connecting(Client(address, publisher))
