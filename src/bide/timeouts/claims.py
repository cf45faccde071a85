"""The claimed rows of one endpoint in a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bide.errors import TimeoutStoreError
from bide.timeouts.database import Database
from bide.timeouts.dialects import Cursor
from bide.timeouts.tables import LATEST, Condition, StoredTimeout, TimeoutTable, database_time, stored_timeout

ENDPOINTS: Final = "bide_timeout_endpoints"
"""The table of the endpoints of all runs."""

CLAIMED: Final = 0
SENT: Final = 1
LEFT: Final = 2
"""Values of the column ``bide_status`` of a claimed row."""

_OWN_COLUMNS: Final = frozenset({"bide_number", "bide_batch", "bide_status", "bide_reason"})
"""Columns that a table of claimed rows has besides those of the table of timeouts."""

_MAX_REASON: Final = 500

_ANY: Final = Condition()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that one transaction has claimed.

    Attributes:
        number: its number among the batches of the same table.
        rows: the timeouts.
    """

    number: int
    rows: list[StoredTimeout]


@dataclass(slots=True, kw_only=True)
class EndpointStatus:
    """The counts of one endpoint in a run.

    Attributes:
        sent: timeouts whose messages the broker has confirmed.
        claimed: timeouts that are claimed and not known to be sent.
        repeated: timeouts that were sent again because a process was killed, or that were restored by an abort after
            they were claimed: each of them may arrive twice.
        left: timeouts that could not be sent and were put back into the endpoint's table, by reason. Those that were
            not claimed, because of their ids or due times, are only counted by the migration.
    """

    endpoint: str
    sent: int
    claimed: int
    repeated: int
    left: dict[str, int]


class ClaimedTable:
    """The claimed rows of one endpoint in a run.

    Args:
        database: the connection.
        run: the id of the run.
        number: the number of the endpoint in the run.
        table: the endpoint's table.
    """

    def __init__(self, database: Database, run: str, number: int, table: TimeoutTable) -> None:
        self.table = table
        self._database = database
        self._key = (run, number)
        quote = database.dialect.quote
        self._source = database.table(table.name)
        self._claims_name = f"bide_timeouts_{run}_{number}"
        self._claims = database.table(self._claims_name)
        self._endpoints = database.table(ENDPOINTS)
        self._id, self._time = quote(table.id), quote(table.time)
        self._is_time = database.dialect.is_time.format(self._time)
        self._read = table.selection(quote)
        self._usable = _ANY
        self._batch = 0
        self._after: datetime | None = None
        self._all = ""

    def open(self, usable: Condition = _ANY) -> None:
        """Read the columns of the table, and the number of the last batch.

        Args:
            usable: a condition for rows that can be claimed; see :func:`bide.timeouts.tables.usable_id_condition`.

        Raises:
            TimeoutStoreError: a table was dropped, or its columns were changed, since the run began.
        """
        self._usable = usable
        with self._database.transaction() as cursor:
            columns = self._columns(cursor, self.table.name)
            claimed = self._columns(cursor, self._claims_name).keys() - _OWN_COLUMNS
            if added := sorted(columns.keys() - claimed):
                raise TimeoutStoreError(
                    f"the table {self.table.name!r} got the column {added[0]!r} after the unfinished run began: end "
                    "this run with bide.timeouts.abort_run(...), and begin a new one"
                )
            self._check_dropped(claimed - columns.keys())
            self._all = self._quoted(columns)
            cursor.execute(f"SELECT COALESCE(MAX(bide_batch), 0) FROM {self._claims}", ())
            self._batch = int(cursor.fetchall()[0][0])

    def create(self, cursor: Cursor) -> None:
        """Create the table of claimed rows."""
        columns = self._quoted(self._columns(cursor, self.table.name))
        for statement in self._database.dialect.claim_table(self._claims, self._source, columns, self._id):
            cursor.execute(statement, ())

    def _columns(self, cursor: Cursor, table: str) -> dict[str, str | None]:
        """The columns of a table with the expressions of those that the server computes.

        Raises:
            TimeoutStoreError: the table does not exist.
        """
        cursor.execute(
            "SELECT column_name, generation_expression FROM information_schema.columns "
            "WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
            (self._database.schema, table),
        )
        expressions = dict(cursor.fetchall())
        if not expressions:
            way_out = (
                "end the run with bide.timeouts.abort_run(...)"
                if table == self._claims_name
                else f"create it again, or drop the table {self._claims_name!r} of its claimed rows to give them up, "
                "and end the run with bide.timeouts.abort_run(...)"
            )
            raise TimeoutStoreError(f"the table {table!r} of an unfinished run does not exist: {way_out}")
        cursor.execute(f"SELECT * FROM {self._database.table(table)} WHERE 1 = 0", ())
        cursor.fetchall()
        names = [one[0] for one in cursor.description]
        # MySQL and MariaDB leave invisible columns out of ``*``.
        names += [name for name in expressions if name not in names]
        return {name: expressions.get(name) for name in names}

    def _check_dropped(self, columns: Iterable[str]) -> None:
        """Check that the endpoint's table has all columns of the claimed rows.

        Raises:
            TimeoutStoreError: there are such columns.
        """
        if dropped := sorted(columns):
            raise TimeoutStoreError(
                f"the table {self.table.name!r} lost the column {dropped[0]!r} after the unfinished run began: add it "
                f"again, or drop it from the table {self._claims_name!r} of the claimed rows too"
            )

    def _quoted(self, names: Iterable[str]) -> str:
        return ", ".join(map(self._database.dialect.quote, names))

    def interrupted(self) -> Iterator[Batch]:
        """The batches that an earlier process claimed and did not finish. They count as repeated."""
        numbers = self._database.query(
            f"SELECT DISTINCT bide_batch FROM {self._claims} WHERE bide_status = %s ORDER BY bide_batch",
            (CLAIMED,),
        )
        for (number,) in numbers:
            with self._database.transaction() as cursor:
                cursor.execute(
                    f"SELECT {self._read} FROM {self._claims} WHERE bide_status = %s AND bide_batch = %s",
                    (CLAIMED, number),
                )
                rows = [stored_timeout(row) for row in cursor.fetchall()]
                self._add(cursor, "repeated", len(rows))
            yield Batch(int(number), rows)

    def session(self, batch: Batch) -> str:
        """A name of a batch that is unique among all runs."""
        run, number = self._key
        return f"{run}n{number}b{batch.number}"

    def claim(self, earliest: datetime, size: int) -> Batch | None:
        """Claim the next rows, in the order of their due times; None if there are none.

        Args:
            earliest: rows that are due before this time are not claimed.
            size: the maximum number of rows.
        """
        batch = self._claim_from(max(earliest, self._after or earliest), size)
        if batch is None and self._after is not None:
            # Meanwhile, endpoints may have stored timeouts that are due before the last claimed one.
            self._after = None
            batch = self._claim_from(earliest, size)
        if batch is not None:
            self._after = batch.rows[-1].due
        return batch

    def _claim_from(self, earliest: datetime, size: int) -> Batch | None:
        # MariaDB locks the index of due times first, then the row. An endpoint that deletes a row locks the row first,
        # so the two can deadlock.
        return self._database.repeat_after_deadlocks(lambda: self._try_claim(earliest, size))

    def _try_claim(self, earliest: datetime, size: int) -> Batch | None:
        with self._database.transaction() as cursor:
            cursor.execute(
                f"SELECT {self._read} FROM {self._source} source WHERE {self._time} >= %s AND {self._time} <= %s "
                f"AND {self._is_time} AND {self._usable.sql} AND NOT EXISTS (SELECT 1 FROM {self._claims} claims "
                f"WHERE claims.{self._id} = source.{self._id} AND claims.bide_status = %s) "
                f"ORDER BY {self._time} LIMIT {size} "
                "FOR UPDATE SKIP LOCKED",
                (database_time(earliest), database_time(LATEST), *self._usable.values, LEFT),
            )
            rows = [stored_timeout(row) for row in cursor.fetchall()]
            if not rows:
                return None
            number = self._batch + 1
            ids = [row.id for row in rows]
            marks = ", ".join(["%s"] * len(ids))
            cursor.execute(
                f"INSERT INTO {self._claims} ({self._all}, bide_batch, bide_status) "
                f"SELECT {self._all}, {number}, {CLAIMED} FROM {self._source} WHERE {self._id} IN ({marks})",
                ids,
            )
            copied = cursor.rowcount
            cursor.execute(f"DELETE FROM {self._source} WHERE {self._id} IN ({marks})", ids)
            deleted = cursor.rowcount
            cursor.execute(
                f"SELECT COUNT(DISTINCT {self._id}) FROM {self._claims} WHERE bide_status = %s AND bide_batch = %s",
                (CLAIMED, number),
            )
            ((distinct,),) = cursor.fetchall()
            if not distinct == copied == deleted == len(ids):
                raise TimeoutStoreError(
                    f"an id of the table {self.table.name!r} became missing or equal to another one: {len(ids)} rows "
                    f"were read, {copied} copied and {deleted} deleted, with {distinct} ids. Nothing of this batch was "
                    "changed. Run the migration again: it leaves such rows"
                )
        self._batch = number
        return Batch(number, rows)

    def finish(self, batch: Batch, left: Mapping[Any, str], resent: int) -> None:
        """Mark the rows of a batch as sent, and put back those that cannot be sent.

        Args:
            batch: the batch. The broker has confirmed the messages of all rows that are not in ``left``.
            left: the reason for each row that cannot be sent, by the id of the row.
            resent: the number of messages that were sent more than once.
        """
        with self._database.transaction() as cursor:
            if left:
                ids = list(left)
                self._restore(
                    cursor,
                    f"{self._id} IN ({', '.join(['%s'] * len(ids))}) AND bide_batch = %s AND bide_status = %s",
                    (*ids, batch.number, CLAIMED),
                )
                for identity, reason in left.items():
                    cursor.execute(
                        f"UPDATE {self._claims} SET bide_status = %s, bide_reason = %s "
                        f"WHERE {self._id} = %s AND bide_batch = %s",
                        (LEFT, reason[:_MAX_REASON], identity, batch.number),
                    )
            cursor.execute(
                f"UPDATE {self._claims} SET bide_status = %s WHERE bide_status = %s AND bide_batch = %s",
                (SENT, CLAIMED, batch.number),
            )
            self._add(cursor, "sent", cursor.rowcount)
            self._add(cursor, "repeated", resent)

    def restore_claimed(self) -> int:
        """Put back all claimed rows that were not sent, and return their number."""
        if not self._database.has_table(self._claims_name):
            return 0
        with self._database.transaction() as cursor:
            number = self._restore(cursor, "bide_status = %s", (CLAIMED,))
            cursor.execute(f"DELETE FROM {self._claims} WHERE bide_status = %s", (CLAIMED,))
            self._add(cursor, "repeated", number)
        return number

    def count(self, earliest: datetime, latest: datetime) -> int:
        """The number of stored timeouts that are due between two times, and can be claimed."""
        return self._count(earliest, latest, self._usable)

    def count_unusable(self, earliest: datetime) -> int:
        """The number of stored timeouts that are due from a time on, and cannot be claimed because of their ids."""
        # The condition is NULL for a row that has lost its id since the start.
        return self._count(earliest, LATEST, self._usable._replace(sql=f"({self._usable.sql}) IS NOT TRUE"))

    def _count(self, earliest: datetime, latest: datetime, condition: Condition) -> int:
        ((number,),) = self._database.query(
            f"SELECT COUNT(*) FROM {self._source} WHERE {self._time} >= %s AND {self._time} <= %s AND {self._is_time} "
            f"AND {condition.sql}",
            (database_time(earliest), database_time(latest), *condition.values),
        )
        return int(number)

    def status(self) -> EndpointStatus:
        """The counts. Without the claimed rows, which a user may have deleted, some of them are zero."""
        exists = self._database.has_table(self._claims_name)
        with self._database.transaction() as cursor:
            cursor.execute(
                f"SELECT sent, repeated FROM {self._endpoints} WHERE run_id = %s AND number = %s",
                self._key,
            )
            ((sent, repeated),) = cursor.fetchall()
            counts: list[tuple[Any, ...]] = []
            if exists:
                cursor.execute(
                    f"SELECT bide_status, bide_reason, COUNT(*) FROM {self._claims} WHERE bide_status <> %s "
                    "GROUP BY bide_status, bide_reason ORDER BY bide_reason",
                    (SENT,),
                )
                counts += cursor.fetchall()
        return EndpointStatus(
            endpoint=self.table.endpoint,
            sent=int(sent),
            repeated=int(repeated),
            claimed=sum(count for status, _, count in counts if status == CLAIMED),
            left={str(reason): int(count) for status, reason, count in counts if status == LEFT},
        )

    def _restore(self, cursor: Cursor, condition: str, values: Sequence[Any]) -> int:
        cursor.execute(f"SELECT COUNT(*) FROM {self._claims} WHERE {condition}", values)
        if not cursor.fetchall()[0][0]:
            # Nothing to put back: the endpoint's table may have been dropped.
            return 0
        # The claimed rows have the columns of the time when the run began.
        claimed = self._columns(cursor, self._claims_name).keys() - _OWN_COLUMNS
        # The server computes generated columns itself, and refuses values for them.
        columns = self._columns(cursor, self.table.name)
        self._check_dropped(claimed - columns.keys())
        generated = {name for name, expression in columns.items() if expression}
        names = self._quoted(sorted(claimed - generated))
        cursor.execute(
            f"INSERT INTO {self._source} ({names}) {self._database.dialect.overriding} "
            f"SELECT {names} FROM {self._claims} WHERE {condition}",
            values,
        )
        return cursor.rowcount

    def _add(self, cursor: Cursor, column: str, number: int) -> None:
        cursor.execute(
            f"UPDATE {self._endpoints} SET {column} = {column} + %s WHERE run_id = %s AND number = %s",
            (number, *self._key),
        )
