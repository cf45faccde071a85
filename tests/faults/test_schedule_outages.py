"""Schedules that are cancelled when due, while the broker is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import bide
from bide import ScheduleOutcome
from bide.schedules.names import ScheduleNames
from tests.broker.schedule_log import gating
from tests.faults.conftest import DedicatedBroker
from tests.support import flush_declarations
from tests.timeouts import TIMEOUT

COUNT = 400
QUEUE = "reminders"
TOPOLOGY = bide.Topology(queues=[bide.Queue.quorum(QUEUE)])


async def cancel_when_due(client: bide.Client, faults: Sequence[Callable[[], object]]) -> None:
    """Cancel each message at its due time, cause the faults meanwhile, and compare the answers with what arrives."""
    slots, done = asyncio.Semaphore(20), 0
    changed = asyncio.Condition()

    async def one(number: int) -> tuple[str, ScheduleOutcome]:
        nonlocal done
        key = f"k{number}"
        async with slots:
            made = await client.schedule(key, key=key, to=QUEUE, delay="300ms")
            assert made.due_time is not None
            aim = made.due_time + timedelta(milliseconds=number % 60 - 30)
            await asyncio.sleep((aim - datetime.now(UTC)).total_seconds())
            outcome = (await client.cancel(key)).outcome
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
            await cancel_when_due(client, [kill] * 3)
