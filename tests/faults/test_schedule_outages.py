"""Schedules while brokers are killed and the leaders of streams change."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

import bide
from bide import ScheduleOutcome
from bide.local_broker import LocalCluster
from bide.schedules.encoding import decode
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule
from tests.broker.schedule_log import gating, read_log
from tests.faults.cluster import cluster
from tests.faults.conftest import DedicatedBroker
from tests.support import Rabbitmq, flush_declarations
from tests.timeouts import TIMEOUT

COUNT = 400
QUEUE = "reminders"
TOPOLOGY = bide.Topology(queues=[bide.Queue.quorum(QUEUE)])


async def cancel_when_due(client: bide.Client, url: str, faults: Sequence[Callable[[], object]]) -> None:
    """Cancel each message at its due time, cause the faults meanwhile, and compare the answers with what arrives."""
    slots, done, shift = asyncio.Semaphore(20), 0, 0
    changed = asyncio.Condition()

    async def one(number: int) -> tuple[str, ScheduleOutcome]:
        nonlocal done, shift
        key = f"k{number}"
        async with slots:
            made = await client.schedule(key, key=key, to=QUEUE, delay="300ms")
            assert made.due_time is not None
            aim = made.due_time + timedelta(milliseconds=number % 60 - 30 + shift)
            await asyncio.sleep((aim - datetime.now(UTC)).total_seconds())  # to cancel at the due time
            outcome = (await client.cancel(key)).outcome
            # On a busy machine, cancels or deliveries take longer: aim so that some are in time and some are not.
            shift += 5 if outcome is ScheduleOutcome.CANCELLED else -5
        async with changed:
            done += 1
            changed.notify_all()
        return key, outcome

    running = asyncio.gather(*(one(number) for number in range(COUNT)))
    for place, fault in enumerate(faults, 1):
        async with changed:
            while done < COUNT * place // (len(faults) + 1):
                await changed.wait()
        await asyncio.to_thread(fault)
    results = await running
    for key in [key for key, outcome in results if outcome is ScheduleOutcome.NOT_FOUND]:
        log = [one for one in await read_log(url, partition_of(key)) if f'"{key}"'.encode() in one.body]
        pytest.fail(
            f"the schedule {key} was confirmed, and is not found. The log has {log}: {[one.body for one in log]}"
        )
    assert set(Counter(outcome for _, outcome in results)) == {ScheduleOutcome.CANCELLED, ScheduleOutcome.TOO_LATE}
    expected = {key for key, outcome in results if outcome is ScheduleOutcome.TOO_LATE}
    await client.schedule("last", key="last", to=QUEUE, delay="0s")
    found = set[str]()
    async with asyncio.timeout(TIMEOUT), client.consume(QUEUE) as messages:
        while not found >= {*expected, "last"}:
            message = await anext(messages)
            await message.ack()
            found.add(message.body.decode())
    assert found == {*expected, "last"}


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_broker_that_is_killed_three_times_leaves_every_answer_true(
    dedicated: DedicatedBroker, tmp_path: Path
) -> None:
    broker = dedicated.broker

    def kill() -> None:
        broker.kill()
        broker.restart()

    async with bide.connect(broker.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(TOPOLOGY)
        async with gating(broker.url, tmp_path / "gate"), gating(broker.url, tmp_path / "other"):
            await client.declare(ScheduleNames().topology())
            await asyncio.to_thread(flush_declarations, broker)
            await cancel_when_due(client, broker.url, [kill] * 3)


@pytest.fixture(scope="module")
def three_nodes(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    with cluster(rabbitmq) as three_nodes:
        yield three_nodes


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_leaders_that_change_leave_every_answer_true(three_nodes: LocalCluster, tmp_path: Path) -> None:
    """Each node is killed once, and with it the leaders of the streams and queues that it has."""

    def kill(number: int) -> None:
        node = three_nodes.nodes[number]
        node.kill()
        node.restart()

    url = three_nodes.url
    async with bide.connect(url, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(TOPOLOGY)
        async with gating(url, tmp_path / "gate"), gating(url, tmp_path / "other"):
            await cancel_when_due(client, url, [partial(kill, number) for number in range(3)])


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_schedules_that_are_confirmed_while_leaders_change_are_in_the_log(three_nodes: LocalCluster) -> None:
    """RabbitMQ below 4.0.1 may confirm messages without storing them; see :class:`ScheduleChannel`."""
    confirmed, stopping = set[str](), asyncio.Event()
    changed = asyncio.Condition()

    async def confirm(key: str) -> None:
        async with changed:
            confirmed.add(key)
            changed.notify_all()

    async def schedule_singly(client: bide.Client, name: str) -> None:
        for number in itertools.count():
            if stopping.is_set():
                return
            key = f"{name}-{number}"
            await client.schedule(key, key=key, to=QUEUE, delay="1h")
            await confirm(key)
            await asyncio.sleep(0.02)  # a steady stream of schedules

    async def many() -> AsyncIterator[bide.OutgoingSchedule]:
        for number in itertools.count():
            if stopping.is_set():
                return
            yield bide.OutgoingSchedule("", key=f"many-{number}", to=QUEUE, delay="1h")
            await asyncio.sleep(0.01)  # a steady stream of schedules

    async def schedule_many(client: bide.Client) -> None:
        async for result in client.publish_many(many()):
            assert result.error is None
            assert isinstance(result.message, bide.OutgoingSchedule)
            await confirm(result.message.key)

    async def is_confirmed(count: int) -> None:
        async with changed:
            await changed.wait_for(lambda: len(confirmed) >= count)

    first, second, third = three_nodes.nodes
    timeout = timedelta(seconds=TIMEOUT)
    async with bide.connect(second.url, timeout=timeout) as client, asyncio.TaskGroup() as tasks:
        await client.declare(TOPOLOGY)
        for number in range(5):
            tasks.create_task(schedule_singly(client, f"one-{number}"))
        tasks.create_task(schedule_many(client))
        for node in (first, third):
            await is_confirmed(len(confirmed) + COUNT)
            # What is sent to leaders on this node now is in flight when another node gets to lead.
            await asyncio.to_thread(node.pause)
            await asyncio.sleep(1)  # for records on their way
            await asyncio.to_thread(node.kill)
            await is_confirmed(len(confirmed) + COUNT)
            await asyncio.to_thread(node.restart)
        stopping.set()
    logs = [await read_log(second.url, partition) for partition in range(PARTITIONS)]
    records = [decode(one.body) for log in logs for one in log if one.exchange == ScheduleNames().operations]
    stored = {one.key for one in records if isinstance(one, AddSchedule)}
    assert confirmed - stored == set()
