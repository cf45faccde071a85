"""Stored timeouts whose ids are missing or not unique, in real databases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

import bide
from bide.delay.protocol import DelayInfrastructure
from bide.errors import TimeoutStoreError
from bide.schedules.names import ScheduleNames
from bide.timeouts import TimeoutMigration, abort_run, list_runs, preview_timeouts
from bide.timeouts.claims import ClaimedTable
from bide.timeouts.preview import UNREADABLE_TIME, UNUSABLE_ID
from bide.timeouts.tables import Condition, mapped_table
from tests.broker.conftest import SMALL_CLOCK
from tests.databases import DatabaseServer
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost

TABLE = mapped_table("reminder", {"id": "number", "destination": "queue", "body": "body", "due": "due"})
V2 = bide.NServiceBus()
SOON, PAST = later(hours=30), later(hours=-30)

Row = tuple[Any, str, datetime | None]
"""The id, the body and the due time of a timeout."""


@pytest.fixture
def store(database_server: DatabaseServer) -> Store:
    """An empty database."""
    return Store(database_server, database_server.new_database())


def create(store: Store, id_type: str = "int NULL") -> None:
    store.server.execute(
        store.url,
        f"CREATE TABLE reminder (number {id_type}, queue varchar(50), body varchar(50), due timestamp NULL)",
    )


def add(store: Store, *rows: Row) -> None:
    values = [(number, body, due and due.replace(tzinfo=None)) for number, body, due in rows]
    store.server.execute(store.url, "INSERT INTO reminder VALUES (%s, 'Sales', %s, %s)", values)


def bodies(store: Store) -> str:
    """The bodies of the stored timeouts."""
    return "".join(sorted(body for (body,) in store.server.execute(store.url, "SELECT body FROM reminder")))


def migration(
    vhost: Vhost, store: Store, infrastructure: DelayInfrastructure = V2, *, keyed: bool = False
) -> TimeoutMigration:
    return TimeoutMigration(store.url, vhost.url, infrastructure, table=TABLE, keyed=keyed)


@contextmanager
def killed_before_the_confirms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which a migration ends with its first batch claimed."""

    def die(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(ClaimedTable, "finish", die)
        with pytest.raises(InterruptedError):
            yield


@pytest.mark.parametrize("keyed", [False, True])
async def test_rows_with_missing_or_equal_ids_are_left_and_counted(vhost: Vhost, store: Store, keyed: bool) -> None:
    infrastructure = SMALL_CLOCK if keyed else V2
    create(store)
    add(store, (1, "a", SOON), (2, "b", PAST), (7, "c", SOON), (7, "d", PAST), (8, "e", SOON), (8, "f", None))
    add(store, (None, "g", SOON), (None, "h", SOON))
    async with endpoints(vhost, infrastructure, "Sales") as client:
        await client.declare(ScheduleNames().topology())
        (preview,) = await preview_timeouts(store.url, vhost.url, infrastructure, table=TABLE, keyed=keyed)
        assert (preview.count, preview.past, preview.destinations) == (7, 1, {"Sales": 2})
        assert preview.problems == {UNUSABLE_ID: 5, UNREADABLE_TIME: 1}
        for sent in (1, 0):
            done = await migration(vhost, store, infrastructure, keyed=keyed).run()
            assert (done.sent.total(), done.past, done.is_finished) == (sent, 1, True)
            assert done.left == {UNUSABLE_ID: 5, UNREADABLE_TIME: 1}
            assert bodies(store) == "bcdefgh"
        # The way out: give each row an id of its own.
        store.server.execute(store.url, "UPDATE reminder SET number = 3 WHERE body = 'd'")
        store.server.execute(store.url, "UPDATE reminder SET number = 4 WHERE body = 'g'")
        done = await migration(vhost, store, infrastructure, keyed=keyed).run()
        assert (done.sent, done.past) == ({"reminder": 2}, 2)
        assert done.left == {UNUSABLE_ID: 2, UNREADABLE_TIME: 1}
        assert bodies(store) == "bdefh"


@pytest.mark.parametrize(
    ("postgresql", "mysql", "make"),
    [
        ("smallint", "tinyint", int),
        ("numeric(20, 2)", "decimal(20, 2)", int),
        ("varchar(50)", "varchar(50)", "it's %s \\ ü {}".format),
        ("char(20)", "char(20)", str),
        ("bytea", "varbinary(50)", lambda number: b"\x00'%s\\\xff" + bytes([number])),
        ("uuid", "binary(16)", lambda number: uuid.UUID(int=number)),
    ],
)
async def test_equal_ids_of_any_type_are_left(
    vhost: Vhost, store: Store, postgresql: str, mysql: str, make: Callable[[int], Any]
) -> None:
    is_postgresql = store.server.scheme == "postgresql"
    create(store, f"{postgresql if is_postgresql else mysql} NULL")
    ids = [make(number) for number in (1, 2, 2, 3, 3, 4)]
    if not is_postgresql:
        ids = [one.bytes if isinstance(one, uuid.UUID) else one for one in ids]
    add(store, *[(one, body, SOON) for one, body in zip([*ids, None], "abcdefg", strict=True)])
    async with endpoints(vhost, V2, "Sales"):
        (preview,) = await preview_timeouts(store.url, vhost.url, V2, table=TABLE)
        assert (preview.destinations, preview.problems) == ({"Sales": 2}, {UNUSABLE_ID: 5})
        done = await migration(vhost, store).run()
        assert (done.sent, done.left) == ({"reminder": 2}, {UNUSABLE_ID: 5})
        assert bodies(store) == "bcdeg"


async def test_ids_are_equal_if_the_database_says_so(vhost: Vhost, store: Store) -> None:
    """In MariaDB and MySQL, the usual collations ignore case, and spaces at the end."""
    is_postgresql = store.server.scheme == "postgresql"
    create(store, "varchar(50)" if is_postgresql else "varchar(50) CHARACTER SET latin1 COLLATE latin1_swedish_ci")
    ids = ("A", "a", "b", "É", "é", "d", "d ", "k")
    add(store, *[(one, body, SOON) for one, body in zip(ids, "abcdefgh", strict=True)])
    left = "" if is_postgresql else "abdefg"
    async with endpoints(vhost, V2, "Sales"):
        (preview,) = await preview_timeouts(store.url, vhost.url, V2, table=TABLE)
        assert preview.problems == ({UNUSABLE_ID: len(left)} if left else {})
        done = await migration(vhost, store).run()
        assert (done.sent.total(), done.left.total()) == (len(ids) - len(left), len(left))
        assert bodies(store) == left


@pytest.mark.parametrize("late", [(1, "x", SOON), (1, "x", PAST), (None, "x", SOON)])
async def test_an_id_that_gets_unusable_during_a_run_ends_it_with_the_way_out(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch, late: Row
) -> None:
    create(store)
    add(store, (1, "a", SOON), (2, "b", SOON))
    open_table = ClaimedTable.open

    def open_before_a_row(table: ClaimedTable, usable: Condition) -> None:
        open_table(table, usable)
        add(store, late)

    async with endpoints(vhost, V2, "Sales"):
        with monkeypatch.context() as patched:
            patched.setattr(ClaimedTable, "open", open_before_a_row)
            with pytest.raises(TimeoutStoreError, match=r"'reminder' .*\. Run the migration again"):
                await migration(vhost, store).run()
        assert bodies(store) == "abx"
        # The way out that the error names.
        done = await migration(vhost, store).run()
        left = "x" if late[0] is None else "ax"
        assert (done.sent.total(), done.left, done.is_finished) == (3 - len(left), {UNUSABLE_ID: len(left)}, True)
        assert bodies(store) == left


async def test_a_column_with_more_than_1000_equal_ids_is_refused_before_a_run(vhost: Vhost, store: Store) -> None:
    create(store)
    add(store, *[(number // 2, "x", SOON) for number in range(2002)], (5000, "y", SOON))
    before, reason = (
        store.contents(),
        "'number' of the table 'reminder' is not unique: more than 1,000 .* another column",
    )
    async with endpoints(vhost, V2, "Sales"):
        with pytest.raises(TimeoutStoreError, match=reason):
            await preview_timeouts(store.url, vhost.url, V2, table=TABLE)
        with pytest.raises(TimeoutStoreError, match=reason):
            await migration(vhost, store).run()
        assert list_runs(store.url) == []
        assert store.contents() == before
        # As many are left.
        store.server.execute(store.url, "DELETE FROM reminder WHERE number = 0")
        (preview,) = await preview_timeouts(store.url, vhost.url, V2, table=TABLE)
        assert preview.problems == {UNUSABLE_ID: 2000}
        done = await migration(vhost, store).run()
        assert (done.sent, done.left) == ({"reminder": 1}, {UNUSABLE_ID: 2000})


async def test_a_killed_run_continues_beside_rows_with_unusable_ids(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    add(store, (1, "a", SOON), (2, "b", SOON), (7, "c", SOON), (7, "d", SOON), (None, "e", SOON))
    async with endpoints(vhost, V2, "Sales"):
        with killed_before_the_confirms(monkeypatch):
            await migration(vhost, store).run()
        assert bodies(store) == "cde"
        done = await migration(vhost, store).run()
        assert (done.sent, done.repeated, done.left) == ({"reminder": 2}, 2, {UNUSABLE_ID: 3})
        assert bodies(store) == "cde"


async def test_an_abort_leaves_rows_with_unusable_ids(
    vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    add(store, (1, "a", SOON), (2, "b", SOON), (7, "c", SOON), (7, "d", SOON), (None, "e", SOON))
    before = store.contents()["reminder"]
    async with endpoints(vhost, V2, "Sales"):
        with killed_before_the_confirms(monkeypatch):
            await migration(vhost, store).run()
    (run,) = list_runs(store.url)
    assert (run.endpoints[0].claimed, run.endpoints[0].left) == (2, {})
    run = abort_run(store.url)
    assert (run.status, run.endpoints[0].claimed, run.endpoints[0].repeated) == ("aborted", 0, 2)
    assert store.contents()["reminder"] == before
