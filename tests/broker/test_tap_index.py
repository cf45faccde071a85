"""The running index that the console keeps of a tap, on real streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Final

import pytest

import bide
from bide.admin.taps import turn_off, turn_on
from bide.amqp.connection import Connection
from bide.console.tap_index import TapIndex
from bide.delay.taps import taps_of
from bide.schedules.records import ScheduleFilter
from bide.streams.log import Address
from tests.support import Vhost, stream_port

CLOCK: Final = bide.Clock()
DELAY: Final = timedelta(hours=1)
TARGETS: Final = ("mail", "orders")
AT_ONCE: Final = 10
CAPACITY: Final = 25


class Tapped:
    """A virtual host with a tap, and an index of its stream of scheduled messages."""

    def __init__(self, client: bide.Client, connection: Connection, vhost: Vhost) -> None:
        self._client = client
        self._connection = connection
        self._address = Address.of(vhost.url, stream_port(vhost.broker))
        stream = taps_of(CLOCK).scheduled
        self.index = TapIndex(stream, capacity=CAPACITY, at_once=AT_ONCE)

    async def send(self, numbers: Sequence[int]) -> None:
        """Send messages that are due an hour later."""
        messages = [
            bide.OutgoingMessage(b"", to=TARGETS[one % 2], delay=DELAY, message_id=f"m{one}") for one in numbers
        ]
        assert (await self._client.publish_many(messages)).confirmed == len(messages)

    async def read(self, *, older: bool = False) -> None:
        await asyncio.to_thread(self.index.read, self._address, older=older)

    async def found(self, *numbers: int) -> list[int]:
        """Those of the messages that are found by their ids."""
        found = [await asyncio.to_thread(self.index.find, self._address, f"m{one}") for one in numbers]
        for number, one in zip(numbers, found, strict=True):
            if one is not None:
                assert (one.message_id, one.target) == (f"m{number}", f"q:{TARGETS[number % 2]}")
                assert one.due is not None
                assert 0 < one.due / 1000 - time.time() < DELAY.total_seconds() + 1
        return [number for number, one in zip(numbers, found, strict=True) if one is not None]

    async def replace_stream(self) -> None:
        await turn_off(self._connection, CLOCK, delete=True)
        await turn_on(self._connection, CLOCK)

    def waiting(self, target: str | None = None) -> int:
        """The number of due times."""
        return sum(one.count for one in self.index.times.span(ScheduleFilter(target=target)))


@pytest.fixture
async def tapped(vhost: Vhost, vhost_connection: Connection) -> AsyncIterator[Tapped]:
    async with bide.connect(vhost.url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(one) for one in TARGETS]))
        # Otherwise the first messages would wait for declarations, and later ones overtake them.
        for target in TARGETS:
            await client.publish(b"", to=target, delay=DELAY)
        await turn_on(vhost_connection, CLOCK)
        yield Tapped(client, vhost_connection, vhost)


async def test_an_index_has_the_latest_messages_and_gets_older_ones_until_it_is_full(tapped: Tapped) -> None:
    await tapped.read()
    assert (len(tapped.index), tapped.index.since, tapped.index.older_count, tapped.waiting()) == (0, None, 0, 0)
    await tapped.send(range(30))
    await tapped.read()
    index = tapped.index
    assert 0 < len(index) <= AT_ONCE
    assert (await tapped.found(0, 29), index.is_full) == ([29], False)
    sizes = [len(index)]
    while index.older_count and not index.is_full:
        await tapped.read(older=True)
        sizes.append(len(index))
        assert sizes[-1] <= sizes[-2] + AT_ONCE
    assert (len(index), tapped.waiting(), index.is_full) == (CAPACITY, CAPACITY, True)
    assert await tapped.found(0, 4, 5, 17, 29) == [5, 17, 29]
    assert (tapped.waiting("q:mail"), tapped.waiting("q:orders")) == (12, 13)
    assert index.older_count >= 5

    # New messages take the place of the oldest ones.
    await tapped.send(range(30, 34))
    await tapped.read()
    assert (len(index), tapped.waiting()) == (CAPACITY, CAPACITY)
    assert await tapped.found(5, 8, 9, 29, 30, 33) == [9, 29, 30, 33]
    assert index.since is not None
    assert abs(index.since / 1000 - time.time()) < 3600


async def test_an_index_begins_anew_when_too_many_messages_are_new(tapped: Tapped) -> None:
    await tapped.send(range(5))
    await tapped.read()
    assert await tapped.found(*range(5)) == list(range(5))
    await tapped.send(range(5, 40))
    await tapped.read()
    assert len(tapped.index) <= AT_ONCE
    assert tapped.index.older_count >= 30
    assert await tapped.found(4, 39) == [39]


@pytest.mark.parametrize("number", [3, 8])
async def test_an_index_begins_anew_when_the_stream_was_replaced(tapped: Tapped, number: int) -> None:
    await tapped.send(range(5))
    await tapped.read()
    await tapped.replace_stream()
    await tapped.send(range(100, 100 + number))
    await tapped.read()
    assert (len(tapped.index), tapped.waiting()) == (number, number)
    assert await tapped.found(0, 4, 100, 99 + number) == [100, 99 + number]
