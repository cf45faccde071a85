"""Transfers of schedules on the in-memory broker, with chosen moments of change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import bide
import bide.testing
from bide.migration import SchedulesTransferred, ScheduleTransfer
from bide.schedules.entries import ScheduleAnswer, WaitingSchedule
from bide.testing import MemoryBroker

OTHER = "other"
Clients = tuple[bide.Client, bide.Client]


@pytest.fixture
def b() -> MemoryBroker:
    return bide.testing.broker(release=(4, 3))


@pytest.fixture
async def clients(b: MemoryBroker) -> AsyncIterator[Clients]:
    """Clients of two virtual hosts with the same queue, and a gate on each."""
    async with b.gate(), b.gate(vhost=OTHER), b.connect() as first, b.connect(vhost=OTHER) as second:
        for client in (first, second):
            await client.declare(bide.Topology(queues=[bide.Queue("mails")]))
        yield first, second


async def transferred(b: MemoryBroker, kind: type[ScheduleTransfer] = ScheduleTransfer) -> SchedulesTransferred:
    return await kind(b.url, replace(b.url, vhost=OTHER)).run()


async def keys(client: bide.Client) -> set[str]:
    return {one.key async for one in client.list_scheduled()}


class _LateCancel(ScheduleTransfer):
    """The run after one whose cancel takes effect only now, between the copy and the cancel of this run."""

    async def _add(self, found: WaitingSchedule) -> str:
        version = await super()._add(found)
        assert (await self._cancel(found)).outcome == "cancelled"
        return version


class _Asleep(ScheduleTransfer):
    """A transfer on a computer that sleeps before the answer to a cancel comes: the cancel is sent again."""

    b: MemoryBroker

    async def _cancel(self, found: WaitingSchedule) -> ScheduleAnswer:
        assert (await super()._cancel(found)).outcome == "cancelled"
        for _ in range(4):
            self.b.clock.advance("1h")
            await self.b.settled()
        answer = await super()._cancel(found)
        assert answer.outcome == "forgotten"
        return answer


async def test_a_cancel_that_is_repeated_after_hours_loses_no_schedule(b: MemoryBroker, clients: Clients) -> None:
    first, second = clients
    await first.schedule("x", key="k", to="mails", delay="3d")
    _Asleep.b = b
    await transferred(b, _Asleep)
    assert (await keys(first), await keys(second)) == (set(), {"k"})


async def test_the_late_cancel_of_an_earlier_run_loses_no_schedule(b: MemoryBroker, clients: Clients) -> None:
    first, second = clients
    await first.schedule("x", key="single", to="mails", delay="1h")
    await first.schedule("x", key="repeated", to="mails", every="1h")
    done = await transferred(b, _LateCancel)
    assert (await keys(first), await keys(second)) == (set(), {"single", "repeated"})
    assert (done.moved, done.ended, done.repeated, done.left) == (2, 0, 0, {})
