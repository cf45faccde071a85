"""Removal of the queues and the table of a timeout manager that is no longer used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from bide.admin.apply import exists
from bide.amqp.connection import Connection
from bide.amqp.queue_counts import queue_counts
from bide.amqp.reply_codes import PRECONDITION_FAILED
from bide.amqp.url import BrokerUrl
from bide.errors import BrokerError
from bide.runtime.wording import quantity
from bide.timeouts.database import Database
from bide.timeouts.runs import Runs
from bide.timeouts.tables import TimeoutTable, choose_tables, find_tables
from bide.timeouts.worker_thread import WorkerThread
from bide.topology import Exchange, Queue, Topology

SUFFIXES: Final = (".Timeouts", ".TimeoutsDispatcher")
"""Suffixes of the exchanges and queues of an endpoint's timeout manager."""


@dataclass(slots=True, kw_only=True)
class Retirement:
    """The exchanges, queues and table of a timeout manager.

    Attributes:
        endpoint: the name of the endpoint.
        exchanges: the exchanges that exist.
        queues: the queues that exist, with their numbers of messages.
        table: the table of timeouts, or None.
        stored: the number of timeouts in the table.
        problems: the reasons against the removal; empty if there are none.
        removed: the exchanges, queues and table that were removed.
    """

    endpoint: str
    exchanges: list[str] = field(default_factory=list)
    queues: dict[str, int] = field(default_factory=dict)
    table: str | None = None
    stored: int = 0
    problems: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "endpoint": self.endpoint,
            "exchanges": self.exchanges,
            "queues": self.queues,
            "table": self.table,
            "stored": self.stored,
            "problems": self.problems,
            "removed": self.removed,
        }


async def inspect_timeout_manager(database_url: str, url: str | BrokerUrl, endpoint: str) -> Retirement:
    """Check whether a timeout manager is unused at this moment. Nothing is changed.

    Args:
        database_url: see :class:`bide.timeouts.TimeoutMigration`.
        url: the URL of the broker.
        endpoint: the name of the endpoint, with its dots: the start of the names of its queues.

    Raises:
        InvalidInputError: a URL cannot be read, or the driver is not installed.
        TimeoutStoreError: the database cannot be reached, or refuses.
        BrokerError: the broker cannot be reached.
    """
    found = Retirement(endpoint=endpoint)
    async with WorkerThread() as thread:
        await thread.run(_inspect_table, database_url, found)
    connection = await Connection.open(url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url))
    try:
        await _inspect_queues(connection, found)
    finally:
        await connection.close()
    return found


async def retire_timeout_manager(
    database_url: str, url: str | BrokerUrl, endpoint: str, *, watch: timedelta
) -> Retirement:
    """Remove the exchanges, queues and table of a timeout manager, if it stays unused for some time.

    The queues must have no consumers, so a message that arrives while this function waits is still there afterwards.
    Exchanges are removed first, so that later senders get an error. The broker deletes only empty queues, and the rows
    of the table are counted again under a lock.

    Args:
        database_url: see :class:`bide.timeouts.TimeoutMigration`.
        url: the URL of the broker.
        endpoint: the name of the endpoint, with its dots.
        watch: how long the queues have to stay empty.

    Returns:
        what was found and removed. If there are problems, either nothing was removed, or a message or a timeout
        arrived during the removal. In the second case, the queue with the message and the table still exist.

    Raises:
        InvalidInputError: a URL cannot be read, or the driver is not installed.
        TimeoutStoreError: the database cannot be reached, or refuses.
        BrokerError: the broker cannot be reached, or refuses.
    """
    found = await inspect_timeout_manager(database_url, url, endpoint)
    if not found.problems:
        await asyncio.sleep(watch.total_seconds())  # an active sender or endpoint changes something in this time
        found = await inspect_timeout_manager(database_url, url, endpoint)
    if found.problems:
        return found
    connection = await Connection.open(url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url))
    try:
        async with await connection.channel() as channel:
            for name in found.exchanges:
                await channel.delete_exchange(name)
                found.removed.append(f"exchange {name}")
        for name in found.queues:
            await _delete_queue(connection, name, found)
    finally:
        await connection.close()
    if not found.problems and found.table is not None:
        async with WorkerThread() as thread:
            await thread.run(_drop_table, database_url, found)
    return found


async def _inspect_queues(connection: Connection, found: Retirement) -> None:
    if (dotted := found.endpoint.replace("_", ".")) != found.endpoint:
        for name in (dotted + suffix for suffix in SUFFIXES):
            if await exists(connection, Topology(queues=[Queue(name)])):
                found.problems.append(f"the queue {name!r} exists: give the name of the endpoint with its dots")
    for name in (found.endpoint + suffix for suffix in SUFFIXES):
        if await exists(connection, Topology([Exchange(name)])):
            found.exchanges.append(name)
        if not await exists(connection, Topology(queues=[Queue(name)])):
            continue
        async with await connection.channel() as channel:
            reply = await queue_counts(channel, name)
        found.queues[name] = int(reply.message_count)
        if reply.message_count:
            found.problems.append(f"the queue {name!r} has {quantity(reply.message_count, 'message')}")
        if reply.consumer_count:
            found.problems.append(
                f"the queue {name!r} has {quantity(reply.consumer_count, 'consumer')}: switch the timeout manager off"
            )


async def _delete_queue(connection: Connection, name: str, found: Retirement) -> None:
    try:
        async with await connection.channel() as channel:
            await channel.delete_queue(name, if_empty=True, if_unused=True)
    except BrokerError as error:
        if error.reply_code != PRECONDITION_FAILED:
            raise
        found.problems.append(f"the queue {name!r} got a message or a consumer just now, and was not deleted")
    else:
        found.removed.append(f"queue {name}")


def _tables_of(database: Database, endpoint: str) -> list[TimeoutTable]:
    tables = find_tables(database)
    wanted = endpoint.replace(".", "_").lower()
    if not any(one.endpoint.lower() == wanted for one in tables):
        return []
    return choose_tables(tables, [endpoint])


def _inspect_table(database_url: str, found: Retirement) -> None:
    with Database(database_url) as database:
        if Runs(database).unfinished() is not None:
            found.problems.append("a run of bide.timeouts.TimeoutMigration(...) is unfinished: finish or abort it")
        tables = _tables_of(database, found.endpoint)
        if not tables:
            return
        if len(tables) > 1:
            names = ", ".join(one.name for one in tables)
            found.problems.append(
                f"the endpoint has {len(tables)} tables ({names}): keep one, and drop the others, which must be empty"
            )
        found.table = tables[0].name
        ((count,),) = database.query(f"SELECT COUNT(*) FROM {database.table(found.table)}")
        found.stored = int(count)
        if found.stored:
            found.problems.append(f"the table {found.table!r} has {quantity(found.stored, 'timeout')}")


def _drop_table(database_url: str, found: Retirement) -> None:
    assert found.table is not None
    with Database(database_url) as database:
        table = database.table(found.table)
        with database.transaction() as cursor:
            cursor.execute(database.dialect.lock_table.format(table), ())
            cursor.execute(f"SELECT COUNT(*) FROM {table}", ())
            if cursor.fetchall()[0][0]:
                found.problems.append(f"the table {found.table!r} got a timeout just now, and was not dropped")
                return
            cursor.execute(f"DROP TABLE {table}", ())
    found.removed.append(f"table {found.table}")
