"""Warnings of clients that schedule without a gate, by the clock of the in-memory broker."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

import bide
import bide.testing
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.client.gate_check import CHECK_EVERY
from bide.errors import AccessRefusedError
from bide.schedules.names import ScheduleNames, partition_of
from bide.testing import MemoryBroker

QUEUE = ScheduleNames().queries(partition_of("k"))
MINUTE = timedelta(seconds=CHECK_EVERY + 1)
ALMOST_A_MINUTE = timedelta(seconds=CHECK_EVERY - 1)


@pytest.fixture
def b(caplog: pytest.LogCaptureFixture) -> MemoryBroker:
    caplog.set_level(logging.WARNING, "bide")
    return bide.testing.broker()


async def warnings(client: bide.Client, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings when something is scheduled."""
    caplog.clear()
    await client.schedule(key="k", to="q", delay="1d")
    return [one.getMessage() for one in caplog.records]


def names_the_queue(found: list[str]) -> bool:
    return len(found) == 1 and found[0].startswith(f"no gate reads the queue {QUEUE}: ")


async def test_each_time_that_gates_are_gone_there_is_one_warning(
    b: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with b.connect() as client:
        assert names_the_queue(await warnings(client, caplog))
        for _ in range(2):
            b.clock.advance(MINUTE)
            assert await warnings(client, caplog) == []
            async with b.gate():
                await b.settled()
                b.clock.advance(MINUTE)
                # Gates let go of their partitions when the clock jumps, and take them again.
                await b.settled()
                assert await warnings(client, caplog) == []
            b.clock.advance(MINUTE)
            assert names_the_queue(await warnings(client, caplog))


async def test_a_client_checks_once_in_a_minute(b: MemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with b.connect() as client:
        async with b.gate():
            await b.settled()
            assert await warnings(client, caplog) == []
        b.clock.advance(ALMOST_A_MINUTE)
        assert await warnings(client, caplog) == []
        b.clock.advance(MINUTE - ALMOST_A_MINUTE)
        assert names_the_queue(await warnings(client, caplog))


async def test_a_bulk_publish_checks_too(b: MemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with b.connect() as client:
        await client.publish_many([bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d")])
        assert names_the_queue([one.getMessage() for one in caplog.records])


async def test_a_deleted_queue_fails_no_publish(b: MemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    names = ScheduleNames()
    connection = await Connection.open(b.url)
    async with await connection.channel() as channel, b.connect() as client:
        await client.declare(names.topology())
        await channel.delete_queue(QUEUE)
        async with b.connect(declare=False) as other:
            await other.publish_many([bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d")])
        assert names_the_queue([one.getMessage() for one in caplog.records])
    await connection.close()


async def test_a_client_that_may_not_check_says_so_once(b: MemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    declare, refused = Channel.declare_queue, list[str]()

    async def refuse(queue: bide.Queue) -> Any:
        refused.append(queue.name)
        raise AccessRefusedError(f"access to the queue {queue.name!r} was refused")

    def limited(self: Channel, queue: bide.Queue, *, passive: bool = False) -> Any:
        # The in-memory broker has no permissions.
        return refuse(queue) if queue.name == QUEUE and passive else declare(self, queue, passive=passive)

    async with b.connect() as client:
        await client.declare(ScheduleNames().topology())
        with patch.object(Channel, "declare_queue", limited):
            (warning,) = await warnings(client, caplog)
            assert f"write permission for the queue {QUEUE} " in warning
            found = len(refused)
            b.clock.advance(MINUTE)
            assert await warnings(client, caplog) == []
            assert len(refused) == found
