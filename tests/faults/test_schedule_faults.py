"""Schedules whose connection breaks between the operation and its confirm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.gate.log_reader import LogReader
from bide.schedules.encoding import decode
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule
from tests.faults.conftest import DedicatedBroker
from tests.faults.cutting import Proxy
from tests.support import Vhost, flush_declarations
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()


@pytest.fixture
async def proxy(vhost: Vhost) -> AsyncIterator[Proxy]:
    """A proxy to a broker with the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology())
    async with Proxy(vhost.url) as proxy:
        yield proxy


async def requests(url: str, partition: int, keys: set[str]) -> list[tuple[str, str]]:
    """Keys and ids of the schedules in a partition, up to the last of these keys."""
    connection = await Connection.open(BrokerUrl.parse(url))
    reader = await LogReader.open(connection, NAMES.log(partition), 0)
    found: list[tuple[str, str]] = []
    async with asyncio.timeout(TIMEOUT):
        while not keys <= {key for key, _ in found}:
            records = [decode(one.body) for one in await reader.batch()]
            found += [(one.key, str(one.request)) for one in records if isinstance(one, AddSchedule)]
    await connection.close()
    return found


async def test_a_schedule_whose_confirm_is_lost_is_recorded_again_under_its_id(vhost: Vhost, proxy: Proxy) -> None:
    async with bide.connect(proxy.url) as client:
        first = await client.schedule(key="k", to="q", delay="1d")
        proxy.deaf = True
        scheduling = asyncio.create_task(client.schedule(key="k", to="q", delay="1d"))
        while len(before := await requests(vhost.url, partition_of("k"), {"k"})) < 2:
            pass
        proxy.deaf = False
        proxy.cut()
        made = await scheduling
    assert before[:2] == [("k", first.id), ("k", made.id)]
    while len(await requests(vhost.url, partition_of("k"), {"k"})) < 3:
        pass


@pytest.mark.parametrize("seed", range(3))
async def test_connections_that_break_lose_no_schedule_and_none_gets_two_ids(
    vhost: Vhost, proxy: Proxy, seed: int
) -> None:
    dice = random.Random(seed)
    keys = [f"k{number}" for number in range(300)]
    async with bide.connect(proxy.url, timeout="300s") as client:
        made = []
        while keys:
            part = [keys.pop() for _ in range(min(30, len(keys)))]
            proxy.cut_after = dice.randrange(30_000)
            made += await asyncio.gather(
                *(client.schedule(bytes(dice.randrange(2000)), key=key, to="q", delay="1d") for key in part)
            )
    assert proxy.cuts > 3
    ids = {one.key: str(one.id) for one in made}
    for partition in range(PARTITIONS):
        mine = {key for key in ids if partition_of(key) == partition}
        assert set(await requests(vhost.url, partition, mine)) == {(key, ids[key]) for key in mine}


async def test_a_bulk_publish_goes_on_when_the_broker_was_killed(dedicated: DedicatedBroker) -> None:
    broker = dedicated.broker

    async def items() -> AsyncIterator[bide.OutgoingSchedule]:
        for number in range(2_000):
            if number == 1_000:
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.restart)
            yield bide.OutgoingSchedule(b"x", key=f"k{number}", to="q", delay="1d")

    async with bide.connect(broker.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(NAMES.topology())
        await asyncio.to_thread(flush_declarations, broker)
        results = [one async for one in client.publish_many(items())]
    assert [one.error for one in results] == [None] * 2_000
    ids = {f"k{one.position}": str(one.schedule_id) for one in results}
    for partition in range(PARTITIONS):
        mine = {key for key in ids if partition_of(key) == partition}
        assert set(await requests(broker.url, partition, mine)) == {(key, ids[key]) for key in mine}
