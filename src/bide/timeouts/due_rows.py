"""The due rows of a table of timeouts, locked while their messages are sent."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, Final

from bide.errors import TimeoutStoreError
from bide.timeouts.database import Database
from bide.timeouts.dialects import Cursor
from bide.timeouts.tables import EARLIEST, StoredTimeout, TimeoutTable, database_time, stored_timeout

_SAGA: Final = "SagaId"


class DueRows:
    """The due rows of one table. Other processes skip the rows that this one has locked.

    Args:
        database: the connection. Use it for nothing else between :meth:`lock` and :meth:`delete`.
        table: the table.
    """

    def __init__(self, database: Database, table: TimeoutTable) -> None:
        self._database = database
        quote = database.dialect.quote
        self._name, self._read = database.table(table.name), table.selection(quote)
        self._id, self._time, self._saga = quote(table.id), quote(table.time), quote(_SAGA)
        self._is_time = database.dialect.is_time.format(self._time)
        self._transaction: ExitStack | None = None
        self._cursor: Cursor | None = None
        self._locked: list[StoredTimeout] = []
        self._behind: tuple[datetime, Any] | None = None

    def lock(self, size: int) -> list[StoredTimeout]:
        """Begin a transaction and lock the next due rows. If there are any, call :meth:`delete` to end the transaction.

        Args:
            size: the maximum number of rows.
        """
        # Nothing of these rows was sent yet, so after a deadlock they are locked again.
        return self._database.repeat_after_deadlocks(lambda: self._try_lock(size))

    def _try_lock(self, size: int) -> list[StoredTimeout]:
        earliest, condition, values = EARLIEST, "", list[Any]()
        if self._behind is not None:
            earliest, identity = self._behind
            condition, values = f"AND ({self._time} > %s OR {self._id} > %s) ", [database_time(earliest), identity]
        with ExitStack() as stack:
            cursor = stack.enter_context(self._database.transaction())
            cursor.execute(
                f"SELECT {self._read} FROM {self._name} WHERE {self._time} >= %s AND {self._time} <= %s {condition}"
                f"AND {self._is_time} ORDER BY {self._time}, {self._id} LIMIT {size} FOR UPDATE SKIP LOCKED",
                (database_time(earliest), database_time(datetime.now(UTC)), *values),
            )
            self._locked = [stored_timeout(row) for row in cursor.fetchall()]
            if self._locked:
                self._cursor, self._transaction = cursor, stack.pop_all()
        return self._locked

    def delete(self, ids: Collection[Any]) -> None:
        """Delete sent rows, and release the others. The next :meth:`lock` begins after the last released row."""
        cursor, transaction = self._cursor, self._transaction
        assert cursor is not None
        assert transaction is not None
        self._cursor = self._transaction = None
        for row in self._locked:
            if row.id not in ids:
                self._behind = row.due, row.id
        try:
            with transaction:
                self._delete(cursor, ids)
        except TimeoutStoreError as error:
            if not self._database.is_deadlock(error):
                raise
            # The timeouts of a saga are being deleted. The rows are no longer locked, but their messages were sent:
            # until they are deleted, another process can lock them and send them again.
            self._database.repeat_after_deadlocks(lambda: self._delete_again(ids))

    def _delete_again(self, ids: Collection[Any]) -> None:
        with self._database.transaction() as cursor:
            self._delete(cursor, ids)

    def _delete(self, cursor: Cursor, ids: Collection[Any]) -> None:
        for identity in ids:
            # One by one, because for many ids MariaDB may scan the table and wait for rows that other processes have
            # locked, which can deadlock.
            cursor.execute(f"DELETE FROM {self._name} WHERE {self._id} = %s", (identity,))

    def restart(self) -> None:
        """Let the next :meth:`lock` begin with the first due row again."""
        self._behind = None

    def clear_saga(self, saga: str) -> None:
        """Delete the timeouts of a saga."""
        # The deletion locks the index of sagas first, then the row. A dispatcher has locked the row first.
        self._database.repeat_after_deadlocks(lambda: self._clear_saga(saga))

    def _clear_saga(self, saga: str) -> None:
        with self._database.transaction() as cursor:
            cursor.execute(f"DELETE FROM {self._name} WHERE {self._saga} = %s", (saga,))
