"""Messages out of the streams of taps, and back to the queues that they failed on: what a task of a replay does."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from bide.amqp.connection import Connection
from bide.amqp.content import Delivery
from bide.amqp.url import BrokerUrl
from bide.client import Client, connect
from bide.delay.infrastructure import DelayInfrastructure
from bide.errors import ConnectionLostError, TargetNotFoundError
from bide.lifecycle.run import WINDOW
from bide.outgoing import Outgoing
from bide.recoverability import restoration
from bide.recoverability.failed import FailedMessage
from bide.subscription import Subscription

_OFFSET: Final = "x-stream-offset"
"""Header in which the broker tells the offset."""

_PREFETCH: Final = 1_000
_NEAR: Final = 20_000
"""Offsets that are read over rather than to subscribe anew behind them."""

_PATIENCE: Final = 10.0
"""Seconds without a message after which a stream is asked whether it is at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A message to send back.

    Attributes:
        queue: where to.
        stream: that has it, at the offset.
        due: when it is due there.
    """

    message_id: str
    queue: str
    stream: str
    offset: int
    due: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How messages are sent.

    Attributes:
        url: the broker's, with the password.
        infrastructure: what delays them.
        declare: put the infrastructure on the broker where it is missing.
        run: names the operation.
    """

    url: str = field(repr=False)
    infrastructure: DelayInfrastructure
    declare: bool
    run: str


def first_offsets(url: str, streams: Iterable[str]) -> dict[str, int]:
    """The first offset that each stream has; streams that do not exist or are empty are left out.

    Raises:
        ConnectionLostError: the broker does not answer any more.
        BrokerError: it cannot be reached, or refuses.
    """

    async def work() -> dict[str, int]:
        connection = await Connection.open(BrokerUrl.parse(url))
        try:
            found = {name: await _first(connection, name) for name in streams}
        finally:
            await connection.close()
        return {name: offset for name, offset in found.items() if offset is not None}

    return asyncio.run(work())


async def _first(connection: Connection, stream: str) -> int | None:
    try:
        subscription = await _subscribe(connection, stream, "first")
    except TargetNotFoundError:
        return None
    async with subscription.channel:
        delivery = await _next(subscription)
        if delivery is None:
            await _answer(subscription)
            return None
        return _offset(delivery)


async def _answer(subscription: Subscription) -> None:
    """See whether the broker answers at all, so that nothing that it sent before is still on its way."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await subscription.channel.qos(_PREFETCH)
    except TimeoutError as error:
        address = subscription.channel.connection.address
        raise ConnectionLostError(f"the broker at {address} has not answered for {_PATIENCE:g} s") from error


async def send_back(wanted: Sequence[Wanted], way: Way) -> int:
    """Send messages back, and wait until the broker has all of them; says how many those are.

    Those that are not in their streams any more are left out.

    Raises:
        BrokerError: the broker cannot be reached, or refuses a message: others may have been sent.
    """
    places: dict[str, defaultdict[int, list[Wanted]]] = {}
    for one in wanted:
        places.setdefault(one.stream, defaultdict(list))[one.offset].append(one)
    sent = 0
    connection = await Connection.open(BrokerUrl.parse(way.url))
    try:
        async with connect(way.url, infrastructure=way.infrastructure, declare=way.declare) as client:
            sending = _Sending(client)
            try:
                for stream, rows in places.items():
                    async for offset, delivery in copies(connection, stream, sorted(rows)):
                        message = read_copy(delivery)
                        for row in rows[offset]:
                            # A stream that was deleted and declared again has other messages there.
                            if message.message_id == row.message_id:
                                await sending.put(_back(message, row, way, client.now()))
                                sent += 1
                await sending.finish()
            finally:
                sending.cancel()
    finally:
        await connection.close()
    return sent


def read_copy(delivery: Delivery) -> FailedMessage:
    """The message of which a tap has seen a copy."""
    headers = {name: value for name, value in (delivery.values.get("headers") or {}).items() if name != _OFFSET}
    return FailedMessage.read(
        delivery.exchange, delivery.routing_key, {**delivery.values, "headers": headers}, delivery.body
    )


def _back(message: FailedMessage, row: Wanted, way: Way, now: datetime) -> Outgoing:
    delay = max(row.due - now, timedelta(0))
    return restoration.back(message, to=row.queue, delay=delay or None, run=way.run)


async def copies(connection: Connection, stream: str, offsets: Sequence[int]) -> AsyncIterator[tuple[int, Delivery]]:
    """What a stream has at these offsets, in their order; what is not there any more is left out.

    By AMQP 0-9-1, because there the broker gives a message as it was published. There a stream does not tell its end:
    nothing comes there, and nothing comes from a broker that stands still.

    Args:
        offsets: in ascending order.

    Raises:
        ConnectionLostError: nothing comes, and that is not because the stream ends.
        BrokerError: the stream cannot be read.
    """
    left = deque(offsets)
    while left:
        try:
            subscription = await _subscribe(connection, stream, left[0])
        except TargetNotFoundError:
            return
        async with subscription.channel:
            reached = left[0]
            while left and left[0] - reached <= _NEAR:
                delivery = await _next(subscription)
                if delivery is None:
                    if await _ends_before(connection, stream, left[0]):
                        return
                    raise ConnectionLostError(
                        f"the stream {stream} has given nothing for {_PATIENCE:g} s, and is not known to end before "
                        f"the offset {left[0]}: do the same again to go on"
                    )
                reached = _offset(delivery)
                while left and left[0] < reached:
                    left.popleft()
                if left and left[0] == reached:
                    yield left.popleft(), delivery


async def _ends_before(connection: Connection, stream: str, offset: int) -> bool:
    """Whether the stream gives its last messages, and none of them has this offset or a higher one."""
    try:
        async with asyncio.timeout(_PATIENCE):
            subscription = await _subscribe(connection, stream, "last")
    except TargetNotFoundError:
        return True
    except TimeoutError:
        return False
    reached = None
    async with subscription.channel:
        while (delivery := await _next(subscription)) is not None:
            reached = _offset(delivery)
            if reached >= offset:
                return False
    return reached is not None


async def _next(subscription: Subscription) -> Delivery | None:
    """The next message of a stream, or None if none comes for a while."""
    try:
        async with asyncio.timeout(_PATIENCE):
            delivery, _ = await subscription.next()
    except TimeoutError:
        return None
    subscription.channel.ack(delivery.delivery_tag)
    return delivery


async def _subscribe(connection: Connection, stream: str, offset: int | str) -> Subscription:
    arguments: dict[str, Any] = {_OFFSET: offset}
    return await Subscription.open(connection, stream, prefetch=_PREFETCH, arguments=arguments, exclusive=False)


def _offset(delivery: Delivery) -> int:
    return int(delivery.values["headers"][_OFFSET])


class _Sending:
    """Messages on their way, :data:`WINDOW` at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[Any]] = set()

    async def put(self, message: Outgoing) -> None:
        """Send one, as soon as few enough are on their way. Raises what befell an earlier one."""
        while len(self._tasks) >= WINDOW:
            await self._settle(asyncio.FIRST_COMPLETED)
        self._tasks.add(asyncio.create_task(self._client.forward(message)))

    async def finish(self) -> None:
        """Wait until the broker has all. Raises what befell one."""
        while self._tasks:
            await self._settle(asyncio.ALL_COMPLETED)

    async def _settle(self, when: str) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=when)
        for one in done:
            one.result()

    def cancel(self) -> None:
        """Wait for none any more."""
        for one in self._tasks:
            one.cancel()
