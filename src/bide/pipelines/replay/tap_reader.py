"""Replay of messages from the streams of taps: read by offset, and sent to their queues."""

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
from bide.pipelines.run_sync import run_sync
from bide.recoverability import redrive
from bide.recoverability.failed import FailedMessage

_MAX_SKIP: Final = 20_000
"""Up to this many offsets are read and skipped; beyond a larger gap, a new subscription starts."""

_READ_AHEAD: Final = 32 * 1024 * 1024
"""Bytes of bodies that are kept after the check that all messages exist; further messages are read again to be sent."""

_QUIET: Final = 10.0
"""Seconds without a message after which the end of the stream is looked up."""

_TIMEOUT: Final = 10.0
"""Seconds to wait for an answer of the broker, or for a message that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayMessage:
    """A message to send back.

    Attributes:
        message_id: the id of the message.
        queue: the queue to send the message to.
        stream: the stream that has the message.
        offset: the offset of the message in the stream.
    """

    message_id: str
    queue: str
    stream: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """A replay as an operation on a broker.

    Attributes:
        url: the URL of the broker, with the password.
        run: the id of the operation, which the copies carry as a header.
    """

    url: str = field(repr=False)
    run: str


def available_offsets(url: str, wanted: Mapping[str, int]) -> dict[str, range]:
    """The range of offsets of each stream. Streams that are empty or do not exist are left out.

    Args:
        wanted: stream -> the highest offset of interest; later offsets are not looked up.

    Raises:
        ConnectionLostError: the broker stopped answering.
        BrokerError: the broker cannot be reached, or refuses.
    """

    async def work() -> dict[str, range]:
        connection = await Connection.open(BrokerUrl.parse(url))
        try:
            found = {name: await _held(connection, name, offset) for name, offset in wanted.items()}
        finally:
            await connection.close()
        return {name: offsets for name, offsets in found.items() if offsets}

    return run_sync(work())


async def _held(connection: Connection, stream: str, wanted: int) -> range:
    first = await _first(connection, stream)
    if first is None or first > wanted:
        return range(0)
    end = await end_of(connection, stream, max_wait=_TIMEOUT, quiet=_QUIET, wanted=wanted)
    if end is None:
        raise no_answer(connection, _TIMEOUT)
    return range(first, end)


async def _first(connection: Connection, stream: str) -> int | None:
    try:
        subscription = await subscribe(connection, stream, "first")
    except TargetNotFoundError:
        return None
    async with subscription.channel:
        delivery = await next_of(subscription, _TIMEOUT)
        if delivery is None:
            await require_answer(subscription, _TIMEOUT)
            # The broker answers, so it may have been slow: a message may have arrived in the meantime.
            delivery = await next_of(subscription, 0)
        return offset_of(delivery) if delivery is not None else None


async def send_back(wanted: Sequence[ReplayMessage], replay: ReplayRun, *, skip_missing: bool) -> int:
    """Send messages back, and wait for the confirms; returns the number of messages.

    Args:
        skip_missing: leave out messages that their streams do not have any more. Without it, all messages are read
            before the first one is sent: a part of which some messages were sent would be sent again as a whole.

    Raises:
        NotFoundError: messages are missing. Nothing was sent, unless a stream dropped messages after the check.
        BrokerError: the broker cannot be reached, or refuses a message; other messages may have been sent.
    """
    wanted = sorted(wanted, key=_position)
    connection = await Connection.open(BrokerUrl.parse(replay.url))
    try:
        held = [] if skip_missing else await _check_existing(connection, wanted)
        sent = len(held)
        async with connect(replay.url) as client:
            window = _SendWindow(client)
            try:
                for row, message in held:
                    await window.put(_retry_copy(message, row, replay))
                async for row, message in _read_existing(connection, wanted[len(held) :]):
                    await window.put(_retry_copy(message, row, replay))
                    sent += 1
                await window.finish()
            finally:
                window.cancel()
    finally:
        await connection.close()
    if sent < len(wanted) and not skip_missing:
        raise _dropped(len(wanted) - sent, len(wanted))
    return sent


async def _check_existing(
    connection: Connection, wanted: Sequence[ReplayMessage]
) -> list[tuple[ReplayMessage, FailedMessage]]:
    """Check that all messages exist; returns the first ones, up to :data:`_READ_AHEAD`.

    Args:
        wanted: the messages, sorted by stream and offset.

    Raises:
        NotFoundError: messages are missing.
    """
    held: list[tuple[ReplayMessage, FailedMessage]] = []
    count = size = 0
    async for row, message in _read_existing(connection, wanted):
        count += 1
        size += len(message.body)
        if size <= _READ_AHEAD:
            held.append((row, message))
    if count < len(wanted):
        raise _dropped(len(wanted) - count, len(wanted))
    return held


async def _read_existing(
    connection: Connection, wanted: Sequence[ReplayMessage]
) -> AsyncIterator[tuple[ReplayMessage, FailedMessage]]:
    """Read the messages that exist, which are sorted by stream and offset."""
    for stream, group in groupby(wanted, key=lambda one: one.stream):
        rows: defaultdict[int, list[ReplayMessage]] = defaultdict(list)
        for one in group:
            rows[one.offset].append(one)
        async for offset, delivery in read_copies(connection, stream, list(rows)):
            message = original_message(delivery)
            for row in rows[offset]:
                # A stream that was deleted and declared again has another message at the offset.
                if message.message_id == row.message_id:
                    yield row, message


def _position(one: ReplayMessage) -> tuple[str, int]:
    return one.stream, one.offset


def _dropped(number: int, total: int) -> NotFoundError:
    return NotFoundError(
        f"{number:,} of {total:,} messages were dropped from the streams of the taps since they were chosen: continue "
        "with skip_missing=True"
    )


def original_message(delivery: Delivery) -> FailedMessage:
    """The original message of a copy in a tap."""
    headers = {name: value for name, value in (delivery.values.get("headers") or {}).items() if name != HEADER_OFFSET}
    return FailedMessage.read(
        delivery.exchange, delivery.routing_key, {**delivery.values, "headers": headers}, delivery.body
    )


def _retry_copy(message: FailedMessage, row: ReplayMessage, replay: ReplayRun) -> PreparedMessage:
    return redrive.back(message, to=row.queue, run=replay.run)


async def read_copies(
    connection: Connection, stream: str, offsets: Sequence[int]
) -> AsyncIterator[tuple[int, Delivery]]:
    """Read the messages at these offsets of a stream; missing ones are left out.

    Args:
        offsets: in ascending order.

    Raises:
        ConnectionLostError: the broker sends nothing, although the stream is not known to end before the offset.
        BrokerError: the stream cannot be read.
    """
    remaining = deque(offsets)
    while remaining:
        try:
            subscription = await subscribe(connection, stream, remaining[0])
        except TargetNotFoundError:
            return
        async with subscription.channel:
            reached = remaining[0]
            asked = time.monotonic()
            while remaining and remaining[0] - reached <= _MAX_SKIP:
                delivery = await next_of(subscription, _QUIET)
                # A stream that was declared again delivers new messages only, slowly and forever, so its end is looked
                # up at intervals too.
                if delivery is None or time.monotonic() - asked > _QUIET:
                    end = await end_of(connection, stream, max_wait=_TIMEOUT, quiet=_QUIET, wanted=remaining[0])
                    if end is not None and end <= remaining[0]:
                        return
                    if delivery is None and end is not None:
                        # The stream goes on beyond this offset, so a message will come: something has paused.
                        delivery = await next_of(subscription, _TIMEOUT)
                    asked = time.monotonic()
                if delivery is None:
                    raise ConnectionLostError(
                        f"the broker sent nothing of the stream {stream} for {_QUIET:g} s, and the stream is not "
                        f"known to end before offset {remaining[0]}: start the same replay again to continue"
                    )
                reached = offset_of(delivery)
                while remaining and remaining[0] < reached:
                    remaining.popleft()
                if remaining and remaining[0] == reached:
                    yield remaining.popleft(), delivery


class _SendWindow:
    """Sends messages concurrently, at most :data:`WINDOW` at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[Any]] = set()

    async def put(self, message: PreparedMessage) -> None:
        """Send a message as soon as the window has room. Raises the error of an earlier message."""
        while len(self._tasks) >= WINDOW:
            await self._settle(asyncio.FIRST_COMPLETED)
        self._tasks.add(asyncio.create_task(self._client.forward(message)))

    async def finish(self) -> None:
        """Wait until all messages are confirmed. Raises the error of a message."""
        while self._tasks:
            await self._settle(asyncio.ALL_COMPLETED)

    async def _settle(self, when: str) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=when)
        for one in done:
            one.result()

    def cancel(self) -> None:
        """Cancel the unconfirmed messages."""
        for one in self._tasks:
            one.cancel()
