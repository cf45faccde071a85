"""Schedules on the in-memory broker: the gate works by the broker's clock."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import bide
import bide.testing
from bide import ScheduleOutcome
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.client.schedule_requests import ScheduleRequests
from bide.errors import BideError, InvalidInputError, NoGateAnswerError, ScheduleLogError
from bide.gate import partition_session
from bide.gate.delivery_queue import CROWDED
from bide.schedules.names import MAX_RESERVATIONS, ScheduleNames, partition_of
from bide.testing import MemoryBroker
from tests.timeouts import TIMEOUT

RELEASES = [(3, 10), (4, 0), (4, 3)]
MAILS = bide.Topology(queues=[bide.Queue("mails")])


@pytest.fixture(params=RELEASES, ids=str)
def b(request: pytest.FixtureRequest) -> MemoryBroker:
    return bide.testing.broker(release=request.param)


@pytest.fixture
def claims_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that passes over crowded targets costs a pause: a multiple of its real time, on the broker's clock."""
    monkeypatch.setattr(partition_session, "time", SimpleNamespace(monotonic=lambda: 0.0))


async def bodies(client: bide.Client, count: int) -> list[bytes]:
    found = []
    async with asyncio.timeout(TIMEOUT):
        messages = client.consume("mails")
        for _ in range(count):
            message = await anext(messages)
            found.append(message.body)
            await message.ack()
    return found


async def test_what_was_not_cancelled_comes_when_the_clock_gets_there(b: MemoryBroker) -> None:
    async with b.gate(), b.connect() as client:
        await client.declare(MAILS)
        for key in ("paid", "unpaid"):
            await client.schedule(key, key=key, to="mails", delay="3d")
        assert (await client.cancel("paid")).outcome is ScheduleOutcome.CANCELLED
        b.clock.advance("3d")
        assert await bodies(client, 1) == [b"unpaid"]
        await b.settled()
        assert (await client.cancel("unpaid")).outcome is ScheduleOutcome.TOO_LATE
        assert await client.scheduled("unpaid") is None


def received(b: MemoryBroker) -> int:
    """The number of messages that the target has."""
    return b.host().queue("mails").message_count


async def test_nothing_comes_a_moment_before_it_is_due(b: MemoryBroker) -> None:
    async with b.gate(), b.connect() as client:
        await client.declare(MAILS)
        for key in ("kept", "cancelled"):
            await client.schedule(key, key=key, to="mails", delay="3d")
        b.clock.advance(timedelta(days=3) - timedelta(milliseconds=60))
        await b.settled()
        view = await client.scheduled("kept")
        assert view is not None
        assert view.state == "waiting"
        assert (await client.cancel("cancelled")).outcome is ScheduleOutcome.CANCELLED
        # Shortly before the due time, the gate claims the message.
        b.clock.advance(timedelta(milliseconds=59))
        await b.settled()
        assert (await client.cancel("kept")).outcome is ScheduleOutcome.TOO_LATE
        assert received(b) == 0
        b.clock.advance(timedelta(milliseconds=1))
        assert await bodies(client, 1) == [b"kept"]


async def test_what_a_stopped_gate_has_claimed_comes_when_it_is_due(b: MemoryBroker) -> None:
    async with b.connect() as client:
        await client.declare(MAILS)
        async with b.gate():
            await client.schedule("x", key="k", to="mails", delay="3d")
            b.clock.advance(timedelta(days=3) - timedelta(milliseconds=10))
            await b.settled()
            assert (await client.cancel("k")).outcome is ScheduleOutcome.TOO_LATE
        assert received(b) == 0
        async with b.gate():
            await b.settled()
            assert received(b) == 0
            b.clock.advance(timedelta(milliseconds=10))
            assert await bodies(client, 1) == [b"x"]


async def test_a_message_that_is_run_now_does_not_wait_until_it_is_due(b: MemoryBroker) -> None:
    async with b.gate(), b.connect() as client:
        await client.declare(MAILS)
        await client.schedule("x", key="k", to="mails", delay="3d")
        assert (await client.run_now("k")).outcome is ScheduleOutcome.RUNNING
        assert await bodies(client, 1) == [b"x"]


@pytest.mark.usefixtures("claims_take_no_time")
async def test_thousands_that_are_due_soon_can_be_cancelled_and_delay_no_message(b: MemoryBroker) -> None:
    numbers = (f"k{number}" for number in itertools.count())
    keys = list(itertools.islice((one for one in numbers if partition_of(one) == partition_of("other")), 3 * CROWDED))
    async with b.gate(), b.connect(timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(MAILS)
        due = client.now() + timedelta(seconds=10)
        await client.publish_many(bide.OutgoingSchedule(b"x", key=key, to="mails", deliver_at=due) for key in keys)
        b.clock.advance(due - client.now() - timedelta(milliseconds=1))
        await b.settled()
        await client.schedule("other", key="other", to="mails", delay="0s")
        assert await bodies(client, 1) == [b"other"]
        waiting = await client.count_scheduled()
        assert len(keys) - 2 * CROWDED <= waiting < len(keys)
        assert (await client.cancel_scheduled(prefix="")).count == waiting
        b.clock.advance(timedelta(milliseconds=1))
        assert await bodies(client, len(keys) - waiting) == [b"x"] * (len(keys) - waiting)


async def test_run_stops_the_clock_at_each_due_time(b: MemoryBroker) -> None:
    async with b.gate(), b.connect() as client:
        await client.declare(MAILS)
        start, seen = client.now(), list[tuple[timedelta, bytes]]()

        async def receive() -> None:
            async for message in client.consume("mails"):
                seen.append((client.now() - start, message.body))
                await message.ack()

        receiving = asyncio.create_task(receive())
        await client.schedule("once", key="once", to="mails", delay="36h")
        await client.schedule("daily", key="daily", to="mails", every="24h", last_run=start + timedelta(days=2))
        await b.run("7d")
        receiving.cancel()
        hours = [(moment / timedelta(hours=1), body) for moment, body in seen]
        assert hours == [(24, b"daily"), (36, b"once"), (48, b"daily")]


async def test_another_gate_delivers_what_was_due_while_none_was_running(b: MemoryBroker) -> None:
    async with b.connect() as client:
        await client.declare(MAILS)
        async with b.gate():
            await client.schedule("x", key="k", to="mails", delay="1h")
        b.clock.advance("1d")
        async with b.gate():
            assert await bodies(client, 1) == [b"x"]


async def test_a_gate_delivers_to_allowed_targets_only(b: MemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    async with b.gate(allow=["reminders"]), b.connect() as client:
        await client.declare(MAILS)
        await client.schedule("x", key="k", to="mails", delay="1h")
        b.clock.advance("1h")
        async with asyncio.timeout(TIMEOUT):
            message = await anext(client.consume("bide.v1.schedule.undeliverable"))
        assert message.body == b"x"
    moving = "moving a message to 'bide.v1.schedule.undeliverable': the target 'q:mails' matches no allowed pattern"
    assert [one.levelname for one in caplog.records if one.message.startswith(moving)] == ["WARNING"]


async def test_a_gate_with_bad_options_is_refused(b: MemoryBroker) -> None:
    with pytest.raises(InvalidInputError, match="retention"):
        async with b.gate(retention=1):
            pass


def test_clients_that_block_have_schedules_too(b: MemoryBroker) -> None:
    with b.gate(), b.connect_sync() as client:
        client.declare(MAILS)
        client.schedule("x", key="k", to="mails", delay="3d")
        client.schedule("y", key="l", to="mails", delay="3d")
        assert client.cancel("l").outcome is ScheduleOutcome.CANCELLED
        b.clock.advance("3d")
        with client.consume("mails", timeout=timedelta(seconds=TIMEOUT)) as messages:
            assert next(messages).body == b"x"


async def test_room_is_freed_when_a_large_state_has_shrunk(b: MemoryBroker) -> None:
    """A state of more than an eighth of the retention cannot free it."""
    names, partition = ScheduleNames(), partition_of("k")

    async def reservations(channel: Channel) -> int:
        await b.run("15s")
        return (await channel.declare_queue(bide.Queue(names.room(partition)), passive=True)).message_count or 0

    async with b.gate(retention=1_000_000), b.connect() as client:
        await client.declare(MAILS)
        await client.schedule(b"x" * 200_000, key="k", to="mails", delay="3d")
        connection = await Connection.open(b.url)
        async with await connection.channel(confirms=True) as channel:
            for _ in range(MAX_RESERVATIONS // 2 + 1):
                await channel.publish(exchange=names.operations, routing_key=f"room.{partition}", values={}, body=b"")
            assert await reservations(channel) > MAX_RESERVATIONS // 2
            await client.cancel("k")
            assert await reservations(channel) == 0
        await connection.close()


async def test_the_error_of_a_filter_that_ended_in_some_partitions_only_says_what_was_done(b: MemoryBroker) -> None:
    names, key = ScheduleNames(), "paid"
    others = [one for one in (f"k{number}" for number in range(9)) if partition_of(one) != partition_of(key)]
    async with b.gate(), b.connect(declare=False) as client:
        for one in (key, *others):
            await client.schedule("x", key=one, to="mails", delay="3d")
        connection = await Connection.open(b.url)
        async with await connection.channel() as channel:
            number = partition_of(key)
            await channel.unbind(bide.Binding(names.operations, names.log(number), str(number)))
        await connection.close()
        with pytest.raises(BideError) as caught:
            await client.cancel_scheduled(prefix="")
    assert f"7 of 8 partitions answered: cancelled {len(others)} (" in str(caught.value)
    assert all(repr(one) in str(caught.value) for one in others)


async def test_the_error_of_a_filter_says_that_other_partitions_have_recorded_it(b: MemoryBroker) -> None:
    async def append(self: ScheduleRequests, partition: int, *_: object, **__: object) -> None:
        raise ScheduleLogError("no room") if partition == 3 else NoGateAnswerError("recorded")

    async with b.connect() as client:
        with patch.object(ScheduleRequests, "append", append), pytest.raises(ScheduleLogError) as caught:
            await client.cancel_scheduled(prefix="")
    recorded = "7 of 8 partitions have recorded it, and it takes effect there when a gate reads it"
    assert str(caught.value) == f"no room; {recorded}"


# Thousands of schedules; the claims of a gate do not depend on the release, so one of them is enough by default.
@pytest.mark.parametrize(
    "b", [pytest.param(one, marks=[pytest.mark.long] if one != RELEASES[-1] else []) for one in RELEASES], indirect=True
)
@pytest.mark.usefixtures("claims_take_no_time")
async def test_a_target_that_refuses_is_not_claimed_for_without_end_and_holds_up_no_other(b: MemoryBroker) -> None:
    full = bide.Queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
    numbers = (f"k{number}" for number in itertools.count())
    keys = list(itertools.islice((one for one in numbers if partition_of(one) == partition_of("other")), 3 * CROWDED))
    async with b.gate(), b.connect(timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(MAILS | bide.Topology(queues=[full]))
        for first in range(0, len(keys), 500):
            await asyncio.gather(
                *(client.schedule("x", key=key, to="full", delay="10s") for key in keys[first : first + 500])
            )
        await client.schedule("other", key="other", to="mails", delay="15s")
        await b.run("16s")
        assert await bodies(client, 1) == [b"other"]
        # A claim has a thousand, and nothing is claimed while a thousand wait.
        waiting = await client.count_scheduled(to="full")
        assert waiting >= len(keys) - 2 * CROWDED
        assert (await client.cancel_scheduled(to="full")).count == waiting


async def test_the_result_of_scheduling_has_a_due_time_even_beyond_the_year_9999(b: MemoryBroker) -> None:
    """A time within the last millisecond is rounded up, and jitter comes after the last run."""
    async with b.connect() as client:
        single = await client.schedule(key="single", to="mails", deliver_at="9999-12-31T23:59:59.999999Z")
        recurring = await client.schedule(
            key="recurring", to="mails", every="1h", first_run="9999-12-31T23:59:59.999Z", jitter="1d"
        )
        for made in (single, recurring):
            assert made.due_time is not None
            assert made.due_time.year == 9999


@pytest.mark.parametrize("value", [1, "yes"])
async def test_a_list_with_bodies_that_is_not_a_truth_value_is_refused_at_once(b: MemoryBroker, value: Any) -> None:
    """Gates ignore such a question, and the client waited for an answer in vain."""
    async with b.gate(), b.connect() as client:
        with pytest.raises(InvalidInputError, match=f"bodies is {value!r}: give True or False"):
            client.list_scheduled(bodies=value)


@pytest.mark.parametrize("state", ["", 5, None, b"gate"])
def test_a_gate_refuses_a_folder_that_is_none(state: Any) -> None:
    """An empty path would be the current folder: that of a variable that a shell does not know."""
    with pytest.raises(InvalidInputError, match="is not a path"):
        bide.Gate(allow=["*"], state=state)
