"""Transfers of schedules on the in-memory broker, with chosen moments of change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

import bide
import bide.testing
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import ConnectionLostError, NoGateAnswerError
from bide.migration import SchedulesTransferred, ScheduleTransfer
from bide.migration.lock import MigrationLock
from bide.migration.schedules import DUE_SOON, IN_FLIGHT
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


async def test_a_run_that_loses_its_lock_begins_no_more_moves(
    b: MemoryBroker, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = clients
    number = 3 * IN_FLIGHT
    await asyncio.gather(*(first.schedule("x", key=f"k{n}", to="mails", delay="1h") for n in range(number)))
    locked: list[Connection] = []
    take = MigrationLock.take

    async def noted(lock: MigrationLock, channel: Channel) -> None:
        assert isinstance(channel.connection, Connection)
        locked.append(channel.connection)
        await take(lock, channel)

    class Losing(ScheduleTransfer):
        async def _add(self, found: WaitingSchedule) -> str:
            locked[0].give_up(ConnectionLostError("the lock was lost"))
            return await super()._add(found)

    monkeypatch.setattr(MigrationLock, "take", noted)
    with pytest.raises(ConnectionLostError, match="the lock was lost"):
        await transferred(b, Losing)
    here, there = await keys(first), await keys(second)
    # The moves that were begun are finished.
    assert (len(here | there), here & there) == (number, set())
    assert 0 < len(there) <= IN_FLIGHT


class _FailingOnce(ScheduleTransfer):
    """A transfer in which one move fails while another one is between its copy and its cancel."""

    def __init__(self, *urls: object) -> None:
        super().__init__(*urls)  # type: ignore[arg-type]  # the same parameters
        self._copied, self._failed = asyncio.Event(), asyncio.Event()

    async def _add(self, found: WaitingSchedule) -> str:
        if found.key == "bad":
            await self._copied.wait()
            self._failed.set()
            raise NoGateAnswerError("no gate has answered", correlation_id="1")
        version = await super()._add(found)
        self._copied.set()
        await self._failed.wait()
        for _ in range(10):  # until the error is seen
            await asyncio.sleep(0)
        return version


async def test_moves_that_were_begun_are_finished_when_another_one_fails(b: MemoryBroker, clients: Clients) -> None:
    first, second = clients
    for key in ("bad", "good"):
        await first.schedule("x", key=key, to="mails", delay="1h")
    with pytest.raises(NoGateAnswerError):
        await transferred(b, _FailingOnce)
    assert (await keys(first), await keys(second)) == ({"bad"}, {"good"})


class _Slow(ScheduleTransfer):
    """A transfer that needs 17 seconds to find that a target exists."""

    b: MemoryBroker

    async def _check_target(self, found: WaitingSchedule) -> None:
        await super()._check_target(found)
        self.b.clock.advance("17s")


@pytest.mark.parametrize("options", [{"delay": "25s"}, {"every": "25s"}], ids=["single", "recurring"])
async def test_a_schedule_that_is_due_soon_when_its_move_begins_is_left(
    b: MemoryBroker, clients: Clients, options: dict[str, str]
) -> None:
    first, second = clients
    await first.schedule("x", key="k", to="mails", **options)  # type: ignore[arg-type]  # options by name
    _Slow.b = b
    done = await transferred(b, _Slow)
    assert (done.moved, done.left, done.waiting) == (0, {}, 1)
    assert (await keys(first), await keys(second)) == ({"k"}, set())


@pytest.mark.parametrize(
    ("every", "before", "is_moved"),
    [
        ("1h", DUE_SOON - timedelta(seconds=1), False),
        ("0 * * * *", DUE_SOON - timedelta(seconds=1), False),
        ("3s", timedelta(seconds=0.9), False),
        ("3s", timedelta(seconds=1.1), True),
        ("* * * * * *", timedelta(seconds=0.5), True),
    ],
)
async def test_recurring_schedules_are_moved_between_two_runs(
    b: MemoryBroker, clients: Clients, every: str, before: timedelta, *, is_moved: bool
) -> None:
    first, _ = clients
    await first.schedule("x", key="k", to="mails", every=every)
    view = await first.scheduled("k")
    assert view is not None
    b.clock.advance_to(view.due_time - before)
    await b.settled()
    assert (await transferred(b)).moved == is_moved


class _Overtaken(ScheduleTransfer):
    """A transfer during which a run falls due between the copy and the cancel, and the queue takes no message."""

    b: MemoryBroker

    async def _add(self, found: WaitingSchedule) -> str:
        version = await super()._add(found)
        self.b.clock.advance("1m")
        await self.b.settled()
        return version


async def test_a_run_that_falls_due_between_copy_and_cancel_is_counted_as_repeated(
    b: MemoryBroker, clients: Clients
) -> None:
    first, second = clients
    full = bide.Queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    for client in (first, second):
        await client.declare(bide.Topology(queues=[full]))
    await first.schedule("x", key="k", to="full", every="1m")
    _Overtaken.b = b
    done = await transferred(b, _Overtaken)
    assert (done.moved, done.repeated, done.ended) == (1, 1, 0)


class _ChangedOnBoth(ScheduleTransfer):
    """A transfer of schedules that end on the first broker after the copy, and whose copies change too."""

    b: MemoryBroker

    async def _add(self, found: WaitingSchedule) -> str:
        version = await super()._add(found)
        if found.key == "delivered":
            self.b.clock.advance("1h")
            await self.b.settled()
            return version
        await self._from.change("cancel", found.key, if_version=None)
        match found.key:
            case "copy moved":
                await self._to.change("move", found.key, if_version=None, delay="2d")
            case "copy delivered":
                await self._to.change("run-now", found.key, if_version=None)
            case "copy cancelled":
                await self._to.change("cancel", found.key, if_version=None)
            case _:
                pass
        return version


async def test_only_what_both_brokers_delivered_is_counted_as_repeated(
    b: MemoryBroker, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = clients
    for key in ("copy moved", "copy delivered", "copy cancelled", "cancelled"):
        await first.schedule("x", key=key, to="mails", delay="3d")
    await first.schedule("x", key="delivered", to="mails", delay="1h")
    _ChangedOnBoth.b = b
    done = await transferred(b, _ChangedOnBoth)
    assert (done.moved, done.ended, done.repeated, done.kept, done.left) == (0, 5, 1, 2, {})
    assert (await keys(first), await keys(second)) == (set(), {"copy moved"})
    reports = [one.getMessage() for one in caplog.records if one.name == "bide.migration.schedules"]
    assert [("'copy moved'" in one, "'copy delivered'" in one) for one in sorted(reports)] == [
        (False, True),
        (True, False),
    ]
