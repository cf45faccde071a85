"""Streams, read from an offset on by AMQP 0-9-1, because there the broker gives a message as it was published.

There a stream does not tell its end: nothing comes there, and nothing comes from a broker that stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.client.subscription import Subscription
from bide.errors import ConnectionLostError, TargetNotFoundError, UnsupportedBrokerError

HEADER_OFFSET: Final = "x-stream-offset"
"""Header in which the broker tells the offset."""

_PREFETCH: Final = 1_000


async def subscribe(connection: Connection, stream: str, offset: int | str) -> Subscription:
    """Start to read.

    Raises:
        TargetNotFoundError: there is no such stream.
        BrokerError: the broker refuses.
    """
    arguments: dict[str, Any] = {HEADER_OFFSET: offset}
    return await Subscription.open(connection, stream, prefetch=_PREFETCH, arguments=arguments, exclusive=False)


async def next_of(subscription: Subscription, patience: float) -> Delivery | None:
    """The next message of a stream, or None if none comes for so many seconds.

    Raises:
        UnsupportedBrokerError: it is no stream. The message stays there.
    """
    try:
        async with asyncio.timeout(patience):
            delivery, _ = await subscription.next()
    except TimeoutError:
        return None
    if HEADER_OFFSET not in (delivery.values.get("headers") or {}):
        raise UnsupportedBrokerError("what is read as a stream gives no offsets: it is a queue of another type")
    subscription.channel.ack(delivery.delivery_tag)
    return delivery


def offset_of(delivery: Delivery) -> int:
    """Where in its stream a message is."""
    return int(delivery.values["headers"][HEADER_OFFSET])


async def answer(subscription: Subscription, patience: float) -> None:
    """See whether the broker answers at all, so that nothing that it sent before is still on its way.

    Raises:
        ConnectionLostError: it does not.
    """
    try:
        async with asyncio.timeout(patience):
            await subscription.channel.qos(_PREFETCH)
    except TimeoutError as error:
        raise no_answer(subscription.channel.connection, patience) from error


def no_answer(connection: Connection, patience: float) -> ConnectionLostError:
    """The error for a broker that stands still."""
    return ConnectionLostError(f"the broker at {connection.address} has not answered for {patience:g} s")


async def end_of(
    connection: Connection, stream: str, *, patience: float, quiet: float | None = None, wanted: int | None = None
) -> int | None:
    """The offset at which a stream ends; 0 of one that is empty or not there, None if it cannot be known.

    The first new message tells where a stream ends to which messages keep coming; its last ones tell it of a quiet one.

    Args:
        patience: seconds without a message, or an answer.
        quiet: the same after the first of its last messages, which come together; *patience* if None.
        wanted: any offset behind this one will do.

    Raises:
        ConnectionLostError: the broker does not answer any more.
    """
    try:
        async with asyncio.timeout(patience):
            new = await subscribe(connection, stream, "next")
            last = await subscribe(connection, stream, "last")
    except TargetNotFoundError:
        return 0
    except TimeoutError:
        return None
    end, wait = 0, patience
    async with new.channel, last.channel:
        coming = asyncio.create_task(new.next())
        try:
            while True:
                delivery = await next_of(last, wait)
                if delivery is None:
                    await answer(last, patience)
                    # It may have stood still for a moment.
                    delivery = await next_of(last, 0)
                if coming.done():
                    return offset_of(coming.result()[0])
                if delivery is None:
                    return end
                end = offset_of(delivery) + 1
                if wanted is not None and end > wanted:
                    return end
                wait = patience if quiet is None else quiet
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def everything(
    connection: Connection, stream: str, *, patience: float, quiet: float
) -> AsyncGenerator[Delivery, None]:
    """All that a stream has now, from its beginning; nothing of one that is not there.

    Args:
        patience: seconds without a message, or an answer.
        quiet: see :func:`end_of`.

    Raises:
        ConnectionLostError: nothing comes, and that is not because the stream ends.
        BrokerError: the stream cannot be read.
    """
    end = await end_of(connection, stream, patience=patience, quiet=quiet)
    if end is None:
        raise no_answer(connection, patience)
    if not end:
        return
    try:
        async with asyncio.timeout(patience):
            subscription = await subscribe(connection, stream, "first")
    except TimeoutError as error:
        raise no_answer(connection, patience) from error
    async with subscription.channel:
        while True:
            delivery = await next_of(subscription, patience)
            if delivery is None:
                raise ConnectionLostError(
                    f"the stream {stream} has given nothing for {patience:g} s, and ends at the offset {end} only"
                )
            offset = offset_of(delivery)
            # What was there may be dropped meanwhile.
            if offset < end:
                yield delivery
            if offset >= end - 1:
                return
