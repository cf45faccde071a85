"""Stored timeouts of NServiceBus in real databases, moved to a real broker."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import bide
from bide.amqp import tls_warnings
from bide.delay.protocol import DelayInfrastructure
from bide.errors import TimeoutStoreError
from bide.schedules.names import ScheduleNames
from bide.timeouts import (
    TimeoutDispatcher,
    TimeoutMigration,
    abort_run,
    inspect_timeout_manager,
    list_runs,
    preview_timeouts,
    retire_timeout_manager,
)
from bide.timeouts.claims import Batch, ClaimedTable
from bide.timeouts.database import Database
from bide.timeouts.preview import UNREADABLE_TIME
from bide.timeouts.retire import Retirement
from bide.timeouts.runs import Runs
from bide.timeouts.tables import find_tables, mapped_table
from bide.topology import Exchange, Queue, Topology
from tests.broker.conftest import SMALL_CLOCK
from tests.broker.receiving import receive
from tests.broker.schedule_log import gating
from tests.databases import DatabaseServer, mysql_server
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost
from tests.timeouts import MAX_LATENESS

INFRASTRUCTURES: dict[str, DelayInfrastructure] = {
    "v2": bide.NServiceBus(),
    "v2-direct": bide.NServiceBus(routing="direct"),
    "v1": bide.NServiceBus(version=1),
    "v1-direct": bide.NServiceBus(version=1, routing="direct"),
    "clock": SMALL_CLOCK,
}


@pytest.fixture
def store(database_server: DatabaseServer) -> Store:
    """An empty database."""
    return Store(database_server, database_server.new_database())


@pytest.mark.parametrize("layout", INFRASTRUCTURES)
async def test_timeouts_arrive_at_their_due_time_as_they_were_stored(vhost: Vhost, store: Store, layout: str) -> None:
    infrastructure = INFRASTRUCTURES[layout]
    headers = {
        "NServiceBus.MessageId": "m-1",
        "NServiceBus.CorrelationId": "c-1",
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.EnclosedMessageTypes": "Shop.BuyersRemorseIsOver, Shop",
        "NServiceBus.SagaId": str(uuid.uuid4()),
        "grüße": "aus Köln ✓",
    }
    store.create("Sales_Orders")
    async with endpoints(vhost, infrastructure, "Sales.Orders", "Billing") as client:
        due = later(seconds=10)
        (other,) = store.add("Sales_Orders", ("Billing", due, {}, None))
        store.add("Sales_Orders", ("Sales.Orders", due, headers, b"\x00\xff body"))
        # On a slow machine, the timeouts may be due by now.
        migration = TimeoutMigration(store.url, vhost.url, infrastructure, endpoints=["Sales.Orders"], past="send")
        done = await migration.run()
        latest = max(due, datetime.now(UTC)) + MAX_LATENESS
        assert (done.sent, done.left, done.past, done.repeated) == ({"Sales_Orders": 2}, {}, 0, 0)
        assert done.is_finished
        assert store.stored("Sales_Orders") == set()
        (message,) = await receive(client, "Sales.Orders", 1)
        assert due <= message.received_at < latest
        assert message.body == b"\x00\xff body"
        assert {name: message.headers.get(name) for name in headers} == headers
        assert (message.message_id, message.correlation_id) == ("m-1", "c-1")
        assert (message.content_type, message.type) == ("application/json", "Shop.BuyersRemorseIsOver")
        (message,) = await receive(client, "Billing", 1)
        assert due <= message.received_at
        assert (message.body, message.message_id) == (b"", other)
        assert message.headers["NServiceBus.MessageId"] == other


async def test_what_cannot_be_sent_is_left_and_named(vhost: Vhost, store: Store) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    due = later(hours=1)
    is_postgresql = store.server.scheme == "postgresql"
    async with endpoints(vhost, infrastructure, "Sales"):
        store.add("Sales", *[("Sales", due, {"n": str(number)}, b"x") for number in range(30)])
        odd = store.add(
            "Sales",
            ("Gone", due, {}, b"x"),
            ("Sales", due, '["not", "an object"]', b"x"),
            ("Sales", due, '{"n": 7}', b"x"),
            ("Sales", due, {"huge": "x" * 200_000}, b"x"),
            ("Sales", due, {"bide-due": "1"}, b"x"),
            ("Sales", later(days=3200), {}, b"x"),
            (None, due, {}, b"x"),
            *([("Sales", due, "no JSON", b"x")] if is_postgresql else []),
        )
        before = store.contents()
        (preview,) = await preview_timeouts(store.url, vhost.url, infrastructure)
        assert store.contents() == before
        assert (preview.endpoint, preview.count, preview.past) == ("Sales", 30 + len(odd), 0)
        assert preview.problems.total() == len(odd)
        migration = TimeoutMigration(store.url, vhost.url, infrastructure)
        done = await migration.run()
        assert done.sent == {"Sales": 30}
        assert done.left.total() == len(odd)
        assert done.is_finished
        assert store.stored("Sales") == set(odd)
        reasons = " ".join(done.left)
        for part in ("'Gone'", "but not an object", "'n' is of type int", "3106 d", "bide-due", "no destination"):
            assert part in reasons
            assert part in " ".join(preview.problems)
        (status,) = list_runs(store.url)
        assert status.status == "completed"
        assert status.endpoints[0].left == done.left
        # The next run finds them again.
        assert (await TimeoutMigration(store.url, vhost.url, infrastructure).run()).left == done.left


async def test_a_date_that_the_server_cannot_calculate_with_is_left_and_named(vhost: Vhost, store: Store) -> None:
    """MariaDB allows dates with a month or day of zero by default."""
    infrastructure = bide.NServiceBus(routing="direct")
    store.create("Sales")
    odd = ["2026-00-10", "2026-01-00", "0000-00-00"] if store.server.scheme == "mysql" else ["-infinity", "infinity"]
    async with endpoints(vhost, infrastructure, "Sales") as client:
        good = store.add("Sales", *[("Sales", later(hours=1), {}, b"x") for _ in odd])
        bad = store.add("Sales", *[("Sales", later(seconds=-1), {}, b"x") for _ in odd])
        statement = 'UPDATE "SalesTimeoutData" SET "Time" = %s WHERE "Id" = %s'
        store.server.execute(store.url, store.statement(statement), list(zip(odd, bad, strict=True)))
        (preview,) = await preview_timeouts(store.url, vhost.url, infrastructure)
        assert (preview.count, preview.problems) == (len(good), {UNREADABLE_TIME: len(bad)})
        for past in ("leave", "send"):
            done = await TimeoutMigration(store.url, vhost.url, infrastructure, past=past).run()
            assert (done.left, done.is_finished) == ({UNREADABLE_TIME: len(bad)}, True)
            assert store.stored("Sales") == set(bad)
        store.add("Sales", ("Sales", later(seconds=-1), {}, b"due"))
        dispatcher = TimeoutDispatcher(store.url, vhost.url, infrastructure, "Sales", allow=["Sales"])
        running = asyncio.create_task(dispatcher.run())
        (message,) = await receive(client, "Sales", 1)
        assert message.body == b"due"
        dispatcher.stop()
        assert (await running).sent == 1
        assert store.stored("Sales") == set(bad)


async def test_a_password_that_can_be_read_on_the_network_causes_a_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if store.server.scheme == "mysql":
        store.server.execute(store.url, "CREATE USER IF NOT EXISTS ana@localhost IDENTIFIED BY 'secret'")
        store.server.execute(store.url, "GRANT ALL ON *.* TO ana@localhost")
        url, option = store.url.replace("root@", "ana:secret@"), "ssl_ca"
    else:
        store.server.execute(store.url, "CREATE ROLE ana LOGIN SUPERUSER")
        url, option = store.url.replace("bide@", "ana:secret@"), "sslmode"
    monkeypatch.setattr(tls_warnings, "_warned", set())
    Database(url).close()
    assert caplog.messages == []
    # A test has no other machine.
    monkeypatch.setattr(tls_warnings, "_is_remote", lambda _peer, _own: True)
    Database(store.url).close()
    assert caplog.messages == [], "this user has no password"
    for _ in range(2):
        Database(url).close()
    (text,) = caplog.messages
    assert "the user 'ana' logs in to the database at 127.0.0.1:" in text
    assert option in text
    assert "secret" not in text


async def test_past_due_timeouts_are_sent_only_if_asked_for(vhost: Vhost, store: Store) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    async with endpoints(vhost, infrastructure, "Sales") as client:
        past = store.add("Sales", ("Sales", later(days=-400), {}, b"old"))
        store.add("Sales", ("Sales", later(hours=1), {}, b"new"))
        done = await TimeoutMigration(store.url, vhost.url, infrastructure).run()
        assert (done.sent, done.past, done.left) == ({"Sales": 1}, 1, {})
        assert store.stored("Sales") == set(past)
        done = await TimeoutMigration(store.url, vhost.url, infrastructure, past="send").run()
        assert (done.sent, done.past, done.left) == ({"Sales": 1}, 0, {})
        (message,) = await receive(client, "Sales", 1)
        assert message.body == b"old"


async def test_the_cutoff_is_a_point_in_time(vhost: Vhost, store: Store) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    async with endpoints(vhost, infrastructure, "Sales"):
        due = later(hours=5)
        (before,) = store.add("Sales", ("Sales", due - timedelta(seconds=1), {}, b"x"))
        store.add("Sales", ("Sales", due, {}, b"x"))
        zoned = datetime.fromisoformat(due.isoformat()).astimezone()
        done = await TimeoutMigration(store.url, vhost.url, infrastructure, cutoff=zoned).run()
        assert done.sent == {"Sales": 1}
        assert store.stored("Sales") == {before}


async def test_an_interrupted_run_continues_only_with_the_same_parameters(vhost: Vhost, store: Store) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    cutoff = later(hours=1)
    async with endpoints(vhost, infrastructure, "Sales"):
        store.add("Sales", *[("Sales", later(hours=2), {}, b"x") for _ in range(10)])
        migration = TimeoutMigration(store.url, vhost.url, infrastructure, cutoff=cutoff)
        migration.stop()
        done = await migration.run()
        assert (done.sent.total(), done.is_finished) == (0, False)
        other = TimeoutMigration(store.url, vhost.url, infrastructure, cutoff=cutoff + timedelta(days=1))
        with pytest.raises(TimeoutStoreError, match="cutoff is"):
            await other.run()
        again = await TimeoutMigration(store.url, vhost.url, infrastructure, cutoff=cutoff).run()
        assert (again.run, again.sent, again.is_finished) == (done.run, {"Sales": 10}, True)
        with pytest.raises(TimeoutStoreError, match="no unfinished run"):
            abort_run(store.url)


def claim(store: Store, number: int) -> Batch:
    """Claim rows as a process does that is killed before it sends them."""
    with Database(store.url) as database:
        runs = Runs(database)
        runs.lock()
        _, (table,) = runs.begin({}, find_tables(database))
        table.open()
        batch = table.claim(later(hours=0), number)
        assert batch is not None
        return batch


async def test_an_abort_restores_what_was_claimed(vhost: Vhost, store: Store) -> None:
    store.create("Sales")
    ids = set(store.add("Sales", *[("Sales", later(hours=2), {"n": str(n)}, b"x") for n in range(10)]))
    before = sorted(store.server.execute(store.url, select_all(store)))
    claimed = {str(row.id) for row in claim(store, 4).rows}
    assert store.stored("Sales") == ids - claimed
    run = abort_run(store.url)
    assert (run.status, run.endpoints[0].repeated, run.endpoints[0].claimed) == ("aborted", 4, 0)
    assert sorted(store.server.execute(store.url, select_all(store))) == before


def select_all(store: Store) -> str:
    return (
        'SELECT * FROM "SalesTimeoutData"' if store.server.scheme == "postgresql" else "SELECT * FROM SalesTimeoutData"
    )


async def test_claimed_rows_of_a_killed_process_are_sent_and_counted(vhost: Vhost, store: Store) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    async with endpoints(vhost, infrastructure, "Sales"):
        store.add("Sales", *[("Sales", later(hours=2), {}, b"x") for _ in range(10)])
        migration = TimeoutMigration(store.url, vhost.url, infrastructure)
        migration.stop()
        await migration.run()
        with Database(store.url) as database:
            run = Runs(database).unfinished()
            assert run is not None
            (table,) = run[1]
            table.open()
            assert table.claim(later(), 4) is not None
        (unfinished,) = list_runs(store.url)
        assert (unfinished.status, unfinished.endpoints[0].claimed) == ("running", 4)
        done = await TimeoutMigration(store.url, vhost.url, infrastructure).run()
        assert (done.sent, done.repeated) == ({"Sales": 10}, 4)
        (finished,) = list_runs(store.url)
        assert (finished.endpoints[0].sent, finished.endpoints[0].repeated) == (10, 4)


async def test_a_second_process_is_refused(vhost: Vhost, store: Store) -> None:
    store.create("Sales")
    with Database(store.url) as database:
        Runs(database).lock()
        with pytest.raises(TimeoutStoreError, match="another process"):
            await TimeoutMigration(store.url, vhost.url, bide.NServiceBus()).run()


async def test_timeouts_stored_during_the_run_are_moved_too(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    infrastructure = bide.NServiceBus()
    store.create("Sales")
    async with endpoints(vhost, infrastructure, "Sales"):
        store.add("Sales", *[("Sales", later(hours=2), {}, b"x") for _ in range(1500)])
        added: list[str] = []

        def add_earlier(_: int, __: int) -> None:
            if not added:
                added.extend(store.add("Sales", ("Sales", later(hours=1), {}, b"x")))

        done = await TimeoutMigration(store.url, vhost.url, infrastructure, progress=add_earlier).run()
        assert done.sent == {"Sales": 1501}
        assert store.stored("Sales") == set()


async def test_the_timeouts_of_nhibernate_are_moved_from_their_one_table(vhost: Vhost, store: Store) -> None:
    is_postgresql = store.server.scheme == "postgresql"
    uuid_type, bytes_type = ("uuid", "bytea") if is_postgresql else ("char(36)", "longblob")
    store.server.execute(
        store.url,
        store.statement(
            f'CREATE TABLE "TimeoutEntity" ("Id" {uuid_type} PRIMARY KEY, "Destination" varchar(1024), '
            f'"SagaId" {uuid_type}, "State" {bytes_type}, "Endpoint" varchar(440), "Time" timestamp(3) NULL, '
            '"Headers" text)'
        ),
    )
    due = later(seconds=12)
    when = due.replace(tzinfo=None)
    saga = str(uuid.uuid4())
    rows = [
        (str(uuid.uuid4()), "Sales", saga, b"\x00\xff", "Sales", when, '{"NServiceBus.MessageId": "m-1"}'),
        (str(uuid.uuid4()), "Billing", None, b"b", "Billing", when, "{}"),
        (str(uuid.uuid4()), "Billing", None, b"b", "Billing", None, "{}"),
    ]
    store.server.execute(
        store.url, store.statement('INSERT INTO "TimeoutEntity" VALUES (%s, %s, %s, %s, %s, %s, %s)'), rows
    )
    columns = {"id": "Id", "destination": "Destination", "body": "State", "headers": "Headers", "due": "Time"}
    table, infrastructure = mapped_table("TimeoutEntity", columns), bide.NServiceBus()
    async with endpoints(vhost, infrastructure, "Sales", "Billing") as client:
        # On a slow machine, the timeouts may be due by now.
        done = await TimeoutMigration(store.url, vhost.url, infrastructure, table=table, past="send").run()
        assert (done.sent, done.left.total()) == ({"TimeoutEntity": 2}, 1)
        assert store.server.execute(store.url, store.statement('SELECT COUNT(*) FROM "TimeoutEntity"')) == [(1,)]
        for queue, body, message_id in (("Sales", b"\x00\xff", "m-1"), ("Billing", b"b", rows[1][0])):
            (message,) = await receive(client, queue, 1)
            assert (message.body, message.message_id) == (body, message_id)
            assert message.received_at >= due


async def test_rows_of_a_table_with_generated_columns_go_back(vhost: Vhost, store: Store) -> None:
    is_postgresql = store.server.scheme == "postgresql"
    identity = "GENERATED ALWAYS AS IDENTITY" if is_postgresql else "AUTO_INCREMENT"
    store.server.execute(
        store.url,
        f"CREATE TABLE reminder (number int {identity} PRIMARY KEY, queue varchar(50), body varchar(50), "
        "due timestamp NULL, double_number int GENERATED ALWAYS AS (char_length(queue) * 2) STORED)",
    )
    insert = "INSERT INTO reminder (queue, body, due) VALUES (%s, 'x', %s)"
    rows = [(queue, later(hours=1).replace(tzinfo=None)) for queue in ("Gone", "Sales")]
    store.server.execute(store.url, insert, rows)
    columns = {"id": "number", "destination": "queue", "body": "body", "due": "due"}
    before = store.server.execute(store.url, "SELECT * FROM reminder WHERE queue = 'Gone'")
    async with endpoints(vhost, bide.NServiceBus(), "Sales"):
        done = await TimeoutMigration(
            store.url, vhost.url, bide.NServiceBus(), table=mapped_table("reminder", columns)
        ).run()
        assert (done.sent, done.left.total(), done.is_finished) == ({"reminder": 1}, 1, True)
        assert store.server.execute(store.url, "SELECT * FROM reminder") == before


async def test_an_interrupted_run_can_be_aborted_after_its_table_was_changed_or_dropped(
    vhost: Vhost, store: Store
) -> None:
    store.create("Sales")
    store.add("Sales", ("Sales", later(hours=2), {}, b"x"))
    claimed = {str(row.id) for row in claim(store, 1).rows}
    store.server.execute(store.url, store.statement('ALTER TABLE "SalesTimeoutData" ADD COLUMN "Extra" int'))
    assert abort_run(store.url).status == "aborted"
    assert store.stored("Sales") == claimed
    async with endpoints(vhost, bide.NServiceBus(), "Sales"):
        migration = TimeoutMigration(store.url, vhost.url, bide.NServiceBus())
        migration.stop()
        await migration.run()
    store.server.execute(store.url, store.statement('DROP TABLE "SalesTimeoutData"'))
    assert abort_run(store.url).status == "aborted"


async def test_a_run_does_not_continue_after_its_table_got_or_lost_a_column(vhost: Vhost, store: Store) -> None:
    store.create("Sales")
    store.add("Sales", *[("Sales", later(hours=2), {}, b"x") for _ in range(2)])
    async with endpoints(vhost, bide.NServiceBus(), "Sales"):

        def migration() -> TimeoutMigration:
            return TimeoutMigration(store.url, vhost.url, bide.NServiceBus())

        first = migration()
        first.stop()
        run = (await first.run()).run
        store.server.execute(store.url, store.statement('ALTER TABLE "SalesTimeoutData" ADD COLUMN "Extra" int'))
        with pytest.raises(TimeoutStoreError, match=r"'SalesTimeoutData' got the column 'Extra' .*abort_run"):
            await migration().run()
        store.server.execute(store.url, store.statement('ALTER TABLE "SalesTimeoutData" DROP COLUMN "Extra"'))
        drop = 'ALTER TABLE "{}" DROP COLUMN "PersistenceVersion"'
        store.server.execute(store.url, store.statement(drop.format("SalesTimeoutData")))
        with pytest.raises(TimeoutStoreError, match=rf"lost the column 'PersistenceVersion' .*'bide_timeouts_{run}_0'"):
            await migration().run()
        # The way out that the error names.
        store.server.execute(store.url, store.statement(drop.format(f"bide_timeouts_{run}_0")))
        assert (await migration().run()).sent == {"Sales": 2}


async def test_an_abort_names_the_column_or_table_that_claimed_rows_cannot_go_back_into(store: Store) -> None:
    store.create("Sales")
    store.add("Sales", ("Sales", later(hours=2), {}, b"x"))
    claim(store, 1)
    (run,) = list_runs(store.url)
    drop = 'ALTER TABLE "SalesTimeoutData" DROP COLUMN "PersistenceVersion"'
    store.server.execute(store.url, store.statement(drop))
    with pytest.raises(TimeoutStoreError, match=r"lost the column 'PersistenceVersion'"):
        abort_run(store.url)
    store.server.execute(store.url, store.statement('DROP TABLE "SalesTimeoutData"'))
    with pytest.raises(TimeoutStoreError, match=r"the table 'SalesTimeoutData' .* does not exist: create it again"):
        abort_run(store.url)
    # The way out that the error names.
    store.server.execute(store.url, f"DROP TABLE bide_timeouts_{run.run}_0")
    assert abort_run(store.url).status == "aborted"


async def test_a_run_whose_claimed_rows_were_deleted_is_listed_and_aborted(store: Store) -> None:
    """To delete them is the way to delete the history of old runs."""
    store.create("Sales")
    store.add("Sales", ("Sales", later(hours=2), {}, b"x"))
    claim(store, 1)
    (run,) = list_runs(store.url)
    store.server.execute(store.url, f"DROP TABLE bide_timeouts_{run.run}_0")
    (run,) = list_runs(store.url)
    assert (run.status, run.endpoints[0].claimed, run.endpoints[0].left) == ("running", 0, {})
    assert abort_run(store.url).status == "aborted"


async def test_a_column_of_dates_is_refused_before_a_run(vhost: Vhost, store: Store) -> None:
    store.server.execute(store.url, "CREATE TABLE reminder (number int, queue varchar(50), body varchar(50), due date)")
    due = later(hours=30).replace(tzinfo=None)
    store.server.execute(store.url, "INSERT INTO reminder VALUES (7, 'Sales', 'x', %s)", [(due,)])
    table = mapped_table("reminder", {"id": "number", "destination": "queue", "body": "body", "due": "due"})
    before, reason = store.contents(), "'due' of the table 'reminder' is of type date"
    with pytest.raises(TimeoutStoreError, match=reason):
        await preview_timeouts(store.url, vhost.url, bide.NServiceBus(), table=table)
    with pytest.raises(TimeoutStoreError, match=reason):
        await TimeoutMigration(store.url, vhost.url, bide.NServiceBus(), table=table).run()
    assert list_runs(store.url) == []
    assert store.contents() == before


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_preview_counts_the_bodies_that_a_migration_leaves(vhost: Vhost, store: Store, keyed: bool) -> None:
    infrastructure = SMALL_CLOCK if keyed else bide.NServiceBus()
    store.server.execute(
        store.url, "CREATE TABLE reminder (number int PRIMARY KEY, queue varchar(50), body int, due timestamp NULL)"
    )
    rows = [(number, "Sales", body, later(hours=1).replace(tzinfo=None)) for number, body in enumerate((7, None))]
    store.server.execute(store.url, "INSERT INTO reminder VALUES (%s, %s, %s, %s)", rows)
    table = mapped_table("reminder", {"id": "number", "destination": "queue", "body": "body", "due": "due"})
    left = {"the body is of type int: bytes or text is needed": 1}
    async with endpoints(vhost, infrastructure, "Sales"):
        (preview,) = await preview_timeouts(store.url, vhost.url, infrastructure, table=table, keyed=keyed)
        assert (preview.count, preview.destinations, preview.problems) == (2, {"Sales": 1}, left)
        if not keyed:
            done = await TimeoutMigration(store.url, vhost.url, infrastructure, table=table).run()
            assert (done.sent, done.left) == ({"reminder": 1}, left)


async def test_keyed_timeouts_are_schedules_that_can_be_cancelled_by_their_saga(
    vhost: Vhost, store: Store, tmp_path: Path
) -> None:
    store.create("Sales")
    due, saga = later(seconds=15), str(uuid.uuid4())
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await client.declare(Topology(queues=[Queue.quorum("Sales")]))
        headers = {"NServiceBus.SagaId": saga, "NServiceBus.MessageId": "m-1"}
        (kept,) = store.add("Sales", ("Sales", due, {"NServiceBus.ContentType": "text/xml"}, b"\x00\xff"))
        (centuries,) = store.add("Sales", ("Sales", later(days=40_000), {}, b"x"))
        store.add("Sales", *[("Sales", later(hours=1), headers, b"x") for _ in range(3)])
        left = store.add("Sales", ("Gone", due, {}, b"x"), ("Sales", due, {"bide-due": "1"}, b"x"))
        (preview,) = await preview_timeouts(store.url, vhost.url, SMALL_CLOCK, keyed=True)
        assert (preview.count, preview.problems.total()) == (7, 2)

        # On a slow machine, one may be due by now.
        migration = TimeoutMigration(store.url, vhost.url, SMALL_CLOCK, keyed=True, past="send")
        done = await migration.run()
        assert (done.sent, done.left.total(), done.is_finished) == ({"Sales": 5}, 2, True)
        assert store.stored("Sales") == set(left)
        prefix = f"timeout:Sales:{saga}:"
        assert len([one async for one in client.list_scheduled(prefix=prefix)]) == 3
        assert (await client.cancel_scheduled(prefix=prefix)).count == 3
        assert [one.key async for one in client.list_scheduled(due_from=due + timedelta(seconds=1))] == [
            f"timeout:Sales:-:{centuries}"
        ]
        (message,) = await receive(client, "Sales", 1)
        assert message.received_at >= due
        assert (message.body, message.content_type, message.message_id) == (b"\x00\xff", "text/xml", kept)
        assert message.key == f"timeout:Sales:-:{kept}"


async def test_keyed_timeouts_that_are_sent_again_are_not_scheduled_again(
    vhost: Vhost, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("Sales")
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await client.declare(Topology(queues=[Queue.quorum("Sales")]))
        store.add("Sales", *[("Sales", later(hours=1), {}, b"x") for _ in range(20)])

        def die(*_: object) -> None:
            raise InterruptedError

        with monkeypatch.context() as patched:
            patched.setattr(ClaimedTable, "finish", die)
            with pytest.raises(InterruptedError):
                await TimeoutMigration(store.url, vhost.url, SMALL_CLOCK, keyed=True).run()
        keys = [one.key async for one in client.list_scheduled()]
        assert len(keys) == 20
        await client.cancel(keys[0])
        with pytest.raises(TimeoutStoreError, match="keyed is false, and was true"):
            await TimeoutMigration(store.url, vhost.url, SMALL_CLOCK).run()
        done = await TimeoutMigration(store.url, vhost.url, SMALL_CLOCK, keyed=True).run()
        assert (done.sent, done.repeated) == ({"Sales": 20}, 20)
        assert [one.key async for one in client.list_scheduled()] == keys[1:]


async def test_a_run_with_a_list_of_targets_is_not_continued_without_it(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("Sales")
    infrastructure = bide.NServiceBus(routing="direct")

    def migration(*allow: str) -> TimeoutMigration:
        return TimeoutMigration(store.url, vhost.url, infrastructure, allow=allow)

    async with endpoints(vhost, infrastructure, "Sales", "Billing", "Salaries"):
        store.add("Sales", *[(one, later(hours=1), {}, b"x") for one in ("Sales", "Billing", "Salaries")])

        def die(*_: object) -> None:
            raise InterruptedError

        with monkeypatch.context() as patched:
            patched.setattr(ClaimedTable, "finish", die)
            with pytest.raises(InterruptedError):
                await migration("Sales", "Billing").run()
        with pytest.raises(TimeoutStoreError, match=r'allow is \["\*"\], and was \["Billing", "Sales"\]'):
            await migration("*").run()
        done = await migration("Billing", "Sales").run()
        assert (done.sent, done.left.total(), done.is_finished) == ({"Sales": 2}, 1, True)


async def test_keyed_timeouts_reach_only_allowed_targets(vhost: Vhost, store: Store) -> None:
    store.create("Sales")
    async with bide.connect(vhost.url) as client:
        await client.declare(ScheduleNames().topology())
        await client.declare(Topology(queues=[Queue.quorum("Sales"), Queue.quorum("Salaries")]))
        store.add("Sales", ("Sales", later(hours=1), {}, b"x"))
        (left,) = store.add("Sales", ("Salaries", later(hours=1), {}, b"x"))
        done = await TimeoutMigration(store.url, vhost.url, SMALL_CLOCK, keyed=True, allow=["Sales"]).run()
        assert (done.sent, done.is_finished) == ({"Sales": 1}, True)
        (reason,) = done.left
        assert "'q:Salaries' matches no allowed pattern" in reason
        assert store.stored("Sales") == {left}


async def test_a_table_is_not_retired_under_a_name_that_misses_its_queues(vhost: Vhost, store: Store) -> None:
    store.create("Sales_Orders")
    queue = "Sales.Orders.Timeouts"
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue(queue)]))
        found = await inspect_timeout_manager(store.url, vhost.url, "Sales_Orders")
        assert any(f"{queue!r} exists" in one for one in found.problems)
        assert not (await inspect_timeout_manager(store.url, vhost.url, "Sales.Orders")).problems
        # A second table, of another prefix.
        store.create("Sales_Orders_")
        found = await inspect_timeout_manager(store.url, vhost.url, "Sales.Orders")
        assert any("2 tables" in one for one in found.problems)


async def test_a_table_that_gets_a_timeout_during_the_removal_is_not_dropped(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("Sales")
    times = 0

    async def inspect_before_a_timeout(*arguments: str) -> Retirement:
        nonlocal times
        found = await inspect_timeout_manager(*arguments)
        times += 1
        if times == 2:
            store.add("Sales", ("Sales", later(hours=1), {}, b"x"))
        return found

    monkeypatch.setattr("bide.timeouts.retire.inspect_timeout_manager", inspect_before_a_timeout)
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology([Exchange("Sales.Timeouts", "fanout")], [Queue("Sales.Timeouts")]))
    done = await retire_timeout_manager(store.url, vhost.url, "Sales", watch=timedelta(milliseconds=1))
    assert done.removed == ["exchange Sales.Timeouts", "queue Sales.Timeouts"]
    assert done.problems == ["the table 'SalesTimeoutData' got a timeout just now, and was not dropped"]
    assert len(store.stored("Sales")) == 1


async def test_a_table_without_transactions_is_refused(vhost: Vhost) -> None:
    with mysql_server() as server:
        store = Store(server, server.new_database())
        store.create("Sales")
        server.execute(store.url, "ALTER TABLE SalesTimeoutData ENGINE=MyISAM")
        with pytest.raises(TimeoutStoreError, match="ENGINE=InnoDB"):
            await TimeoutMigration(store.url, vhost.url, bide.NServiceBus()).run()
        with pytest.raises(TimeoutStoreError, match="ENGINE=InnoDB"):
            await TimeoutDispatcher(store.url, vhost.url, bide.NServiceBus(), "Sales", allow=["Sales"]).run()
