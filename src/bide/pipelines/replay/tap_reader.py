"""Messages out of the streams of taps, and back to the queues that they failed on: what a task of a replay does."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.error_queues.operation import WINDOW
from bide.error_queues.stream_browser import (
    HEADER_OFFSET,
    end_of,
    next_of,
    no_answer,
    offset_of,
    require_answer,
    subscribe,
)
from bide.errors import ConnectionLostError, NotFoundError, TargetNotFoundError
from bide.messages.prepared import PreparedMessage
from bide.pipelines.run_sync import wait_for
from bide.recoverability import redrive
from bide.recoverability.failed import FailedMessage

_NEAR: Final = 20_000
"""Offsets that are read over rather than to subscribe anew behind them."""

_READ_AHEAD: Final = 32 * 1024 * 1024
"""Bytes of bodies that are kept from looking whether all are there until they are sent; others are read once more."""

_PATIENCE: Final = 10.0
"""Seconds without a message after which a stream is asked whether it is at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A message to send back.

    Attributes:
        queue: where to.
        stream: that has it, at the offset.
    """

    message_id: str
    queue: str
    stream: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """How messages are sent.

    Attributes:
        url: the broker's, with the password.
        run: names the operation.
    """

    url: str = field(repr=False)
    run: str


def held_offsets(url: str, wanted: Mapping[str, int]) -> dict[str, range]:
    """The offsets that each stream has; streams that have none, or do not exist, are left out.

    Args:
        wanted: the highest offset of each stream that anybody asks for: what a stream has behind it is not looked for.

    Raises:
        ConnectionLostError: the broker does not answer any more.
        BrokerError: it cannot be reached, or refuses.
    """

    async def work() -> dict[str, range]:
        connection = await Connection.open(BrokerUrl.parse(url))
        try:
            found = {name: await _held(connection, name, offset) for name, offset in wanted.items()}
        finally:
            await connection.close()
        return {name: offsets for name, offsets in found.items() if offsets}

    return wait_for(work())


async def _held(connection: Connection, stream: str, wanted: int) -> range:
    first = await _first(connection, stream)
    if first is None or first > wanted:
        return range(0)
    end = await end_of(connection, stream, max_wait=_PATIENCE, wanted=wanted)
    if end is None:
        raise no_answer(connection, _PATIENCE)
    return range(first, end)


async def _first(connection: Connection, stream: str) -> int | None:
    try:
        subscription = await subscribe(connection, stream, "first")
    except TargetNotFoundError:
        return None
    async with subscription.channel:
        delivery = await next_of(subscription, _PATIENCE)
        if delivery is None:
            await require_answer(subscription, _PATIENCE)
            # It may have stood still for a moment.
            delivery = await next_of(subscription, 0)
        return offset_of(delivery) if delivery is not None else None


async def send_back(wanted: Sequence[Wanted], way: ReplayRun, *, skip_missing: bool) -> int:
    """Send messages back, and wait until the broker has all of them; says how many those are.

    Args:
        skip_missing: leave those out that are not in their streams any more. Else all are looked for before the first
            is sent: what was sent without the others would be sent again with them.

    Raises:
        NotFoundError: some are not there any more. None was sent, unless they were dropped in just that moment.
        BrokerError: the broker cannot be reached, or refuses a message: others may have been sent.
    """
    wanted = sorted(wanted, key=_place)
    connection = await Connection.open(BrokerUrl.parse(way.url))
    try:
        held = [] if skip_missing else await _looked_for(connection, wanted)
        sent = len(held)
        async with connect(way.url) as client:
            sending = _TapCopy(client)
            try:
                for row, message in held:
                    await sending.put(_back(message, row, way))
                async for row, message in _found(connection, wanted[len(held) :]):
                    await sending.put(_back(message, row, way))
                    sent += 1
                await sending.finish()
            finally:
                sending.cancel()
    finally:
        await connection.close()
    if sent < len(wanted) and not skip_missing:
        raise _dropped(len(wanted) - sent, len(wanted))
    return sent


async def _looked_for(connection: Connection, wanted: Sequence[Wanted]) -> list[tuple[Wanted, FailedMessage]]:
    """See that all are there, and keep the first ones of them, as many as memory has room for.

    Args:
        wanted: in the order of their places.
    """
    held: list[tuple[Wanted, FailedMessage]] = []
    count = size = 0
    async for row, message in _found(connection, wanted):
        count += 1
        size += len(message.body)
        if size <= _READ_AHEAD:
            held.append((row, message))
    if count < len(wanted):
        raise _dropped(len(wanted) - count, len(wanted))
    return held


async def _found(connection: Connection, wanted: Sequence[Wanted]) -> AsyncIterator[tuple[Wanted, FailedMessage]]:
    """Those that are in their streams, in the order in which they are given, which is that of their places."""
    for stream, some in groupby(wanted, key=lambda one: one.stream):
        rows: defaultdict[int, list[Wanted]] = defaultdict(list)
        for one in some:
            rows[one.offset].append(one)
        async for offset, delivery in copies(connection, stream, list(rows)):
            message = read_copy(delivery)
            for row in rows[offset]:
                # A stream that was deleted and declared again has other messages there.
                if message.message_id == row.message_id:
                    yield row, message


def _place(one: Wanted) -> tuple[str, int]:
    return one.stream, one.offset


def _dropped(number: int, of: int) -> NotFoundError:
    return NotFoundError(
        f"{number:,} of {of:,} messages were dropped from the streams of the taps since they were chosen: go on with "
        "--skip-missing"
    )


def read_copy(delivery: Delivery) -> FailedMessage:
    """The message of which a tap has seen a copy."""
    headers = {name: value for name, value in (delivery.values.get("headers") or {}).items() if name != HEADER_OFFSET}
    return FailedMessage.read(
        delivery.exchange, delivery.routing_key, {**delivery.values, "headers": headers}, delivery.body
    )


def _back(message: FailedMessage, row: Wanted, way: ReplayRun) -> PreparedMessage:
    return redrive.back(message, to=row.queue, run=way.run)


async def copies(connection: Connection, stream: str, offsets: Sequence[int]) -> AsyncIterator[tuple[int, Delivery]]:
    """What a stream has at these offsets, in their order; what is not there any more is left out.

    Args:
        offsets: in ascending order.

    Raises:
        ConnectionLostError: nothing comes, and that is not because the stream ends.
        BrokerError: the stream cannot be read.
    """
    left = deque(offsets)
    while left:
        try:
            subscription = await subscribe(connection, stream, left[0])
        except TargetNotFoundError:
            return
        async with subscription.channel:
            reached = left[0]
            asked = time.monotonic()
            while left and left[0] - reached <= _NEAR:
                delivery = await next_of(subscription, _PATIENCE)
                # At its end, a stream that was declared again gives what is new: as slowly as that comes, for ever.
                if delivery is None or time.monotonic() - asked > _PATIENCE:
                    end = await end_of(connection, stream, max_wait=_PATIENCE, wanted=left[0])
                    if end is not None and end <= left[0]:
                        return
                    asked = time.monotonic()
                if delivery is None:
                    raise ConnectionLostError(
                        f"the stream {stream} has given nothing for {_PATIENCE:g} s, and is not known to end before "
                        f"the offset {left[0]}: do the same again to go on"
                    )
                reached = offset_of(delivery)
                while left and left[0] < reached:
                    left.popleft()
                if left and left[0] == reached:
                    yield left.popleft(), delivery


class _TapCopy:
    """Messages on their way, :data:`WINDOW` at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[Any]] = set()

    async def put(self, message: PreparedMessage) -> None:
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
