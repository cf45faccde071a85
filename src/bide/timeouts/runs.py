"""Runs of a migration of timeouts: their state in the database.

A run moves rows from the tables of timeouts in batches. One transaction claims a batch: it copies the rows into a table
of the run and deletes them from the endpoint's table, so that no timeout manager sees them. When their messages are
confirmed, a second transaction marks the rows as sent. Rows that cannot be sent go back into the endpoint's table in
the same transaction, and the run does not claim them again. After a kill, the rows that are claimed and not sent are
sent again. The claimed rows of a finished run remain as its history.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from bide.errors import TimeoutStoreError
from bide.timeouts.claims import ENDPOINTS, ClaimedTable, EndpointStatus
from bide.timeouts.database import Database
from bide.timeouts.dialects import Cursor
from bide.timeouts.tables import TimeoutTable, database_time

RUNS: Final = "bide_timeout_runs"

RUNNING: Final = "running"
COMPLETED: Final = "completed"
ABORTED: Final = "aborted"

_LOCK_SECONDS: Final = 3.0
_LOCK_PAUSE: Final = 0.1
"""Seconds until a lock that another process holds is tried again."""


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """One run.

    Attributes:
        run: its id.
        status: ``running`` (also if it was interrupted), ``completed`` or ``aborted``.
        parameters: the arguments of the migration.
        ended_at: None while the run is unfinished.
    """

    run: str
    status: str
    parameters: Mapping[str, Any]
    started_at: datetime
    ended_at: datetime | None
    endpoints: list[EndpointStatus] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON."""
        return {
            "run": self.run,
            "status": self.status,
            "parameters": dict(self.parameters),
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "endpoints": [
                {
                    "endpoint": one.endpoint,
                    "sent": one.sent,
                    "claimed": one.claimed,
                    "repeated": one.repeated,
                    "left": one.left,
                }
                for one in self.endpoints
            ],
        }


class Runs:
    """The runs of a database. Only one process at a time may change them.

    Args:
        database: the connection.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._runs, self._endpoints = database.table(RUNS), database.table(ENDPOINTS)

    def lock(self) -> None:
        """Keep other processes from migrating, until the connection ends.

        The server releases the lock a moment after its process has ended, so this method tries for a few seconds.

        Raises:
            TimeoutStoreError: another process migrates.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise TimeoutStoreError(
                    "another process migrates the timeouts of this database now: wait for its end, or stop it"
                )
            time.sleep(_LOCK_PAUSE)  # before the next attempt

    def _try_lock(self) -> bool:
        with self._database.transaction() as cursor:
            return self._database.dialect.lock(cursor, self._database.schema)

    def exist(self) -> bool:
        """Whether this database has any runs."""
        return self._database.has_table(RUNS)

    def begin(self, parameters: Mapping[str, Any], tables: Sequence[TimeoutTable]) -> tuple[str, list[ClaimedTable]]:
        """Continue the unfinished run, or begin a new one.

        Args:
            parameters: the arguments of the migration, as JSON.
            tables: the tables of the run. An unfinished run gets those that it does not have yet.

        Returns:
            the id of the run, and its tables.

        Raises:
            TimeoutStoreError: the unfinished run has other parameters.
        """
        dialect = self._database.dialect
        with self._database.transaction() as cursor:
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._runs} (run_id varchar(32) PRIMARY KEY, "
                f"status varchar(16) NOT NULL, parameters {dialect.text} NOT NULL, "
                f"started_at {dialect.moment} NOT NULL, ended_at {dialect.moment})",
                (),
            )
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._endpoints} (run_id varchar(32) NOT NULL, number int NOT NULL, "
                f"source {dialect.text} NOT NULL, sent bigint NOT NULL, repeated bigint NOT NULL, "
                "PRIMARY KEY (run_id, number))",
                (),
            )
            run = self._unfinished(cursor)
            if run is not None and run.parameters != parameters:
                differing = [name for name in parameters if parameters[name] != run.parameters.get(name)]
                shown = "; ".join(
                    f"{name} is {_shown(parameters[name])}, and was {_shown(run.parameters.get(name))}"
                    for name in differing
                )
                raise TimeoutStoreError(
                    f"the unfinished run {run.run} has other parameters: {shown}. Give the same ones to continue it, "
                    "or end it with bide.timeouts.abort_run(...)"
                )
            if run is None:
                run = RunStatus(
                    run=os.urandom(4).hex(),
                    status=RUNNING,
                    parameters=parameters,
                    started_at=datetime.now(UTC),
                    ended_at=None,
                )
                cursor.execute(
                    f"INSERT INTO {self._runs} (run_id, status, parameters, started_at) VALUES (%s, %s, %s, %s)",
                    (run.run, RUNNING, json.dumps(parameters), database_time(run.started_at)),
                )
            known = self._tables(cursor, run.run)
            claimed = [ClaimedTable(self._database, run.run, number, table) for number, table in known.items()]
            for table in tables:
                if table not in known.values():
                    one = ClaimedTable(self._database, run.run, len(claimed), table)
                    one.create(cursor)
                    cursor.execute(
                        f"INSERT INTO {self._endpoints} (run_id, number, source, sent, repeated) "
                        "VALUES (%s, %s, %s, 0, 0)",
                        (run.run, len(claimed), _table_as_json(table)),
                    )
                    claimed.append(one)
        return run.run, claimed

    def end(self, run: str, status: str) -> None:
        """Record that a run has ended."""
        with self._database.transaction() as cursor:
            cursor.execute(
                f"UPDATE {self._runs} SET status = %s, ended_at = %s WHERE run_id = %s",
                (status, database_time(datetime.now(UTC)), run),
            )

    def unfinished(self) -> tuple[str, list[ClaimedTable]] | None:
        """The id of the unfinished run, and its tables; None if there is no unfinished run."""
        if not self.exist():
            return None
        with self._database.transaction() as cursor:
            run = self._unfinished(cursor)
            if run is None:
                return None
            tables = self._tables(cursor, run.run)
        return run.run, [ClaimedTable(self._database, run.run, number, table) for number, table in tables.items()]

    def all(self) -> list[RunStatus]:
        """All runs with their counts, oldest first."""
        if not self.exist():
            return []
        with self._database.transaction() as cursor:
            runs = self._read_runs(cursor)
            tables = {run.run: self._tables(cursor, run.run) for run in runs}
        for run in runs:
            for number, table in tables[run.run].items():
                run.endpoints.append(ClaimedTable(self._database, run.run, number, table).status())
        return runs

    def _unfinished(self, cursor: Cursor) -> RunStatus | None:
        return next((one for one in self._read_runs(cursor) if one.status == RUNNING), None)

    def _read_runs(self, cursor: Cursor) -> list[RunStatus]:
        cursor.execute(
            f"SELECT run_id, status, parameters, started_at, ended_at FROM {self._runs} ORDER BY started_at",
            (),
        )
        return [
            RunStatus(
                run=run,
                status=status,
                parameters=json.loads(parameters),
                started_at=started.replace(tzinfo=UTC),
                ended_at=None if ended is None else ended.replace(tzinfo=UTC),
            )
            for run, status, parameters, started, ended in cursor.fetchall()
        ]

    def _tables(self, cursor: Cursor, run: str) -> dict[int, TimeoutTable]:
        cursor.execute(
            f"SELECT number, source FROM {self._endpoints} WHERE run_id = %s ORDER BY number",
            (run,),
        )
        return {int(number): TimeoutTable(**json.loads(source)) for number, source in cursor.fetchall()}


def list_runs(url: str) -> list[RunStatus]:
    """All runs in a database, oldest first. Nothing is changed.

    Raises:
        InvalidInputError: the URL of the database cannot be read, or the driver is not installed.
        TimeoutStoreError: the database cannot be reached, or refuses.
    """
    with Database(url) as database:
        return Runs(database).all()


def abort_run(url: str) -> RunStatus:
    """End the unfinished run, and put back the claimed rows that are not known to be sent.

    Timeouts that were sent stay sent. A restored timeout may arrive twice: a process that was killed may have sent it
    before it could record that.

    Returns:
        the run as it is now.

    Raises:
        InvalidInputError: the URL of the database cannot be read, or the driver is not installed.
        TimeoutStoreError: there is no unfinished run, or a process migrates now; or the database cannot be reached, or
            refuses.
    """
    with Database(url) as database:
        runs = Runs(database)
        runs.lock()
        if (found := runs.unfinished()) is None:
            raise TimeoutStoreError("there is no unfinished run in this database: nothing to abort")
        run, tables = found
        for table in tables:
            table.restore_claimed()
        runs.end(run, ABORTED)
        return next(one for one in runs.all() if one.run == run)


def _shown(value: Any) -> str:
    return json.dumps(value)


def _table_as_json(table: TimeoutTable) -> str:
    return json.dumps(asdict(table))
