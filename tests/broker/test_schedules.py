"""Schedules of a client, without a gate: what stands in the log, and the errors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.client.schedule_requests import MAX_LOST
from bide.durations import to_milliseconds
from bide.errors import (
    AccessRefusedError,
    BrokerUnreachableError,
    InvalidDueTimeError,
    InvalidInputError,
    MessageTooLargeError,
    NoGateAnswerError,
    NotAppliedError,
    PublishError,
    ScheduleLogError,
)
from bide.gate.log_reader import LogReader
from bide.local_broker import LocalBroker
from bide.schedules.encoding import RESERVE, decode
from bide.schedules.names import PARTITIONS, RECORD_OVERHEAD, RESERVATION_BYTES, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule, ChangeSchedule, ScheduleFilter, ScheduleRecord
from bide.schedules.recurrence import Recurrence
from bide.topology import Binding, Queue, Topology
from tests.broker.conftest import limit_messages
from tests.broker.receiving import connected, ready
from tests.readme import read
from tests.support import Vhost
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()


@pytest.fixture
async def log(vhost: Vhost) -> Vhost:
    """A virtual host with the schedule log."""
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology())
    return vhost


async def records(connection: Connection, partition: int, count: int) -> list[ScheduleRecord]:
    """The first records of a partition."""
    reader = await LogReader.open(connection, NAMES.log(partition), 0)
    found: list[ScheduleRecord] = []
    async with asyncio.timeout(TIMEOUT):
        while len(found) < count:
            batch = await reader.batch()
            assert all(one.exchange == NAMES.operations for one in batch)
            found += [decode(one.body) for one in batch]
    reader.close()
    return found


async def distinct(connection: Connection, partition: int, count: int) -> list[ScheduleRecord]:
    """The first records of a partition, without repeated ones."""
    reader = await LogReader.open(connection, NAMES.log(partition), 0)
    found: list[ScheduleRecord] = []
    async with asyncio.timeout(TIMEOUT):
        while len(found) < count:
            for record in [decode(one.body) for one in await reader.batch()]:
                # A batch may have a record and its repetition.
                if record not in found:
                    found.append(record)
    reader.close()
    return found


async def appended(connection: Connection, key: str, count: int = 1) -> list[ScheduleRecord]:
    """The first records of the partition of a key."""
    return await records(connection, partition_of(key), count)


async def test_a_schedule_is_recorded_as_it_was_given(vhost: Vhost, vhost_connection: Connection) -> None:
    before = datetime.now(UTC)
    async with bide.connect(vhost.url) as client:
        made = await client.schedule(
            json={"amount": 5}, key="invoice:42", to="reminders", delay="3d", headers={"list": [1]}, priority=3
        )
    after = datetime.now(UTC)
    (record,) = await appended(vhost_connection, "invoice:42")
    assert isinstance(record, AddSchedule)
    assert (record.key, record.target, record.routing_key) == ("invoice:42", "q:reminders", "")
    assert made == bide.Scheduled(
        key="invoice:42", id=str(record.request), version=str(record.request), due_time=made.due_time
    )
    assert made.due_time is not None
    assert before + timedelta(days=3) <= made.due_time <= after + timedelta(days=3, milliseconds=1)
    assert record.due == record.nominal == to_milliseconds(made.due_time)
    assert record.message.body == b'{"amount":5}'
    values = record.message.values
    assert values["content_type"] == "application/json"
    assert values["priority"] == 3
    assert values["headers"]["list"] == [1]
    assert (record.if_absent, record.if_version, record.recurrence) == (False, None, None)


async def test_a_recurring_schedule_names_its_first_run(vhost: Vhost, vhost_connection: Connection) -> None:
    before = to_milliseconds(datetime.now(UTC))
    async with bide.connect(vhost.url) as client:
        made = await client.schedule(
            key="digest",
            exchange="mails",
            routing_key="digest",
            every="0 8 * * MON-FRI",
            time_zone="Europe/Berlin",
            jitter="10m",
        )
    (record,) = await appended(vhost_connection, "digest")
    assert isinstance(record, AddSchedule)
    assert record.recurrence is not None
    recurrence = Recurrence.parse(record.recurrence)
    assert (recurrence.cron, recurrence.time_zone, recurrence.jitter) == ("0 8 * * MON-FRI", "Europe/Berlin", 600_000)
    # The run at the time of the call, even if that was just before eight.
    assert record.nominal in (recurrence.after(before), recurrence.after(to_milliseconds(datetime.now(UTC))))
    assert record.due == recurrence.due(str(record.request), record.nominal)
    assert made.due_time is not None
    assert to_milliseconds(made.due_time) == record.due
    assert (record.target, record.routing_key) == ("x:mails", "digest")


async def test_requests_of_a_client_are_numbered_in_each_partition(vhost: Vhost, vhost_connection: Connection) -> None:
    keys = [f"invoice:{number}" for number in range(40)]
    async with bide.connect(vhost.url) as client:
        await asyncio.gather(*(client.schedule(key=key, to="q", delay="1d") for key in keys))
    sessions = set()
    for partition in range(PARTITIONS):
        count = sum(partition_of(key) == partition for key in keys)
        found = await records(vhost_connection, partition, count)
        requests = [one.request for one in found if isinstance(one, AddSchedule)]
        assert {one.number for one in requests} == set(range(1, count + 1))
        (session,) = {one.session for one in requests}
        sessions.add(session)
    assert len(sessions) == PARTITIONS


async def test_a_session_ends_when_many_of_its_numbers_were_lost(log: Vhost, vhost_connection: Connection) -> None:
    async with bide.connect(log.url) as client:
        for lost in (0, MAX_LOST - 1, 1):
            for _ in range(lost):
                # It has a number before it turns out that it cannot be encoded.
                refusal = await _refusal(client.schedule(key="k", to="q", delay="1d", headers={"x": object()}))
                assert isinstance(refusal, InvalidInputError)
            await client.schedule(key="k", to="q", delay="1d")
    found = [one.request for one in await appended(vhost_connection, "k", 3) if isinstance(one, AddSchedule)]
    assert [one.number for one in found] == [1, MAX_LOST + 1, 1]
    assert len({one.session for one in found}) == 2


async def unanswered(url: str, operation: Callable[[bide.Client], Awaitable[object]]) -> str:
    """The error of an operation or a question that no gate answers within 6 s.

    It is tried again if a busy broker does not even accept it in that time.
    """
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                async with bide.connect(url, timeout="6s") as client:
                    await operation(client)
            except NoGateAnswerError as error:
                return str(error)
            except (PublishError, BrokerUnreachableError):
                continue
            pytest.fail("something has answered")


async def test_an_operation_without_a_gate_is_recorded_and_says_so(log: Vhost) -> None:
    error = await unanswered(log.url, lambda client: client.cancel("k"))
    assert re.search(r"cancelling 'k' is recorded.*takes effect when a gate reads it", error)


async def test_an_operation_without_a_gate_is_repeated_under_its_id(log: Vhost, vhost_connection: Connection) -> None:
    async with bide.connect(log.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        cancelling = asyncio.create_task(client.cancel("k"))
        try:
            first, second = (await appended(vhost_connection, "k", 2))[:2]
        finally:
            cancelling.cancel()
            await asyncio.wait([cancelling])
    assert isinstance(first, ChangeSchedule)
    assert first == second


async def test_every_operation_is_recorded(log: Vhost, vhost_connection: Connection) -> None:
    monday = datetime(2030, 1, 7, tzinfo=UTC)
    async with bide.connect(log.url) as client:
        operations: list[Coroutine[Any, Any, object]] = [
            client.schedule(b"x", key="k", to="q", deliver_at=monday, if_absent=True),
            client.schedule(b"x", key="k", to="q", deliver_at=monday, if_version="a-1"),
            client.reschedule("k", deliver_at=monday, if_version="a-1"),
            client.cancel("k", if_version="a-1"),
            client.pause("k"),
            client.resume("k"),
            client.run_now("k"),
        ]
        found: list[ScheduleRecord] = []
        for one in operations:
            # It waits for the answer of a gate, so each is stopped when its record is in the log.
            task = asyncio.create_task(one)
            found = await distinct(vhost_connection, partition_of("k"), len(found) + 1)
            task.cancel()
            await asyncio.wait([task])
    absent, version, move, cancel, pause, resume, run = found
    assert isinstance(absent, AddSchedule)
    assert isinstance(version, AddSchedule)
    assert absent.if_absent
    assert version.if_version == "a-1"
    changes = [one for one in (move, cancel, pause, resume, run) if isinstance(one, ChangeSchedule)]
    assert [one.action for one in changes] == ["move", "cancel", "pause", "resume", "run-now"]
    assert [one.if_version for one in changes] == ["a-1", "a-1", None, None, None]
    assert changes[0].due == to_milliseconds(monday)
    assert changes[3].at is not None


async def test_a_filter_is_one_record_in_each_partition(log: Vhost, vhost_connection: Connection) -> None:
    friday = datetime(2030, 1, 4, tzinfo=UTC)
    found: list[list[ScheduleRecord]] = []
    async with bide.connect(log.url) as client:
        for count, operation in enumerate(
            (
                client.cancel_scheduled(prefix="invoice:", to="reminders", due_before=friday),
                client.move_scheduled(prefix="invoice:", deliver_at=friday),
            )
        ):
            task = asyncio.create_task(operation)
            found = [await distinct(vhost_connection, partition, count + 1) for partition in range(PARTITIONS)]
            task.cancel()
            await asyncio.wait([task])
    chosen = ScheduleFilter(prefix="invoice:", target="q:reminders", due_before=to_milliseconds(friday))
    for cancel, move in found:
        assert isinstance(cancel, ChangeSchedule)
        assert isinstance(move, ChangeSchedule)
        assert (cancel.action, cancel.filter) == ("cancel", chosen)
        assert (move.action, move.due) == ("move", to_milliseconds(friday))


async def test_a_question_without_a_gate_is_an_error(log: Vhost) -> None:
    questions: list[Callable[[bide.Client], Awaitable[object]]] = [
        lambda client: client.scheduled("k"),
        lambda client: client.count_scheduled(),
        lambda client: anext(client.list_scheduled()),
    ]
    errors = await asyncio.gather(*(unanswered(log.url, one) for one in questions))
    assert all("no gate has answered" in one for one in errors)


async def test_a_client_warns_without_a_gate(vhost: Vhost, caplog: pytest.LogCaptureFixture) -> None:
    async with bide.connect(vhost.url) as client:
        with caplog.at_level(logging.WARNING, "bide"):
            for _ in range(3):
                await client.schedule(key="k", to="q", delay="1d")
    (warning,) = caplog.records
    assert warning.message.startswith("no gate reads the queue bide.v1.schedule.")


async def test_headers_that_leave_no_room_for_those_of_a_gate_are_refused(
    vhost: Vhost, vhost_connection: Connection
) -> None:
    async with bide.connect(vhost.url) as client:
        with pytest.raises(InvalidInputError, match="put large values into the body"):
            await client.schedule(key="k", to="q", delay="1d", headers={"x": "y" * 128_000})
        await client.schedule(b"valid", key="k", to="q", delay="1d")
    (record,) = await appended(vhost_connection, "k")
    assert isinstance(record, AddSchedule)
    assert record.message.body == b"valid"


async def test_an_invalid_operation_is_refused_before_the_broker_is_asked() -> None:
    client = bide.connect("amqp://localhost:1")._client
    with pytest.raises(InvalidInputError):
        await client.cancel("")
    with pytest.raises(InvalidInputError):
        await client.reschedule("k")
    with pytest.raises(InvalidInputError, match="no condition"):
        await client.cancel_scheduled()
    with pytest.raises(InvalidInputError, match="two targets"):
        client.list_scheduled(to="q", exchange="x")
    with pytest.raises(InvalidDueTimeError):
        client.list_scheduled(due_before="2030-01-01")


async def test_a_missing_log_is_an_error_where_it_may_not_be_declared(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, declare=False) as client:
        with pytest.raises(NotAppliedError, match="schedule log"):
            await client.schedule(key="k", to="q", delay="1d")
    async with bide.connect(vhost.url) as client:
        await client.schedule(key="k", to="q", delay="1d")
    async with bide.connect(vhost.url, declare=False) as client:
        await client.schedule(key="k", to="q", delay="1d")


async def test_a_log_that_was_deleted_is_declared_again(vhost: Vhost, vhost_connection: Connection) -> None:
    channel = await vhost_connection.channel()
    async with bide.connect(vhost.url) as client:
        await client.schedule(key="k", to="q", delay="1d")
        await channel.unbind(Binding(NAMES.operations, NAMES.log(partition_of("k")), str(partition_of("k"))))
        await client.schedule(key="k", to="q", delay="2d")
        await channel.delete_queue(NAMES.room(partition_of("k")))
        await client.schedule(bytes(70_000), key="k", to="q", delay="3d")
        await channel.delete_exchange(NAMES.operations)
        await client.schedule(key="k", to="q", delay="4d")
    found = await appended(vhost_connection, "k", 4)
    assert len({one.request for one in found if isinstance(one, AddSchedule)}) == 4


async def test_a_full_log_refuses_and_asks_for_a_gate(vhost: Vhost, vhost_connection: Connection) -> None:
    partition = partition_of("k")
    async with bide.connect(vhost.url) as client:
        topology = NAMES.topology()
        small = Queue(
            NAMES.room(partition), arguments={**_arguments(topology, NAMES.room(partition)), "x-max-length": 2}
        )
        rest = [one for one in topology.queues if one.name != small.name]
        await client.declare(Topology(topology.exchanges, [*rest, small], topology.bindings))
        results = [await _refusal(client.schedule(bytes(30_000), key="k", to="q", delay="1d")) for _ in range(20)]
        # The queue may take a reservation or two more than its limit.
        accepted = results.count(None)
        assert 4 <= accepted <= 12
        assert results[:accepted] == [None] * accepted
        assert {type(one) for one in results[accepted:]} == {ScheduleLogError}
        assert "start a gate" in str(results[-1])
        channel = await vhost_connection.channel()
        await channel.purge_queue(small.name)
        await client.schedule(bytes(30_000), key="k", to="q", delay="1d")


async def test_small_records_take_room_for_what_the_broker_adds_to_them(
    vhost: Vhost, vhost_connection: Connection
) -> None:
    count, smallest = 1000, 100
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology())
        await asyncio.gather(*(client.schedule(b"", key="k", to="q", delay="1d") for _ in range(count)))
    reserved = await ready(vhost_connection, NAMES.room(partition_of("k")))
    assert reserved * RESERVATION_BYTES >= count * (smallest + RECORD_OVERHEAD)


async def _refusal(operation: Awaitable[object]) -> Exception | None:
    try:
        await operation
    except bide.BideError as error:
        return error
    return None


def _arguments(topology: Topology, name: str) -> dict[str, Any]:
    (found,) = (one for one in topology.queues if one.name == name)
    return dict(found.arguments)


async def test_a_large_message_is_recorded(vhost: Vhost, vhost_connection: Connection) -> None:
    body = bytes(range(256)) * 20_000
    async with bide.connect(vhost.url) as client:
        await client.schedule(body, key="k", to="q", delay="1d")
    (record,) = await appended(vhost_connection, "k")
    assert isinstance(record, AddSchedule)
    assert record.message.body == body


def test_the_sync_client_has_the_same_methods(vhost: Vhost) -> None:
    with bide.connect_sync(vhost.url) as client:
        client.declare(NAMES.topology())
        made = client.schedule(b"x", key="k", to="q", delay="1d")
        assert made.outcome is bide.ScheduleOutcome.SCHEDULED
    with bide.connect_sync(vhost.url, timeout="4s") as client:
        with pytest.raises(NoGateAnswerError):
            client.cancel("k")
        with pytest.raises(NoGateAnswerError):
            list(client.list_scheduled())
        with pytest.raises(InvalidInputError):
            client.list_scheduled(to="q", exchange="x")


@pytest.fixture
def small_messages_only(broker: LocalBroker) -> Iterator[int]:
    """A limit of 300,000 bytes for messages, which is taken back after the test."""
    limit = 300_000
    usual = limit_messages(broker, limit)
    yield limit
    limit_messages(broker, usual)


async def test_a_message_over_the_limit_is_refused_and_holds_up_no_other(
    vhost: Vhost, small_messages_only: int
) -> None:
    async with bide.connect(vhost.url) as client:
        sizes = [small_messages_only - RESERVE + 1, 10, small_messages_only - RESERVE - 1000, 500_000]
        operations = (
            client.schedule(bytes(size), key="k", to="q", deliver_at=datetime(2030, 1, 1, tzinfo=UTC)) for size in sizes
        )
        too_large, small, fits, far_too_large = await asyncio.gather(*map(_refusal, operations))
        assert isinstance(too_large, MessageTooLargeError)
        assert isinstance(far_too_large, MessageTooLargeError)
        assert (small, fits) == (None, None)
        again = await _refusal(client.schedule(bytes(400_000), key="k", to="q", delay="1d"))
        assert isinstance(again, MessageTooLargeError)
    async with connected(vhost.url) as connection:
        found = await distinct(connection, partition_of("k"), 2)
    assert {len(one.message.body) for one in found if isinstance(one, AddSchedule)} == {sizes[1], sizes[2]}


@pytest.mark.parametrize(("write", "error"), [("^$", AccessRefusedError), (r"^bide\.v1\.schedule$", None)])
async def test_a_user_without_permissions_is_refused(
    log: Vhost, broker: LocalBroker, write: str, error: type[Exception] | None
) -> None:
    broker.add_user("limited", "secret")
    broker.set_permissions(log.name, "limited", configure="^$", write=write, read="^$")
    try:
        async with bide.connect(broker.vhost_url(log.name, user="limited", password="secret")) as client:
            refusal = await _refusal(client.schedule(key="k", to="q", delay="1d"))
            assert type(refusal) is (type(None) if error is None else error)
    finally:
        broker.delete_user("limited")


async def test_write_permission_is_enough_for_the_warning(
    log: Vhost, broker: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The permission of docs/schedules.md; RabbitMQ 4.2.6 and 4.3.0 required another one."""
    write = r"^bide\.v1\.schedule(\.[0-7]\.queries)?$"
    assert f"`{write}`" in read("docs/schedules.md")
    broker.add_user("limited", "secret")
    broker.set_permissions(log.name, "limited", configure="^$", write=write, read="^$")
    try:
        async with bide.connect(broker.vhost_url(log.name, user="limited", password="secret")) as client:
            with caplog.at_level(logging.WARNING, "bide"):
                await client.schedule(key="k", to="q", delay="1d")
        (warning,) = caplog.records
        assert warning.message.startswith("no gate reads the queue bide.v1.schedule.")
    finally:
        broker.delete_user("limited")


async def test_a_user_who_may_not_declare_the_log_is_asked_for_a_gate(vhost: Vhost, broker: LocalBroker) -> None:
    broker.add_user("limited", "secret")
    broker.set_permissions(vhost.name, "limited", configure="^$")
    try:
        async with bide.connect(broker.vhost_url(vhost.name, user="limited", password="secret")) as client:
            with pytest.raises(NotAppliedError, match=r"may not declare it.*start a gate"):
                await client.schedule(key="k", to="q", delay="1d")
    finally:
        broker.delete_user("limited")
