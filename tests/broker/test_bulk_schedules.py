"""Schedules in a bulk publish: the log, the deliveries, and the result of each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.errors import BulkInDoubtError, BulkPublishError, InvalidInputError, NotAppliedError, ScheduleLogError
from bide.gate.log_reader import LogReader
from bide.schedules.encoding import decode
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule
from bide.topology import Binding, Queue, Topology
from tests.broker.receiving import receive
from tests.broker.schedule_log import gating
from tests.faults.cutting import Proxy
from tests.leaks import no_leaks
from tests.support import Vhost
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
LATER = datetime(2040, 1, 2, tzinfo=UTC)


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A bulk publish may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


def schedules(number: int) -> list[bide.OutgoingSchedule]:
    return [bide.OutgoingSchedule(b"%d" % one, key=f"k{one}", to="q", deliver_at=LATER) for one in range(number)]


async def recorded(url: str, ids: dict[str, str]) -> dict[str, list[str]]:
    """The ids in the log of each key, repeated ones included, up to the last of these ids."""
    connection = await Connection.open(BrokerUrl.parse(url))
    found: dict[str, list[str]] = {}
    async with asyncio.timeout(TIMEOUT):
        for partition in range(PARTITIONS):
            missing = {one for key, one in ids.items() if partition_of(key) == partition}
            reader = await LogReader.open(connection, NAMES.log(partition), 0)
            while missing:
                for one in [decode(one.body) for one in await reader.batch()]:
                    assert isinstance(one, AddSchedule)
                    found.setdefault(one.key, []).append(str(one.request))
                    missing.discard(str(one.request))
            reader.close()
    await connection.close()
    return found


async def results_of(client: bide.Client, items: object) -> list[bide.PublishResult]:
    found = [one async for one in client.publish_many(items)]  # type: ignore[arg-type]  # several kinds of items
    found.sort(key=lambda one: one.position)
    assert [one.position for one in found] == list(range(len(found)))
    return found


async def test_schedules_and_messages_go_together(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue("q")]))
        items = [
            bide.OutgoingMessage(b"now", to="q"),
            bide.OutgoingSchedule(b"keyed", key="a", to="q", delay="1s", message_id="mine", headers={"n": [1]}),
            bide.OutgoingMessage(b"delayed", to="q", delay="1s"),
            bide.OutgoingSchedule(json={}, key="b", to="q", every="1h"),
        ]
        async with gating(vhost.url, tmp_path / "gate"):
            results = await results_of(client, items)
            assert [one.status for one in results] == ["confirmed"] * 4
            assert [one.attempts for one in results] == [1] * 4
            assert [one.message for one in results] == items
            received = {one.body: one for one in await receive(client, "q", 3)}
            waiting = await client.scheduled("b")
        keyed = received[b"keyed"]
        assert set(received) == {b"now", b"delayed", b"keyed"}
        assert (keyed.key, keyed.schedule_id, keyed.message_id) == ("a", results[1].schedule_id, "mine")
        assert (keyed.due, keyed.headers) == (results[1].due, {"n": [1]})
        assert results[1].message_id == "mine"
        assert waiting is not None
        assert (waiting.version, waiting.due_time) == (results[3].schedule_id, results[3].due)
        assert (results[0].schedule_id, results[2].schedule_id) == (None, None)


async def test_the_last_schedule_of_a_key_decides(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        items = [
            # A small one must not take the room that a large one before it waits for.
            bide.OutgoingSchedule(bytes(5_000 * (1 - one % 2)), key=f"k{one // 4}", to="q", deliver_at=LATER)
            for one in range(4_000)
        ]
        results = await results_of(client, items)
        last = {one.message.key: one.schedule_id for one in results if isinstance(one.message, bide.OutgoingSchedule)}
        assert {one.key: one.version async for one in client.list_scheduled()} == last


async def test_each_item_that_cannot_be_scheduled_is_a_result(vhost: Vhost) -> None:
    good = bide.OutgoingSchedule(b"x", key="good", to="q", delay="1d")
    items = [
        bide.OutgoingSchedule(b"x", key="", to="q", delay="1d"),
        bide.OutgoingSchedule(b"x", key="k", to="q"),
        bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d", if_absent=True),
        bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d", if_version="v"),
        bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d", headers={"x": object()}),
        bide.OutgoingSchedule(b"x", key="k", to="q", delay="1d", headers={"x": "x" * 130_000}),
        good,
        "k",
    ]
    async with bide.connect(vhost.url) as client:
        results = await results_of(client, items)
        assert [one.status for one in results] == ["invalid"] * 6 + ["confirmed", "invalid"]
        assert all(isinstance(one.error, InvalidInputError) for one in results if one.message is not good)
        assert "client.schedule()" in str(results[2].error)
        assert await recorded(vhost.url, {"good": str(results[6].schedule_id)}) == {
            "good": [str(results[6].schedule_id)]
        }
        with pytest.raises(BulkPublishError) as raised:
            await client.publish_many(items)  # type: ignore[arg-type]  # several kinds of items
        assert (raised.value.report.confirmed, raised.value.report.invalid) == (1, 7)


async def test_invalid_schedules_between_valid_ones_leave_few_gaps_in_a_session(vhost: Vhost) -> None:
    """A gate ignores a session with more than 1,000 ranges of numbers."""
    invalid = bide.OutgoingSchedule(key="k0", to="q", deliver_at=LATER, headers={"x": object()})
    items = [one for number in range(1_500) for one in (*schedules(1), invalid)]
    async with bide.connect(vhost.url) as client:
        results = await results_of(client, items)
    used = Counter(str(one.schedule_id).split("-")[0] for one in results if one.schedule_id)
    assert used.total() == 1_500
    assert max(used.values()) <= 200


async def test_parts_of_the_log_that_were_deleted_are_declared_again(
    vhost: Vhost, vhost_connection: Connection
) -> None:
    channel = await vhost_connection.channel()
    async with bide.connect(vhost.url) as client:
        await client.publish_many(schedules(100))
        await channel.unbind(Binding(NAMES.operations, NAMES.log(1), "1"))
        await client.publish_many(schedules(100))
        for number in range(PARTITIONS):
            await channel.delete_queue(NAMES.room(number))
        results = await results_of(client, schedules(5_000))
        await channel.delete_exchange(NAMES.operations)
        results = await results_of(client, schedules(100))
        assert {one.status for one in results} == {"confirmed"}
    ids = {f"k{one.position}": str(one.schedule_id) for one in results}
    found = await recorded(vhost.url, ids)
    assert all(found[key][-1] == one for key, one in ids.items())


async def test_a_missing_log_ends_the_publish_where_it_may_not_be_declared(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, declare=False) as client:
        with pytest.raises(NotAppliedError, match="start a gate"):
            await client.publish_many(schedules(10))


async def test_a_full_log_refuses_what_it_has_no_room_for(vhost: Vhost, vhost_connection: Connection) -> None:
    partition = partition_of("k0")
    room = NAMES.room(partition)
    topology = NAMES.topology()
    (full,) = (one for one in topology.queues if one.name == room)
    small = Queue(room, arguments={**full.arguments, "x-max-length": 2})
    rest = [one for one in topology.queues if one.name != room]
    items = [bide.OutgoingSchedule(bytes(30_000), key="k0", to="q", deliver_at=LATER) for _ in range(20)]
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(topology.exchanges, [*rest, small], topology.bindings))
        results = await results_of(client, [*items, bide.OutgoingMessage(b"x", to=NAMES.undeliverable)])
        accepted = [one.status for one in results[:-1]].count("confirmed")
        assert 4 <= accepted <= 12
        assert {type(one.error) for one in results[accepted:-1]} == {ScheduleLogError}
        assert results[-1].status == "confirmed"
        await (await vhost_connection.channel()).purge_queue(room)
        assert (await client.publish_many(items[:4])).confirmed == 4


@pytest.mark.parametrize("seed", range(3))
async def test_connections_that_break_lose_no_schedule_and_none_gets_two_ids(vhost: Vhost, seed: int) -> None:
    dice = random.Random(seed)
    async with Proxy(vhost.url) as proxy, bide.connect(proxy.url, timeout="300s") as client:
        results = await results_of(client, schedules(1))

        proxy.cut_after = dice.randrange(50_000)
        proxy.next_cut = lambda: dice.randrange(50_000) if proxy.cuts < 8 else None
        results = await results_of(client, schedules(3_000))
        assert proxy.cuts > 3
    assert {one.status for one in results} == {"confirmed"}
    ids = {f"k{one.position}": str(one.schedule_id) for one in results}
    found = await recorded(vhost.url, ids)
    assert {key: set(all_ids) for key, all_ids in found.items() if key != "k0"} == {
        key: {one} for key, one in ids.items() if key != "k0"
    }


async def test_schedules_in_doubt_are_listed_and_can_be_sent_again(vhost: Vhost, tmp_path: Path) -> None:
    async with Proxy(vhost.url) as proxy, bide.connect(proxy.url, on_lost="raise") as client:
        await client.publish_many(schedules(1))
        proxy.cut_after = 40_000
        with pytest.raises(BulkInDoubtError) as raised:
            await client.publish_many(schedules(1_000))
        error = raised.value
        assert error.in_doubt
        confirmed = 0 if error.report is None else error.report.confirmed
        assert confirmed + len(error.in_doubt) + len(error.unsent) <= 1_000
        again = [one.again() for one in (*error.in_doubt, *error.unsent)]
        rest = schedules(1_000)[confirmed + len(again) :]
        await client.publish_many([*again, *rest])
        async with gating(vhost.url, tmp_path / "gate"):
            assert await client.count_scheduled() == 1_000


async def test_the_publisher_without_an_event_loop_takes_schedules(vhost: Vhost) -> None:
    def publish() -> bide.PublishSummary:
        with bide.BulkPublisher(vhost.url) as publisher:
            return publisher.publish_many(schedules(3_000))

    assert (await asyncio.to_thread(publish)).confirmed == 3_000
