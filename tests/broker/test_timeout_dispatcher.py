"""The timeout manager of an endpoint, on real databases and a real broker."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pymysql import OperationalError
from pymysql.constants.ER import LOCK_DEADLOCK

import bide
from bide.delay.nservicebus import format_timestamp
from bide.errors import InvalidInputError, TimeoutStoreError
from bide.timeouts import TimeoutDispatcher
from bide.timeouts.database import Database
from bide.timeouts.dispatcher import BATCH
from bide.timeouts.due_rows import DueRows
from bide.timeouts.tables import StoredTimeout, find_tables, stored_timeout
from bide.topology import Queue, Topology
from tests.broker.receiving import connected, eventually, receive
from tests.databases import DatabaseServer
from tests.polling import wait_until
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost
from tests.timeouts import TIMEOUT

INFRASTRUCTURE = bide.NServiceBus(routing="direct")


@pytest.fixture
def store(database_server: DatabaseServer) -> Store:
    """A database with the timeouts of one endpoint."""
    store = Store(database_server, database_server.new_database())
    store.create("Dispatched")
    return store


async def test_due_timeouts_and_those_of_legacy_senders_arrive_and_others_stay(vhost: Vhost, store: Store) -> None:
    name = "Dispatched"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        await client.declare(Topology(queues=[Queue(f"{name}.Timeouts")]))
        (overdue,) = store.add(name, (name, later(minutes=-5), {"a": "b"}, b"overdue"))
        due = later(seconds=8)
        (stored,) = store.add(name, (name, due, {}, b"stored"))
        (future,) = store.add(name, (name, later(hours=1), {}, b"future"))
        (odd,) = store.add(name, ("Gone", later(minutes=-5), {}, b"x"))
        saga = str(uuid.uuid4())
        (of_saga,) = store.add(name, (name, later(hours=1), {}, b"of a saga"))
        store.server.execute(
            store.url,
            store.statement(f'UPDATE "DispatchedTimeoutData" SET "SagaId" = \'{saga}\' WHERE "Id" = \'{of_saga}\''),
        )
        headers = {
            "NServiceBus.Timeout.Expire": format_timestamp(due),
            "NServiceBus.Timeout.RouteExpiredTimeoutTo": name,
            "NServiceBus.MessageId": "legacy",
        }
        await client.publish(b"legacy", to=f"{name}.Timeouts", headers=headers, message_id="legacy")
        await client.publish(b"no headers", to=f"{name}.Timeouts")
        clear = {"NServiceBus.ClearTimeouts": "True", "NServiceBus.SagaId": saga}
        await client.publish(b"", to=f"{name}.Timeouts", headers=clear)
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        arrived = await receive(client, name, 1)
        # What the endpoint itself delays meanwhile is not stored.
        own = await client.publish(b"own", to=name, delay="3s")
        assert store.stored(name) <= {overdue, stored, future, odd, of_saga}
        arrived += await receive(client, name, 3)
        found = {one.body: one for one in arrived}
        assert set(found) == {b"overdue", b"stored", b"legacy", b"own"}
        assert own.due is not None
        assert found[b"own"].received_at >= own.due
        assert "x-death" in found[b"own"].raw.values["headers"]
        assert found[b"overdue"].headers["a"] == "b"
        assert found[b"stored"].received_at >= due
        assert found[b"legacy"].received_at >= due
        assert found[b"legacy"].message_id == "legacy"
        assert not [one for one in found[b"legacy"].headers if one.startswith("NServiceBus.Timeout.")]

        async def is_done() -> bool:
            return store.stored(name) == {future, odd} and bool(dispatcher.done.set_aside)

        await eventually(is_done)
        dispatcher.stop()
        done = await running
        assert (done.sent, done.delayed, done.cleared, done.set_aside) == (2, 1, 1, 1)
        # A dispatcher tries again after a minute, which a slow machine may take.
        assert done.left >= 1
        (aside,) = await receive(client, dispatcher.set_aside, 1)
        assert aside.body == b"no headers"


async def test_a_legacy_sender_reaches_only_allowed_targets(vhost: Vhost, store: Store) -> None:
    """The dispatcher sends with its own permissions, and a header names the target."""
    name = "Dispatched"
    level = INFRASTRUCTURE.waiting_queues()[-1].name
    async with endpoints(vhost, INFRASTRUCTURE, name, "Salaries") as client:
        await client.declare(Topology(queues=[Queue(f"{name}.Timeouts")]))
        (of_table,) = store.add(name, ("Salaries", later(minutes=-5), {}, b"from the table"))
        for place in ("Salaries", level, name):
            headers = {
                "NServiceBus.Timeout.Expire": format_timestamp(later(minutes=-5)),
                "NServiceBus.Timeout.RouteExpiredTimeoutTo": place,
                "mine": "kept",
            }
            await client.publish(
                place.encode(), to=f"{name}.Timeouts", headers=headers, message_id=place, type="A", app_id="legacy"
            )
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=[name, "nsb.*"])
        running = asyncio.create_task(dispatcher.run())
        (arrived,) = await receive(client, name, 1)
        assert (arrived.message_id, arrived.type, arrived.app_id) == (name, "A", "legacy")

        async def is_done() -> bool:
            return bool(dispatcher.done.left) and dispatcher.done.set_aside == 2

        await eventually(is_done)
        dispatcher.stop()
        await running
        assert store.stored(name) == {of_table}
        aside = {one.message_id: one for one in await receive(client, dispatcher.set_aside, 2)}
    reasons = {place: one.raw.values["headers"]["bide-set-aside"] for place, one in aside.items()}
    assert "matches no allowed pattern" in reasons["Salaries"]
    assert "belongs to a delay infrastructure" in reasons[level]
    # Set aside with everything that it had, so that it can be sent later.
    for one in aside.values():
        assert (one.type, one.app_id, one.headers["mine"]) == ("A", "legacy", "kept")


async def test_a_full_target_does_not_stop_the_dispatcher(vhost: Vhost, store: Store) -> None:
    name = "Dispatched"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        full = Queue("full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
        await client.declare(Topology(queues=[Queue(f"{name}.Timeouts"), full]))
        for place in ("full", name):
            headers = {
                "NServiceBus.Timeout.Expire": format_timestamp(later(minutes=-5)),
                "NServiceBus.Timeout.RouteExpiredTimeoutTo": place,
            }
            await client.publish(b"", to=f"{name}.Timeouts", headers=headers, message_id=place)
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        (arrived,) = await receive(client, name, 1)
        await eventually(lambda: client.exists(dispatcher.set_aside))
        (aside,) = await receive(client, dispatcher.set_aside, 1)
        dispatcher.stop()
        done = await running
    assert (arrived.message_id, aside.message_id, done.set_aside) == (name, "full", 1)


@pytest.mark.parametrize("count", [1, BATCH])
async def test_headers_that_fill_a_frame_do_not_stop_the_dispatcher(vhost: Vhost, store: Store, count: int) -> None:
    """They leave no room for the reason. Unacknowledged, as many as the prefetch would keep all others away."""
    name, queue = "Dispatched", "Dispatched.Timeouts"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        await client.declare(Topology(queues=[Queue(queue)]))
        headers = {
            "NServiceBus.Timeout.Expire": format_timestamp(later(minutes=-5)),
            "NServiceBus.Timeout.RouteExpiredTimeoutTo": name,
        }
        async with connected(vhost.url) as connection, await connection.channel(confirms=True) as channel:
            full = {"headers": {"h": "x" * 131_027}, "expiration": "9999999"}
            for _ in range(count):
                await channel.publish(exchange="", routing_key=queue, values={**full}, body=b"full")
        await client.publish(b"good", to=queue, headers=headers)
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        (message,) = await receive(client, name, 1)
        assert message.body == b"good"
        await eventually(lambda: client.exists(dispatcher.set_aside))
        aside = await receive(client, dispatcher.set_aside, count)
        dispatcher.stop()
        assert (await running).set_aside == count
    assert {(one.body, one.headers["h"]) for one in aside} == {(b"full", "x" * 131_027)}


async def test_a_reason_is_shortened_to_the_room_in_the_frame(vhost: Vhost, store: Store) -> None:
    name, queue = "Dispatched", "Dispatched.Timeouts"
    saga = "no id " * 50
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        await client.declare(Topology(queues=[Queue(queue)]))
        clear = {"NServiceBus.ClearTimeouts": "True", "NServiceBus.SagaId": saga, "h": "x" * 130_300}
        async with connected(vhost.url) as connection, await connection.channel(confirms=True) as channel:
            await channel.publish(exchange="", routing_key=queue, values={"headers": clear}, body=b"")
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        await eventually(lambda: client.exists(dispatcher.set_aside))
        (aside,) = await receive(client, dispatcher.set_aside, 1)
        dispatcher.stop()
        await running
    reason = aside.raw.values["headers"]["bide-set-aside"]
    assert reason.startswith("the header NServiceBus.SagaId is 'no id no id")
    assert len(reason) == 100


@pytest.mark.parametrize("blank", ["", " "])
async def test_a_message_with_a_blank_id_is_sent_or_set_aside(vhost: Vhost, store: Store, blank: str) -> None:
    """NServiceBus refuses such an id."""
    name, queue = "Dispatched", "Dispatched.Timeouts"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        await client.declare(Topology(queues=[Queue(queue)]))
        due = {"NServiceBus.Timeout.Expire": format_timestamp(later(minutes=-5))}
        timeout = {**due, "NServiceBus.Timeout.RouteExpiredTimeoutTo": name}
        async with connected(vhost.url) as connection, await connection.channel(confirms=True) as channel:
            for headers in (timeout, {**timeout, "NServiceBus.MessageId": blank}, due):
                values = {"headers": headers, "message_id": blank}
                await channel.publish(exchange="", routing_key=queue, values=values, body=b"")
            values = {"headers": {**timeout, "NServiceBus.MessageId": "own"}, "message_id": blank}
            await channel.publish(exchange="", routing_key=queue, values=values, body=b"")
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        arrived = await receive(client, name, 3)
        await eventually(lambda: client.exists(dispatcher.set_aside))
        (aside,) = await receive(client, dispatcher.set_aside, 1)
        dispatcher.stop()
        await running
    ids = {str(one.message_id) for one in arrived}
    assert ids == {one.headers["NServiceBus.MessageId"] for one in arrived}
    assert len(ids) == 3
    assert "own" in ids
    assert all(one.strip() for one in ids)
    # It waits as it was sent.
    assert aside.raw.values["message_id"] == blank
    assert aside.headers == due


async def test_one_warning_is_logged_for_all_timeouts_with_the_same_reason(
    vhost: Vhost, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    name = "Dispatched"
    async with endpoints(vhost, INFRASTRUCTURE, name):
        store.add(name, *[(to, later(minutes=-5), {}, b"x") for to in ("Salaries", "Billing") for _ in range(5)])
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=[name])
        running = asyncio.create_task(dispatcher.run())

        async def is_left() -> bool:
            return dispatcher.done.left == 10

        await eventually(is_left)
        dispatcher.stop()
        await running
    warnings = [one.getMessage() for one in caplog.records if one.name == "bide.timeouts.dispatcher"]
    assert len(warnings) == 2
    assert {to for to in ("Salaries", "Billing") for one in warnings if f"'q:{to}'" in one} == {"Salaries", "Billing"}


async def test_all_tables_of_the_endpoint_are_dispatched(vhost: Vhost, store: Store) -> None:
    """An endpoint whose table prefix was changed has two."""
    store.create("Dispatched_")
    saga = str(uuid.uuid4())
    async with endpoints(vhost, INFRASTRUCTURE, "Dispatched") as client:
        for name in ("Dispatched", "Dispatched_"):
            store.add(name, ("Dispatched", later(minutes=-5), {}, name.encode()))
            (of_saga,) = store.add(name, ("Dispatched", later(hours=1), {}, b"of a saga"))
            store.server.execute(
                store.url,
                store.statement(f'UPDATE "{name}TimeoutData" SET "SagaId" = \'{saga}\' WHERE "Id" = \'{of_saga}\''),
            )
        await client.declare(Topology(queues=[Queue("Dispatched.Timeouts")]))
        clear = {"NServiceBus.ClearTimeouts": "True", "NServiceBus.SagaId": saga}
        await client.publish(b"", to="Dispatched.Timeouts", headers=clear)
        dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, "Dispatched", allow=["*"])
        running = asyncio.create_task(dispatcher.run())
        assert {one.body for one in await receive(client, "Dispatched", 2)} == {b"Dispatched", b"Dispatched_"}

        async def is_empty() -> bool:
            return not store.stored("Dispatched") and not store.stored("Dispatched_")

        await eventually(is_empty)
        dispatcher.stop()
        await running


async def test_the_name_of_a_table_is_refused_where_the_queue_has_dots(vhost: Vhost, store: Store) -> None:
    store.create("Sales_Orders")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales.Orders") as client:
        await client.declare(Topology(queues=[Queue("Sales.Orders.Timeouts")]))
        with pytest.raises(InvalidInputError, match=r"'Sales\.Orders\.Timeouts' exists"):
            await TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, "Sales_Orders", allow=["*"]).run()


async def test_without_a_queue_of_legacy_senders_one_connection_is_enough(vhost: Vhost, store: Store) -> None:
    name = "Dispatched"
    store.add(name, (name, later(minutes=-5), {}, b"due"))
    async with endpoints(vhost, INFRASTRUCTURE, name):
        pass  # its connections are closed again
    dispatcher = TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=[name])
    running = asyncio.create_task(dispatcher.run())

    async def is_sent() -> bool:
        return not store.stored(name)

    async def is_alone() -> bool:
        found = await asyncio.to_thread(vhost.broker.rabbitmqctl, "list_connections", "vhost")
        return found.split().count(vhost.name) == 1

    await eventually(is_sent)
    await eventually(is_alone)
    dispatcher.stop()
    await running


async def test_several_dispatchers_share_the_work_and_send_nothing_twice(vhost: Vhost, store: Store) -> None:
    number, more, name = 0, 3000, "Dispatched"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        dispatchers = [
            TimeoutDispatcher(store.url, vhost.url, INFRASTRUCTURE, name, allow=[name], poll=timedelta(seconds=0.1))
            for _ in range(3)
        ]
        running = [asyncio.create_task(one.run()) for one in dispatchers]
        counts = Counter[bytes]()
        # By one consumer: a busy broker may forget the last acknowledgements of one that ends.
        async with asyncio.timeout(TIMEOUT), client.consume(name) as messages:
            # One may begin when the others have sent everything.
            while min(one.done.sent for one in dispatchers) == 0:
                bodies = [f"{place}".encode() for place in range(number, number + more)]
                store.add(name, *[(name, later(minutes=-5), {}, body) for body in bodies])
                number += more
                while counts.total() < number:
                    message = await anext(messages)
                    await message.ack()
                    counts[message.body] += 1

        async def is_empty() -> bool:
            return not store.stored(name)

        await eventually(is_empty)
        for one in dispatchers:
            one.stop()
        done = await asyncio.gather(*running)
        assert len(counts) == number
        assert sum(one.sent for one in done) == number
        assert await client.exists(name)


async def test_timeouts_that_cannot_be_sent_do_not_hold_up_later_ones(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a batch of them, although they are tried again at once."""
    monkeypatch.setattr("bide.timeouts.dispatcher._RETRY_LEFT", 0.0)
    name = "Dispatched"
    async with endpoints(vhost, INFRASTRUCTURE, name) as client:
        left = store.add(name, *[("Salaries", later(minutes=-5), {}, b"x") for _ in range(2 * BATCH + 1)])
        store.add(name, (name, later(minutes=-1), {}, b"sent"))
        dispatcher = TimeoutDispatcher(
            store.url, vhost.url, INFRASTRUCTURE, name, allow=[name, "later"], poll=timedelta(seconds=0.1)
        )
        running = asyncio.create_task(dispatcher.run())
        (message,) = await receive(client, name, 1)
        assert message.body == b"sent"
        (retried,) = store.add(name, ("later", later(minutes=-10), {}, b"x"))

        async def is_left() -> bool:
            return dispatcher.done.left > 2 * len(left)

        await eventually(is_left)
        assert store.stored(name) == {*left, retried}
        await client.declare(Topology(queues=[Queue("later")]))
        await receive(client, "later", 1)
        dispatcher.stop()
        await running
        assert store.stored(name) == set(left)


def test_due_rows_of_the_same_time_are_locked_once_until_the_restart(store: Store) -> None:
    due = later(minutes=-5)
    store.add("Dispatched", *[("Dispatched", due, {}, b"x") for _ in range(5)])
    with Database(store.url) as database:
        rows = DueRows(database, *find_tables(database))
        batches = []
        while locked := rows.lock(2):
            batches.append([one.id for one in locked])
            # The first one of each batch was sent.
            rows.delete([locked[0].id])
        assert [len(one) for one in batches] == [2, 2, 1]
        assert len({one for batch in batches for one in batch}) == 5
        rows.restart()
        assert [one.id for one in rows.lock(2)] == [batches[0][1], batches[1][1]]
        rows.delete([])


def test_rows_are_locked_after_a_deadlock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers choose the transaction that they end, so the test raises the driver's error itself."""
    deadlock: list[Exception] = [
        psycopg.errors.DeadlockDetected() if store.server.scheme == "postgresql" else OperationalError(LOCK_DEADLOCK)
    ]

    def read(row: tuple[Any, ...]) -> StoredTimeout:
        if deadlock:
            raise deadlock.pop()
        return stored_timeout(row)

    monkeypatch.setattr("bide.timeouts.due_rows.stored_timeout", read)
    ids = store.add("Dispatched", *[("Dispatched", later(minutes=-5), {}, b"x") for _ in range(3)])
    with Database(store.url) as database:
        rows = DueRows(database, *find_tables(database))
        locked = [one.id for one in rows.lock(2)]
        assert len({str(one) for one in locked} & set(ids)) == 2
        assert not deadlock
        rows.delete(locked)
    assert len(store.stored("Dispatched")) == 1


@pytest.mark.parametrize("others", [0, 50])
def test_a_saga_is_cleared_while_one_of_its_timeouts_is_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """MariaDB and MySQL end the deadlock: they roll back the deletion that has changed less."""
    deadlocks: list[TimeoutStoreError] = []
    is_deadlock = Database.is_deadlock

    def noticing(database: Database, error: TimeoutStoreError) -> bool:
        if found := is_deadlock(database, error):
            deadlocks.append(error)
        return found

    monkeypatch.setattr(Database, "is_deadlock", noticing)
    saga = str(uuid.uuid4())
    sent = "ffffffff-ffff-4fff-8fff-ffffffffffff"  # the last one that the other deletion reaches
    of_saga = store.add("Dispatched", *[("Dispatched", later(hours=1), {}, b"x") for _ in range(others)])
    of_saga += store.add("Dispatched", ("Dispatched", later(minutes=-5), {}, b"x"))
    change = store.statement('UPDATE "DispatchedTimeoutData" SET "Id" = %s, "SagaId" = %s WHERE "Id" = %s')
    new_ids = [*of_saga[:-1], sent]
    store.server.execute(store.url, change, [(new, saga, old) for new, old in zip(new_ids, of_saga, strict=True)])
    # MariaDB and MySQL also lock the row that is due next. If that row belonged to the saga, there would be no
    # deadlock.
    kept = store.add("Dispatched", *[("Dispatched", later(minutes=30), {}, b"x") for _ in range(1000)])
    is_postgresql = store.server.scheme == "postgresql"
    # Otherwise the server may read the whole table instead of the index of sagas.
    store.server.execute(
        store.url, store.statement(f'ANALYZE {"" if is_postgresql else "TABLE"} "DispatchedTimeoutData"')
    )
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        if is_postgresql
        # The table innodb_trx is cached, and frequent reads keep the cache stale. The status counts the waits of the
        # whole server, which only this test uses now: each pytest worker starts its own servers.
        else "SHOW GLOBAL STATUS WHERE Variable_name = 'Innodb_row_lock_current_waits' AND Value <> '0'"
    )
    with Database(store.url) as first, Database(store.url) as second, ThreadPoolExecutor() as threads:
        sending, clearing = (DueRows(one, *find_tables(one)) for one in (first, second))
        (locked,) = sending.lock(10)
        assert str(locked.id) == sent
        cleared = threads.submit(clearing.clear_saga, saga)
        wait_until(lambda: bool(store.server.execute(store.url, waiting)))
        sending.delete([locked.id])
        cleared.result(TIMEOUT)
    assert store.stored("Dispatched") == set(kept)
    assert bool(deadlocks) is not is_postgresql
