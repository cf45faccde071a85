"""The migration of stored timeouts into a delay infrastructure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

from bide.amqp.url import BrokerUrl
from bide.client.client import Client, connect
from bide.delay.allowed_targets import AllowedTargets
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import OutgoingSchedule
from bide.schedules.requests import RequestId
from bide.timeouts.claims import Batch, ClaimedTable
from bide.timeouts.database import Database
from bide.timeouts.messages import timeout_message, timeout_schedule
from bide.timeouts.preview import UNREADABLE_TIME, UNUSABLE_ID
from bide.timeouts.runs import COMPLETED, Runs
from bide.timeouts.tables import (
    EARLIEST,
    LATEST,
    Condition,
    StoredTimeout,
    TimeoutTable,
    check_table,
    check_transactions,
    choose_tables,
    count_unreadable,
    find_tables,
    usable_id_condition,
)
from bide.timeouts.worker_thread import WorkerThread

BATCH: Final = 1_000
"""Rows of a batch. At most two batches are claimed at a time, and the messages of one of them are being sent."""

Past = Literal["leave", "send"]

Progress = Callable[[int, int], None]
"""Called with the number of timeouts sent so far, and the number found at the start."""


@dataclass(slots=True, kw_only=True)
class TimeoutsMigrated:
    """The counts of one process of a run.

    Attributes:
        run: the id of the run.
        sent: timeouts whose messages the broker has confirmed, by endpoint.
        repeated: timeouts that were perhaps sent before: by a process that was killed, or over a connection that was
            lost. Each may arrive twice.
        left: timeouts that cannot be sent, and are still stored, by reason.
        past: timeouts that were due before the run reached them, and are still stored.
        is_finished: whether the run is completed; False if it was stopped.
    """

    run: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    left: Counter[str] = field(default_factory=Counter)
    past: int = 0
    is_finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "run": self.run,
            "sent": dict(self.sent),
            "repeated": self.repeated,
            "left": dict(self.left),
            "past": self.past,
            "finished": self.is_finished,
        }


class TimeoutMigration:
    """Moves the stored timeouts of NServiceBus endpoints into a delay infrastructure.

    The state of the run is in the database; see :mod:`bide.timeouts.runs`. After a kill, run a migration with the same
    arguments again.

    Args:
        database_url: ``postgresql://user:password@host:port/database`` or ``mysql://...``; the tables are looked for in
            the current schema of the connection.
        url: the broker's URL.
        infrastructure: the delay infrastructure; it is declared if it is missing.
        endpoints: the names of endpoints; all endpoints by default.
        table: a table of any other form, instead of the tables of endpoints; see
            :func:`bide.timeouts.tables.mapped_table`.
        cutoff: leave timeouts that are due before this time.
        allow: patterns of the targets that timeouts may have; see :class:`bide.Relay`. The migration sends with its own
            permissions, but the senders of timeouts choose the targets.
        past: what to do with timeouts that are due already: ``leave`` them to the timeout manager, or ``send`` them at
            once.
        keyed: send the timeouts as schedules, which gates deliver, instead of delayed messages; see
            :func:`bide.timeouts.messages.timeout_schedule` for the keys of the schedules.
        progress: called after each batch.

    Attributes:
        done: the counts so far.

    Raises:
        InvalidInputError: a value is invalid.
    """

    def __init__(
        self,
        database_url: str,
        url: str | BrokerUrl,
        infrastructure: DelayInfrastructure,
        *,
        endpoints: Iterable[str] = (),
        table: TimeoutTable | None = None,
        cutoff: datetime | None = None,
        allow: Iterable[str] = ("*",),
        past: Past = "leave",
        keyed: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if past not in ("leave", "send"):
            raise InvalidInputError(f"past is {past!r}: give 'leave' or 'send'")
        if cutoff is not None and cutoff.tzinfo is None:
            raise InvalidInputError(f"the cutoff {cutoff.isoformat()} has no time zone: give an aware datetime")
        self.done = TimeoutsMigrated()
        self._database_url = database_url
        self._url = url if isinstance(url, BrokerUrl) else BrokerUrl.parse(url)
        self._infrastructure = infrastructure
        self._endpoints = sorted(set(endpoints))
        self._table = table
        self._cutoff = cutoff
        self._allowed = AllowedTargets.of(allow)
        self._past = past
        self._keyed = keyed
        self._missing: dict[str, bool] = {}
        self._progress = progress
        self._total = 0
        self._stopping = False

    def stop(self) -> None:
        """Claim no more timeouts, and end when the claimed ones are sent."""
        self._stopping = True

    async def run(self) -> TimeoutsMigrated:
        """Move the timeouts, and return the counts.

        Raises:
            InvalidInputError: the URL of the database cannot be read, or the driver is not installed.
            TimeoutStoreError: the database cannot be reached, refuses, or has no table of an endpoint; another process
                migrates now; or the unfinished run has other parameters.
            BrokerError: the broker cannot be reached, or refuses. Run the migration again.
        """
        async with WorkerThread() as thread:
            database = await thread.run(Database, self._database_url)
            try:
                runs = Runs(database)
                self.done.run, tables = await thread.run(self._begin, database, runs)
                async with connect(self._url, infrastructure=self._infrastructure) as client:
                    for table in tables:
                        await self._move(client, thread, table)
                if not self._stopping:
                    await thread.run(self._end, database, runs, tables)
                    self.done.is_finished = True
            finally:
                await thread.run(database.close)
        return self.done

    @property
    def _earliest(self) -> datetime:
        """The earliest due time of timeouts that may be claimed now."""
        cutoff = self._cutoff or EARLIEST
        return cutoff if self._past == "send" else max(cutoff, datetime.now(UTC))

    def _begin(self, database: Database, runs: Runs) -> tuple[str, list[ClaimedTable]]:
        runs.lock()
        usable = Condition()
        if self._table is None:
            found = choose_tables(find_tables(database), self._endpoints)
        else:
            check_table(database, self._table)
            usable = usable_id_condition(database, self._table)
            found = [self._table]
        for one in found:
            check_transactions(database, one)
        run, tables = runs.begin(self._parameters(), found)
        for table in tables:
            table.open(usable)
            self._total += table.count(self._earliest, LATEST)
        return run, tables

    def _end(self, database: Database, runs: Runs, tables: list[ClaimedTable]) -> None:
        for table in tables:
            if self._past == "leave":
                self.done.past += table.count(self._cutoff or EARLIEST, datetime.now(UTC))
            if unreadable := count_unreadable(database, table.table):
                self.done.left[UNREADABLE_TIME] += unreadable
            if unusable := table.count_unusable(self._cutoff or EARLIEST):
                self.done.left[UNUSABLE_ID] += unusable
        runs.end(self.done.run, COMPLETED)

    def _parameters(self) -> dict[str, Any]:
        """The parameters of the run, which must be the same when it is continued."""
        hosts = ",".join(f"{host}:{port}" for host, port in self._url.hosts)
        return {
            "endpoints": self._endpoints,
            "table": None if self._table is None else asdict(self._table),
            "cutoff": None if self._cutoff is None else self._cutoff.astimezone(UTC).isoformat(),
            "past": self._past,
            "allow": sorted(self._allowed.patterns),
            "keyed": self._keyed,
            "layout": repr(self._infrastructure),
            "broker": f"{hosts} {self._url.vhost}",
        }

    # -- one endpoint

    async def _move(self, client: Client, thread: WorkerThread, table: ClaimedTable) -> None:
        for interrupted in await thread.run(lambda: list(table.interrupted())):
            await self._send(client, thread, table, interrupted)
            self.done.repeated += len(interrupted.rows)
        claiming = self._claim(thread, table)
        while claiming is not None and (batch := await claiming) is not None:
            # The next batch is claimed while this one is sent.
            claiming = self._claim(thread, table)
            await self._send(client, thread, table, batch)

    def _claim(self, thread: WorkerThread, table: ClaimedTable) -> asyncio.Future[Batch | None] | None:
        return None if self._stopping else thread.run(table.claim, self._earliest, BATCH)

    def _makers(
        self, table: ClaimedTable, batch: Batch
    ) -> Iterator[tuple[StoredTimeout, Callable[[StoredTimeout], OutgoingMessage | OutgoingSchedule]]]:
        """The rows of a batch, each with the function that makes its message."""
        if not self._keyed:
            now, max_delay = datetime.now(UTC), self._infrastructure.max_delay
            make = partial(timeout_message, now=now, max_delay=max_delay, allowed=self._allowed)
            yield from ((row, make) for row in batch.rows)
            return
        # Rows of an interrupted batch get the same numbers again, so that gates ignore those that were sent before.
        endpoint, session = table.table.endpoint, table.session(batch)
        for number, row in enumerate(sorted(batch.rows, key=lambda one: str(one.id)), 1):
            request = RequestId(session, number)
            yield row, partial(timeout_schedule, endpoint=endpoint, request=request, allowed=self._allowed)

    async def _is_missing(self, client: Client, queue: str) -> bool:
        """Whether a queue does not exist. Each queue is checked once. A gate would set messages for it aside."""
        if queue not in self._missing:
            self._missing[queue] = not await client.exists(queue)
        return self._missing[queue]

    async def _send(self, client: Client, thread: WorkerThread, table: ClaimedTable, batch: Batch) -> None:
        """Send the messages of a batch, and finish it when they are confirmed."""
        left: dict[Any, str] = {}
        messages: list[OutgoingMessage | OutgoingSchedule] = []
        ids: list[Any] = []
        for row, make in self._makers(table, batch):
            try:
                message = make(row)
                if self._keyed and await self._is_missing(client, str(message.to)):
                    raise InvalidInputError(f"the queue {message.to!r} does not exist")
            except InvalidInputError as error:
                left[row.id] = str(error)
            else:
                messages.append(message)
                ids.append(row.id)
        resent = 0
        async for result in client.publish_many(messages):
            resent += result.attempts > 1
            if result.error is not None:
                left[ids[result.position]] = str(result.error)
        await thread.run(table.finish, batch, left, resent)
        self.done.repeated += resent
        self.done.sent[table.table.endpoint] += len(batch.rows) - len(left)
        self.done.left.update(left.values())
        if self._progress is not None:
            sent = self.done.sent.total()
            self._progress(sent, max(self._total, sent))
