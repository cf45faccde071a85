"""Schedules that are moved from one broker to another, with gates on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import bide
from bide.errors import InvalidInputError, MigrationRunningError, NotAppliedError
from bide.migration import ScheduleTransfer
from bide.migration.lock import MigrationLock
from bide.schedules.entries import WaitingSchedule
from bide.schedules.names import ScheduleNames
from tests.broker.receiving import connected, receive
from tests.broker.schedule_log import gating
from tests.support import Vhost

FAR = datetime(2040, 1, 2, tzinfo=UTC)
TARGETS = bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")])


@pytest.fixture
async def clients(vhost: Vhost, other_vhost: Vhost, tmp_path: Path) -> AsyncIterator[tuple[bide.Client, bide.Client]]:
    """Clients of two virtual hosts with the same targets, and a gate on each."""
    async with bide.connect(vhost.url) as first, bide.connect(other_vhost.url) as second:
        for client in (first, second):
            await client.declare(TARGETS)
        async with gating(vhost.url, tmp_path / "first"), gating(other_vhost.url, tmp_path / "second"):
            yield first, second


async def test_schedules_wait_on_the_other_broker_as_they_were(
    clients: tuple[bide.Client, bide.Client], vhost: Vhost, other_vhost: Vhost
) -> None:
    first, second = clients
    headers = {"list": [1, {"a": b"\xff"}]}
    await first.schedule(
        b"\x00\xff", key="single", to="reminders", deliver_at=FAR, headers=headers, message_id="m-1", priority=3
    )
    await first.schedule(b"x", key="exchange", exchange="amq.topic", routing_key="a.b", deliver_at=FAR)
    # No run comes during the test, but for a few seconds of a year.
    await first.schedule(
        json={}, key="digest", to="mail", every="0 8 1 JAN *", time_zone="Europe/Berlin", catch_up="all"
    )
    await first.schedule(b"x", key="paused", to="reminders", delay="1h")
    await first.pause("paused")
    await first.schedule(b"x", key="moved", to="reminders", delay="1h")
    await first.reschedule("moved", deliver_at=FAR + timedelta(days=1))
    before = {one.key: one async for one in first.list_scheduled(bodies=True)}
    assert len(before) == 5

    done = await ScheduleTransfer(vhost.url, other_vhost.url).run()
    assert (done.moved, done.ended, done.repeated, done.left, done.waiting) == (5, 0, 0, {}, 0)
    assert done.is_finished
    assert await first.count_scheduled() == 0
    after = {one.key: one async for one in second.list_scheduled(bodies=True)}
    assert {key: _lasting(one) for key, one in after.items()} == {key: _lasting(one) for key, one in before.items()}
    assert after["digest"].next_runs(3) == before["digest"].next_runs(3)
    assert after["paused"].state == "paused"

    # What was moved can be changed and delivered there.
    assert (await second.resume("paused")).outcome is bide.ScheduleOutcome.RESUMED
    resumed = await second.scheduled("paused")
    assert resumed is not None
    assert (resumed.state, resumed.due_time) == ("waiting", before["paused"].due_time)
    assert (await second.run_now("single")).outcome is bide.ScheduleOutcome.RUNNING
    soon = datetime.now(UTC) + timedelta(seconds=2)
    assert (await second.reschedule("paused", deliver_at=soon)).outcome is bide.ScheduleOutcome.MOVED
    messages = {one.key: one for one in await receive(second, "reminders", 2)}
    single, paused = messages["single"], messages["paused"]
    assert (single.body, single.headers, single.message_id, single.priority) == (b"\x00\xff", headers, "m-1", 3)
    assert paused.received_at >= soon


def _lasting(view: bide.ScheduleView) -> tuple[object, ...]:
    """What a transfer keeps: all but the id and the version."""
    recurrence = None if view.recurrence is None else dict(view.recurrence)
    target = (view.to, view.exchange, view.routing_key)
    return view.due_time, view.nominal_time, view.state, target, recurrence, view.body, dict(view.properties)


async def test_schedules_that_cannot_be_moved_are_left_with_the_reason(
    clients: tuple[bide.Client, bide.Client], vhost: Vhost, other_vhost: Vhost
) -> None:
    first, second = clients
    await first.declare(bide.Topology(queues=[bide.Queue.quorum("only here")]))
    await first.schedule(b"x", key="no target", to="only here", deliver_at=FAR)
    await first.schedule(b"x", key="no exchange", exchange="none", deliver_at=FAR)
    await first.schedule(b"old", key="taken", to="mail", deliver_at=FAR)
    await first.schedule(b"x", key="good", to="mail", deliver_at=FAR)
    await second.schedule(b"new", key="taken", to="mail", deliver_at=FAR)
    await first.schedule(b"soon", key="due soon", to="reminders", delay="3s")

    done = await ScheduleTransfer(vhost.url, other_vhost.url).run()
    assert (done.moved, done.left.total()) == (1, 3)
    reasons = " ".join(done.left)
    for part in ("the queue 'only here' does not exist", "the exchange 'none' does not exist", "under this key"):
        assert part in reasons
    # The gate of the first broker delivers what was due soon.
    assert [one.body for one in await receive(first, "reminders", 1)] == [b"soon"]
    assert [one.key async for one in first.list_scheduled()] == ["no exchange", "no target", "taken"]
    assert [one.key async for one in second.list_scheduled()] == ["good", "taken"]
    found = await second.scheduled("taken")
    assert found is not None
    assert found.body == b"new"

    # What the reasons suggest helps.
    await second.cancel("taken")
    await second.declare(bide.Topology([bide.Exchange("none")], [bide.Queue.quorum("only here")]))
    done = await ScheduleTransfer(vhost.url, other_vhost.url).run()
    assert (done.moved, done.left, done.waiting) == (3, {}, 0)


class _Interrupted(ScheduleTransfer):
    """A transfer that ends when the copies are stored, as one does that is killed at that moment."""

    async def _move(self, found: WaitingSchedule) -> None:
        await self._add(found)


async def test_a_transfer_that_ended_between_copy_and_cancel_is_finished_without_duplicates(
    clients: tuple[bide.Client, bide.Client], vhost: Vhost, other_vhost: Vhost
) -> None:
    first, second = clients
    for key in ("waiting", "paused", "cancelled there"):
        await first.schedule(b"x", key=key, to="mail", deliver_at=FAR)
    await first.pause("paused")
    await _Interrupted(vhost.url, other_vhost.url).run()
    assert (await first.count_scheduled(), await second.count_scheduled()) == (3, 3)
    # A copy that is cancelled meanwhile does not come back.
    await second.cancel("cancelled there")
    done = await ScheduleTransfer(vhost.url, other_vhost.url).run()
    assert (done.moved, done.left, done.waiting) == (3, {}, 0)
    assert await first.count_scheduled() == 0
    states = {one.key: (one.state, one.due_time) async for one in second.list_scheduled()}
    assert states == {"waiting": ("waiting", FAR), "paused": ("paused", FAR)}


class _Racing(ScheduleTransfer):
    """A transfer of schedules that their application changes while they are copied."""

    async def _add(self, found: WaitingSchedule) -> str:
        version = await super()._add(found)
        if found.key == "cancelled":
            await self._from.change("cancel", found.key, if_version=None)
        elif found.due == 1000 * FAR.timestamp():
            await self._from.change("move", found.key, if_version=None, deliver_at=FAR + timedelta(days=1))
        return version


async def test_schedules_that_are_changed_meanwhile_are_taken_back_from_the_other_broker(
    clients: tuple[bide.Client, bide.Client], vhost: Vhost, other_vhost: Vhost
) -> None:
    first, second = clients
    await first.schedule(b"x", key="cancelled", to="mail", deliver_at=FAR)
    await first.schedule(b"x", key="moved", to="mail", deliver_at=FAR)
    done = await _Racing(vhost.url, other_vhost.url).run()
    assert (done.moved, done.ended, done.repeated, done.waiting) == (1, 2, 0, 0)
    assert await first.count_scheduled() == 0
    (found,) = [one async for one in second.list_scheduled()]
    assert (found.key, found.due_time) == ("moved", FAR + timedelta(days=1))


async def test_schedules_that_go_back_wait_again(
    clients: tuple[bide.Client, bide.Client], vhost: Vhost, other_vhost: Vhost
) -> None:
    first, _ = clients
    await first.schedule(b"x", key="k", to="mail", deliver_at=FAR)
    for source, target in ((vhost, other_vhost), (other_vhost, vhost), (vhost, other_vhost), (other_vhost, vhost)):
        assert (await ScheduleTransfer(source.url, target.url).run()).moved == 1
    found = await first.scheduled("k")
    assert found is not None
    assert found.due_time == FAR


async def test_a_second_transfer_and_the_same_virtual_host_are_refused(vhost: Vhost, other_vhost: Vhost) -> None:
    with pytest.raises(NotAppliedError):
        await ScheduleTransfer(vhost.url, other_vhost.url).run()
    with pytest.raises(InvalidInputError, match="both URLs lead to"):
        await ScheduleTransfer(vhost.url, vhost.url).run()
    async with connected(vhost.url) as connection:
        await MigrationLock(ScheduleNames().operations, "the schedules").take(await connection.channel())
        with pytest.raises(MigrationRunningError, match="runs on this virtual host already"):
            await ScheduleTransfer(vhost.url, other_vhost.url).run()
