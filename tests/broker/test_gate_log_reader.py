"""A gate reads the schedule log in batches, from an offset on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import bide
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import ConsumerCancelledError, TargetNotFoundError
from bide.gate.log_reader import PREFETCH, LogReader, LogRecord
from bide.schedules.names import ScheduleNames
from tests.support import Vhost
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
LOG = NAMES.log(0)


@pytest.fixture
async def channel(vhost: Vhost, vhost_connection: Connection) -> AsyncIterator[Channel]:
    """A channel to a virtual host with the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology(partitions=1))
        yield await vhost_connection.channel(confirms=True)


async def append(channel: Channel, *bodies: bytes) -> None:
    for body in bodies:
        await channel.publish(exchange=NAMES.operations, routing_key="0", values={}, body=body)


async def take(reader: LogReader, count: int) -> list[LogRecord]:
    found = list[LogRecord]()
    async with asyncio.timeout(TIMEOUT):
        while len(found) < count:
            found += await reader.batch()
    return found


async def test_records_come_from_the_offset_on_and_with_their_exchange(
    channel: Channel, vhost_connection: Connection
) -> None:
    await append(channel, b"0", b"1", b"2")
    await channel.publish(exchange=NAMES.gates, routing_key="0", values={}, body=b"3")
    reader = await LogReader.open(vhost_connection, LOG, 1)
    expected = [
        LogRecord(1, NAMES.operations, b"1"),
        LogRecord(2, NAMES.operations, b"2"),
        LogRecord(3, NAMES.gates, b"3"),
    ]
    assert await take(reader, 3) == expected
    await append(channel, b"4")
    assert await take(reader, 1) == [LogRecord(4, NAMES.operations, b"4")]
    reader.close()


async def test_a_reader_gets_more_than_the_prefetch_in_order(channel: Channel, vhost_connection: Connection) -> None:
    count = 2 * PREFETCH + 10
    publishes = [
        channel.publish(exchange=NAMES.operations, routing_key="0", values={}, body=b"%d" % number)
        for number in range(count)
    ]
    await asyncio.gather(*publishes)
    reader = await LogReader.open(vhost_connection, LOG, -1)
    assert [one.body for one in await take(reader, count)] == [b"%d" % number for number in range(count)]
    reader.close()


async def test_a_deleted_log_is_an_error_after_what_was_received(
    channel: Channel, vhost_connection: Connection
) -> None:
    await append(channel, b"0")
    reader = await LogReader.open(vhost_connection, LOG, 0)
    assert len(await take(reader, 1)) == 1
    await channel.delete_queue(LOG)
    with pytest.raises(ConsumerCancelledError):
        await take(reader, 1)


async def test_a_missing_log_is_an_error(vhost_connection: Connection) -> None:
    with pytest.raises(TargetNotFoundError, match=LOG):
        await LogReader.open(vhost_connection, LOG, 0)
