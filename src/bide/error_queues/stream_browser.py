"""A reader of streams over AMQP 0-9-1, where messages keep all their properties.

AMQP 0-9-1 does not report the end of a stream. Silence can mean the end, or a broker that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.frame_sink import FrameSink
from bide.client.subscription import Subscription
from bide.errors import ConnectionLostError, TargetNotFoundError, UnsupportedBrokerError

HEADER_OFFSET: Final = "x-stream-offset"
"""Header with the offset, in the arguments of a consumer and in deliveries."""

_PREFETCH: Final = 1_000


async def subscribe(connection: Connection, stream: str, offset: int | str) -> Subscription:
    """Start to consume a stream.

    Raises:
        TargetNotFoundError: the stream does not exist.
        BrokerError: the broker refuses.
    """
    arguments: dict[str, Any] = {HEADER_OFFSET: offset}
    return await Subscription.open(connection, stream, prefetch=_PREFETCH, arguments=arguments, exclusive=False)


async def next_of(subscription: Subscription, max_wait: float) -> Delivery | None:
    """Receive the next message of a stream, or None if none arrives within *max_wait* seconds.

    Raises:
        UnsupportedBrokerError: the queue is not a stream. The message stays in it.
    """
    try:
        async with asyncio.timeout(max_wait):
            delivery, _ = await subscription.next()
    except TimeoutError:
        return None
    if HEADER_OFFSET not in (delivery.values.get("headers") or {}):
        raise UnsupportedBrokerError("the queue is not a stream, because its messages have no offsets: give a stream")
    subscription.channel.ack(delivery.delivery_tag)
    return delivery


def offset_of(delivery: Delivery) -> int:
    """The offset of a message."""
    return int(delivery.values["headers"][HEADER_OFFSET])


async def require_answer(subscription: Subscription, max_wait: float) -> None:
    """Wait for an answer of the broker. All messages that it sent before the answer have then arrived.

    Raises:
        ConnectionLostError: the broker does not answer.
    """
    try:
        async with asyncio.timeout(max_wait):
            await subscription.channel.qos(_PREFETCH)
    except TimeoutError as error:
        raise no_answer(subscription.channel.connection, max_wait) from error


def no_answer(connection: FrameSink, max_wait: float) -> ConnectionLostError:
    """The error for a broker that does not answer."""
    return ConnectionLostError(f"the broker at {connection.address} has not answered for {max_wait:g} s")


async def end_of(
    connection: Connection, stream: str, *, max_wait: float, quiet: float | None = None, wanted: int | None = None
) -> int | None:
    """Find the offset at which a stream ends; 0 if it is empty or missing, None if the end cannot be determined.

    The first message that is published meanwhile shows the end. If there is none, the last chunk of the stream does.

    Args:
        max_wait: seconds to wait for a message or an answer.
        quiet: seconds to wait for another message of the last chunk, whose messages arrive together; *max_wait* if
            None.
        wanted: return as soon as the end is known to be beyond this offset.

    Raises:
        ConnectionLostError: the broker stopped answering.
    """
    try:
        async with asyncio.timeout(max_wait):
            new = await subscribe(connection, stream, "next")
            last = await subscribe(connection, stream, "last")
    except TargetNotFoundError:
        return 0
    except TimeoutError:
        return None
    end, wait = 0, max_wait
    async with new.channel, last.channel:
        coming = asyncio.create_task(new.next())
        try:
            while True:
                delivery = await next_of(last, wait)
                if delivery is None:
                    await require_answer(last, max_wait)
                    # The broker may have paused for a moment.
                    delivery = await next_of(last, 0)
                if coming.done():
                    return offset_of(coming.result()[0])
                if delivery is None:
                    return end
                end = offset_of(delivery) + 1
                if wanted is not None and end > wanted:
                    return end
                wait = max_wait if quiet is None else quiet
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def read_all(
    connection: Connection, stream: str, *, max_wait: float, quiet: float
) -> AsyncGenerator[Delivery, None]:
    """Read all messages that a stream has now, from its beginning; none if it does not exist.

    Args:
        max_wait: seconds to wait for a message or an answer.
        quiet: see :func:`end_of`.

    Raises:
        ConnectionLostError: messages stopped arriving before the end of the stream.
        BrokerError: the stream cannot be read.
    """
    end = await end_of(connection, stream, max_wait=max_wait, quiet=quiet)
    if end is None:
        raise no_answer(connection, max_wait)
    if not end:
        return
    try:
        async with asyncio.timeout(max_wait):
            subscription = await subscribe(connection, stream, "first")
    except TimeoutError as error:
        raise no_answer(connection, max_wait) from error
    async with subscription.channel:
        while True:
            delivery = await next_of(subscription, max_wait)
            if delivery is None:
                raise ConnectionLostError(
                    f"the stream {stream} delivered nothing for {max_wait:g} s, before its end at {end}: try again"
                )
            offset = offset_of(delivery)
            # Retention may have deleted messages below the end meanwhile.
            if offset < end:
                yield delivery
            if offset >= end - 1:
                return
