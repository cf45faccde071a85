"""Settings of database servers that a migration of stored timeouts has to cope with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import trustme

import bide
from bide.errors import TimeoutStoreError
from bide.timeouts import TimeoutMigration
from bide.timeouts.database import Database
from bide.timeouts.preview import UNREADABLE_TIME
from bide.timeouts.tables import mapped_table
from tests.databases import DatabaseServer
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost

INFRASTRUCTURE = bide.NServiceBus(routing="direct")
REMINDER = mapped_table("reminder", {"id": "number", "destination": "queue", "body": "body", "due": "due"})
ONLY_MYSQL = pytest.mark.parametrize("database_server", ["mysql"], indirect=True)


@pytest.fixture
def store(database_server: DatabaseServer) -> Store:
    """An empty database."""
    return Store(database_server, database_server.new_database())


@contextmanager
def setting(store: Store, **values: str) -> Iterator[None]:
    """Variables of a MySQL or MariaDB server."""
    before = {name: store.server.execute(store.url, f"SELECT @@GLOBAL.{name}")[0][0] for name in values}
    for name, value in values.items():
        store.server.execute(store.url, f"SET GLOBAL {name} = %s", [(value,)])
    try:
        yield
    finally:
        for name, value in before.items():
            store.server.execute(store.url, f"SET GLOBAL {name} = %s", [(value,)])


@contextmanager
def requiring_primary_keys(store: Store) -> Iterator[None]:
    """A server that accepts no table, or no deletion from a table, without a primary key."""
    if store.server.scheme == "postgresql":
        store.server.execute(store.url, "CREATE PUBLICATION everything FOR ALL TABLES")
        yield
        return
    names = "'innodb_force_primary_key', 'sql_require_primary_key'"
    ((name, _),) = store.server.execute(store.url, f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    with setting(store, **{name: "ON"}):
        yield


async def test_a_server_that_requires_primary_keys_gets_them(vhost: Vhost, store: Store) -> None:
    store.create("Sales")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        (left,) = store.add("Sales", ("Gone", later(hours=1), {}, b"x"))
        store.add("Sales", *[("Sales", later(hours=1), {}, b"x") for _ in range(3)])
        with requiring_primary_keys(store):
            done = await TimeoutMigration(store.url, vhost.url, INFRASTRUCTURE).run()
    assert (done.sent, done.left.total(), done.is_finished) == ({"Sales": 3}, 1, True)
    assert store.stored("Sales") == {left}


@ONLY_MYSQL
async def test_the_mode_and_the_time_zone_of_the_server_do_not_matter(vhost: Vhost, store: Store) -> None:
    """A server may refuse a time of zeros, and replace a number of 0 by the next one."""
    store.server.execute(
        store.url,
        "CREATE TABLE reminder (number int AUTO_INCREMENT PRIMARY KEY, queue varchar(50), body varchar(50), "
        "due timestamp NULL, changed datetime NOT NULL DEFAULT '0000-00-00 00:00:00')",
    )
    due = later(hours=1)
    with store.server.connect(store.url) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00', sql_mode = 'NO_AUTO_VALUE_ON_ZERO'")
        rows = [(number, queue, due.replace(tzinfo=None)) for number, queue in ((0, "Gone"), (1, "Sales"))]
        cursor.executemany("INSERT INTO reminder (number, queue, body, due) VALUES (%s, %s, 'a\\\\b', %s)", rows)
        connection.commit()
    before = store.server.execute(store.url, "SELECT * FROM reminder WHERE number = 0")
    mode = "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,NO_ZERO_DATE,NO_ZERO_IN_DATE,PIPES_AS_CONCAT,STRICT_ALL_TABLES"
    with setting(store, sql_mode=mode, time_zone="+08:00"):
        async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
            migration = TimeoutMigration(store.url, vhost.url, INFRASTRUCTURE, table=REMINDER, cutoff=due)
            done = await migration.run()
            later_cutoff = due + timedelta(seconds=1)
            again = await TimeoutMigration(
                store.url, vhost.url, INFRASTRUCTURE, table=REMINDER, cutoff=later_cutoff
            ).run()
    assert (done.sent, done.left.total(), done.is_finished) == ({"reminder": 1}, 1, True)
    assert (again.sent, again.left.total()) == ({}, 0)
    assert store.server.execute(store.url, "SELECT * FROM reminder") == before


@ONLY_MYSQL
def test_a_server_without_tls_is_refused_if_its_certificate_is_to_be_checked(store: Store, tmp_path: Path) -> None:
    """MariaDB has no TLS here. MySQL has a certificate that it signed itself."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with pytest.raises(TimeoutStoreError, match=r"SSL is required|is not accepted"):
        Database(f"{store.url}?ssl_ca={tmp_path}/ca.pem")


@ONLY_MYSQL
async def test_dates_that_do_not_exist_are_copied_and_not_sent(vhost: Vhost, store: Store) -> None:
    """A program can have stored them with the mode ALLOW_INVALID_DATES. A date can also be the default of a column."""
    due = later(hours=1).replace(tzinfo=None)
    rows = [(1, "Gone", due, "2026-02-31"), (2, "Sales", due, "2026-02-31"), (3, "Sales", "2027-02-31", None)]
    with store.server.connect(store.url) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES'")
        cursor.execute(
            "CREATE TABLE reminder (number int PRIMARY KEY, queue varchar(50), body varchar(50), due datetime, "
            "changed date DEFAULT '2026-02-31')"
        )
        cursor.executemany("INSERT INTO reminder VALUES (%s, %s, 'x', %s, %s)", rows)
        connection.commit()
    select = "SELECT * FROM reminder WHERE number <> 2 ORDER BY number"
    before = store.server.execute(store.url, select)
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        done = await TimeoutMigration(store.url, vhost.url, INFRASTRUCTURE, table=REMINDER).run()
    assert (done.sent, done.left.total(), done.left[UNREADABLE_TIME]) == ({"reminder": 1}, 2, 1)
    assert store.server.execute(store.url, select) == before


@ONLY_MYSQL
async def test_invisible_columns_go_back(vhost: Vhost, store: Store) -> None:
    store.server.execute(
        store.url,
        "CREATE TABLE reminder (number int PRIMARY KEY, queue varchar(50), body varchar(50), due datetime, "
        "tenant int NOT NULL DEFAULT 7 INVISIBLE)",
    )
    row = (1, "Gone", "x", later(hours=1).replace(tzinfo=None), 42)
    insert = "INSERT INTO reminder (number, queue, body, due, tenant) VALUES (%s, %s, %s, %s, %s)"
    store.server.execute(store.url, insert, [row])
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        done = await TimeoutMigration(store.url, vhost.url, INFRASTRUCTURE, table=REMINDER).run()
    assert done.left.total() == 1
    assert store.server.execute(store.url, "SELECT number, queue, body, due, tenant FROM reminder") == [row]
