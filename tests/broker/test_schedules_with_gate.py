"""Schedules of a client, with a gate: every operation, its answer, and what is delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

import bide
from bide import ScheduleOutcome
from bide.schedules.names import PARTITIONS
from tests.broker.receiving import eventually, leaping_clock, ready_at, receive
from tests.broker.schedule_log import gating
from tests.leaks import no_leaks
from tests.support import Vhost
from tests.timeouts import TIMEOUT

MONDAY = datetime(2040, 1, 2, tzinfo=UTC)
SOON = timedelta(minutes=10)
"""Long enough to cancel, replace or pause what is due then, on a busy machine too: the clock leaps to that time."""


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A client may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
def leap() -> Iterator[Callable[[timedelta], None]]:
    """A function that sets the clock of clients and gates forward."""
    with leaping_clock(suspends=True) as leap:
        yield leap


@pytest.fixture
async def client(
    vhost: Vhost, tmp_path: Path, quiet: None, leap: Callable[[timedelta], None]
) -> AsyncIterator[bide.Client]:
    """A client, with a target and a gate at work, whose clock does not go back before their end."""
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
        async with gating(vhost.url, tmp_path / "gate"):
            yield client


async def test_a_message_is_delivered_when_it_is_due_as_it_was_given(client: bide.Client) -> None:
    made = await client.schedule(
        json={"amount": 5}, key="invoice:42", to="reminders", delay="1s", headers={"list": [1]}, priority=3, type="late"
    )
    (message,) = await receive(client, "reminders", 1)
    assert made.due_time is not None
    assert datetime.now(UTC) >= made.due_time
    assert message.due == made.due_time
    assert (message.key, message.schedule_id) == ("invoice:42", made.id)
    assert (message.json(), message.headers, message.priority) == ({"amount": 5}, {"list": [1]}, 3)
    assert (message.type, message.content_type) == ("late", "application/json")
    assert message.sent_at is not None


async def test_a_cancelled_message_is_not_delivered(
    client: bide.Client, vhost: Vhost, leap: Callable[[timedelta], None]
) -> None:
    made = await client.schedule(b"cancelled", key="invoice:42", to="reminders", delay=SOON)
    result = await client.cancel("invoice:42")
    assert result == bide.ScheduleResult(key="invoice:42", outcome=ScheduleOutcome.CANCELLED, version=made.version)
    assert (await client.cancel("invoice:42")).outcome is ScheduleOutcome.NOT_FOUND
    leap(SOON)
    # It would have been delivered before this one.
    await client.schedule(b"sent", key="other", to="reminders", delay="1s")
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"sent"]
    assert (await client.cancel("other")).outcome is ScheduleOutcome.TOO_LATE
    assert await ready_at(vhost.url, "reminders") == 0


async def test_the_same_key_replaces_what_waits(client: bide.Client, leap: Callable[[timedelta], None]) -> None:
    await client.schedule(b"old", key="k", to="reminders", delay=SOON)
    await client.schedule(b"new", key="k", to="reminders", delay=SOON + timedelta(seconds=1))
    leap(SOON)
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"new"]


async def test_a_condition_decides_whether_a_schedule_replaces(client: bide.Client) -> None:
    first = await client.schedule(b"first", key="k", to="reminders", deliver_at=MONDAY, if_absent=True)
    assert (first.outcome, first.version) == (ScheduleOutcome.SCHEDULED, first.id)
    second = await client.schedule(b"second", key="k", to="reminders", deliver_at=MONDAY, if_absent=True)
    assert second == bide.Scheduled(
        key="k", id=None, version=first.version, due_time=None, outcome=ScheduleOutcome.EXISTS
    )
    third = await client.schedule(b"third", key="k", to="reminders", deliver_at=MONDAY, if_version=first.version)
    assert third.outcome is ScheduleOutcome.SCHEDULED
    fourth = await client.schedule(b"fourth", key="k", to="reminders", deliver_at=MONDAY, if_version=first.version)
    assert (fourth.outcome, fourth.version) == (ScheduleOutcome.CHANGED, third.version)
    found = await client.scheduled("k")
    assert found is not None
    assert found.body == b"third"


async def test_a_schedule_is_moved_paused_resumed_and_run(
    client: bide.Client, leap: Callable[[timedelta], None]
) -> None:
    made = await client.schedule(b"moved", key="k", to="reminders", deliver_at=MONDAY)
    wrong = await client.reschedule("k", delay="0s", if_version="other-1")
    assert (wrong.outcome, wrong.version) == (ScheduleOutcome.CHANGED, made.version)
    moved = await client.reschedule("k", delay="0s", if_version=made.version)
    assert moved.outcome is ScheduleOutcome.MOVED
    assert moved.version != made.version
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"moved"]

    await client.schedule(b"paused", key="k", to="reminders", delay=SOON)
    assert (await client.pause("k")).outcome is ScheduleOutcome.PAUSED
    found = await client.scheduled("k")
    assert found is not None
    assert found.state == "paused"
    leap(SOON)
    await client.schedule(b"other", key="j", to="reminders", delay="1s")
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"other"]
    assert (await client.resume("k")).outcome is ScheduleOutcome.RESUMED
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"paused"]

    await client.schedule(b"run", key="k", to="reminders", deliver_at=MONDAY)
    assert (await client.run_now("k")).outcome is ScheduleOutcome.RUNNING
    assert [one.body for one in await receive(client, "reminders", 1)] == [b"run"]
    assert {(await one("none")).outcome for one in (client.pause, client.resume, client.run_now, client.cancel)} == {
        ScheduleOutcome.NOT_FOUND
    }


async def test_a_schedule_is_found_by_its_key(client: bide.Client) -> None:
    assert await client.scheduled("k") is None
    made = await client.schedule(
        b"body", key="k", exchange="amq.topic", routing_key="a.b", deliver_at=MONDAY, headers={"list": [1]}
    )
    found = await client.scheduled("k")
    assert found is not None
    assert (found.key, found.id, found.version, found.state) == ("k", made.id, made.version, "waiting")
    assert (found.to, found.exchange, found.routing_key) == (None, "amq.topic", "a.b")
    assert (found.due_time, found.next_runs(3), found.every) == (MONDAY, [MONDAY], None)
    assert (found.body, found.headers["list"]) == (b"body", [1])


async def test_a_message_whose_target_refuses_it_is_under_way(client: bide.Client) -> None:
    full = bide.Queue("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    await client.declare(bide.Topology(queues=[full]))
    await client.publish(b"first", to="full")
    made = await client.schedule(b"second", key="k", to="full", delay="0s")

    async def is_under_way() -> bool:
        found = await client.scheduled("k")
        return found is not None and found.state == "under-way"

    await eventually(is_under_way)
    found = await client.scheduled("k")
    assert found is not None
    assert (found.id, found.version, found.under_way, found.body) == (made.id, None, (made.id,), b"second")
    result = await client.cancel("k")
    assert (result.outcome, result.under_way) == (ScheduleOutcome.TOO_LATE, (made.id,))
    assert [one async for one in client.list_scheduled()] == []
    assert [one.body for one in await receive(client, "full", 2)] == [b"first", b"second"]


async def test_a_recurring_schedule_runs_again_and_again(client: bide.Client) -> None:
    made = await client.schedule(json={}, key="digest", to="mail", every="1s")
    runs = await receive(client, "mail", 3)
    assert len({one.message_id for one in runs}) == 3
    assert {one.schedule_id for one in runs} == {made.id}
    due = [one.due for one in runs if one.due is not None]
    assert [later - earlier for earlier, later in pairwise(due)] == [timedelta(seconds=1)] * 2
    assert due[0] == made.due_time
    assert (await client.cancel("digest")).outcome is ScheduleOutcome.CANCELLED


async def test_a_cron_expression_shows_its_next_runs(client: bide.Client) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    hour = (datetime.now(berlin).hour + 12) % 24  # half a day from now: no regular run is due in this test
    every = f"0 {hour} * * MON-FRI"
    await client.schedule(json={}, key="digest", to="mail", every=every, time_zone=berlin.key)
    found = await client.scheduled("digest")
    assert found is not None
    assert (found.every, found.time_zone) == (every, "Europe/Berlin")
    runs = found.next_runs(10)
    assert len(runs) == 10
    assert runs[0] == found.due_time
    assert runs == sorted(set(runs))
    assert {one.astimezone(berlin).weekday() for one in runs} == {0, 1, 2, 3, 4}
    assert (await client.run_now("digest")).outcome is ScheduleOutcome.RUNNING
    (message,) = await receive(client, "mail", 1)
    assert message.key == "digest"
    after = await client.scheduled("digest")
    assert after is not None
    assert after.due_time == found.due_time


async def test_lists_and_counts_have_what_matches(client: bide.Client) -> None:
    keys = [f"invoice:{number:03}" for number in range(500)]
    due = {key: MONDAY + timedelta(hours=number) for number, key in enumerate(keys)}
    await asyncio.gather(*(client.schedule(key.encode(), key=key, to="reminders", deliver_at=due[key]) for key in keys))
    await client.schedule(b"other", key="other", to="mail", deliver_at=MONDAY)
    assert [one.key async for one in client.list_scheduled()] == [*keys, "other"]
    found = [one async for one in client.list_scheduled(prefix="invoice:0", bodies=True)]
    assert [(one.key, one.body, one.due_time) for one in found] == [(key, key.encode(), due[key]) for key in keys[:100]]
    assert {one.body async for one in client.list_scheduled(to="mail")} == {None}
    some = client.list_scheduled(prefix="invoice:", due_from=due[keys[10]], due_before=due[keys[20]])
    assert [one.key async for one in some] == keys[10:20]
    assert await client.count_scheduled() == 501
    assert await client.count_scheduled(to="mail") == 1
    assert await client.count_scheduled(prefix="none") == 0


async def test_a_filter_cancels_and_moves_all_that_match(client: bide.Client) -> None:
    keys = [f"invoice:{number:03}" for number in range(200)]
    await asyncio.gather(*(client.schedule(key.encode(), key=key, to="reminders", deliver_at=MONDAY) for key in keys))
    await client.schedule(b"other", key="other", to="reminders", deliver_at=MONDAY)
    cancelled = await client.cancel_scheduled(prefix="invoice:1", to="reminders")
    assert (cancelled.outcome, cancelled.count) == (ScheduleOutcome.CANCELLED, 100)
    assert list(cancelled.keys) == keys[100:]
    assert sum(cancelled.partitions.values()) == 100
    assert len(cancelled.partitions) == PARTITIONS
    moved = await client.move_scheduled(prefix="invoice:", delay="0s")
    assert (moved.outcome, moved.count, list(moved.keys)) == (ScheduleOutcome.MOVED, 100, keys[:100])
    bodies = {one.body.decode() for one in await receive(client, "reminders", 100)}
    assert bodies == set(keys[:100])
    assert [one.key async for one in client.list_scheduled()] == ["other"]
    assert (await client.cancel_scheduled(prefix="none")).count == 0


async def test_an_answer_contains_what_was_confirmed_before(client: bide.Client) -> None:
    for number in range(30):
        await client.schedule(key=f"k{number}", to="reminders", deliver_at=MONDAY)
        assert await client.scheduled(f"k{number}") is not None
        assert await client.count_scheduled() == number + 1


async def test_a_large_message_is_delivered_and_shown(client: bide.Client) -> None:
    body = bytes(range(256)) * 20_000
    await client.schedule(body, key="k", to="reminders", delay="1h")
    found = await client.scheduled("k")
    assert found is not None
    assert found.body == body
    await client.run_now("k")
    (message,) = await receive(client, "reminders", 1)
    assert message.body == body


async def test_write_permission_for_the_operations_is_enough(client: bide.Client, vhost: Vhost) -> None:
    vhost.broker.add_user("limited", "secret")
    vhost.broker.set_permissions(vhost.name, "limited", configure="^$", write=r"^bide\.v1\.schedule$", read="^$")
    try:
        url = vhost.broker.vhost_url(vhost.name, user="limited", password="secret")
        async with bide.connect(url) as limited:
            await limited.schedule(b"x", key="k", to="reminders", deliver_at=MONDAY)
            found = await limited.scheduled("k")
            assert found is not None
            assert (await limited.run_now("k", if_version=found.version)).outcome is ScheduleOutcome.RUNNING
        assert [one.body for one in await receive(client, "reminders", 1)] == [b"x"]
    finally:
        vhost.broker.delete_user("limited")


async def test_the_sync_client_does_the_same(client: bide.Client, vhost: Vhost) -> None:
    def work() -> None:
        with bide.connect_sync(vhost.url) as sync:
            made = sync.schedule(b"x", key="k", to="reminders", deliver_at=MONDAY)
            found = sync.scheduled("k")
            assert found is not None
            assert (found.body, found.version) == (b"x", made.version)
            assert sync.reschedule("k", delay="1d").outcome is ScheduleOutcome.MOVED
            assert sync.pause("k").outcome is ScheduleOutcome.PAUSED
            assert sync.resume("k").outcome is ScheduleOutcome.RESUMED
            assert sync.cancel("k").outcome is ScheduleOutcome.CANCELLED
            for number in range(250):
                sync.schedule(key=f"k{number:03}", to="reminders", deliver_at=MONDAY)
            assert [one.key for one in sync.list_scheduled(prefix="k")] == [f"k{number:03}" for number in range(250)]
            assert next(sync.list_scheduled()).key == "k000"
            assert sync.run_now("k249").outcome is ScheduleOutcome.RUNNING
            assert sync.count_scheduled() == 249
            assert sync.move_scheduled(prefix="k0", delay="2d").count == 100
            assert sync.cancel_scheduled(prefix="").count == 249

    await asyncio.to_thread(work)
    assert len(await receive(client, "reminders", 1)) == 1


async def test_an_operation_that_no_gate_answers_is_answered_by_the_next_one(vhost: Vhost, tmp_path: Path) -> None:
    """A gate may be killed between reading an operation and its answer: the client repeats it."""
    async with bide.connect(vhost.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        made = await client.schedule(b"x", key="k", to="reminders", deliver_at=MONDAY)
        cancelling = asyncio.create_task(client.cancel("k", if_version=made.version))
        adding = asyncio.create_task(client.schedule(b"y", key="j", to="reminders", deliver_at=MONDAY, if_absent=True))
        counting = asyncio.create_task(client.count_scheduled())
        done, _ = await asyncio.wait([cancelling, adding, counting], timeout=3)
        assert not done
        async with gating(vhost.url, tmp_path / "gate"):
            assert (await cancelling).outcome is ScheduleOutcome.CANCELLED
            assert (await adding).outcome is ScheduleOutcome.SCHEDULED
            assert await counting in (0, 1, 2)


async def test_gates_that_come_and_go_leave_every_answer_true(vhost: Vhost, tmp_path: Path) -> None:
    """Each schedule is either cancelled or delivered, as the answer said."""
    async with bide.connect(vhost.url, timeout=timedelta(seconds=TIMEOUT)) as client, AsyncExitStack() as stack:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await stack.enter_async_context(gating(vhost.url, tmp_path / "first"))

        async def one(number: int) -> tuple[str, ScheduleOutcome]:
            key = f"k{number}"
            made = await client.schedule(key.encode(), key=key, to="reminders", delay="1500ms")
            assert made.due_time is not None
            aim = made.due_time + timedelta(milliseconds=number % 60 - 30)
            await asyncio.sleep((aim - datetime.now(UTC)).total_seconds())  # to cancel at the due time
            return key, (await client.cancel(key)).outcome

        running = asyncio.gather(*(one(number) for number in range(300)))
        await client.schedule(b"kept", key="kept", to="reminders", delay="1s")
        for number in range(2):
            async with gating(vhost.url, tmp_path / f"gate{number}"):
                await stack.aclose()
                await stack.enter_async_context(gating(vhost.url, tmp_path / f"next{number}"))
        results = await running
        assert {outcome for _, outcome in results} <= {ScheduleOutcome.CANCELLED, ScheduleOutcome.TOO_LATE}
        expected = {"kept", *(key for key, outcome in results if outcome is ScheduleOutcome.TOO_LATE)}
        found = set[str]()
        # By one consumer: a quorum queue of 4.0 drops a message that was returned 20 times.
        async with asyncio.timeout(TIMEOUT), client.consume("reminders") as messages:
            while found != expected:
                message = await anext(messages)
                await message.ack()
                found.add(message.body.decode())
                assert found <= expected
