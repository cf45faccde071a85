"""The schedules that wait, in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from bide.gate.sql_conditions import others, where_of
from bide.schedules.due_times import DueTimes
from bide.schedules.entries import WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import OTHER_TARGETS, TimeGrid, TimelineCount

_WAITING: Final = (
    "SELECT key, id, version, target, routing_key, nominal, due, recurrence, is_paused, resumed_at, properties, body "
    "FROM waiting "
)
_WAITING_WITHOUT_MESSAGE: Final = _WAITING.replace("properties, body", "x'0000', x''")
_DUE_TIMES: Final = "SELECT target, due FROM waiting INDEXED BY waiting_by_due WHERE NOT is_paused ORDER BY due"
_DUE_TIMES_BY_KEY: Final = "SELECT target, due FROM waiting INDEXED BY waiting_by_key "
_PAUSED_DUE_TIMES: Final = "SELECT target, due FROM waiting INDEXED BY paused WHERE is_paused"
_KEYS: Final = "SELECT key FROM waiting INDEXED BY waiting_by_key "
_INSERT: Final = "INSERT INTO waiting VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_LOOKED_UP: Final = 500
"""Keys that one query looks up. SQLite before 3.32 takes 999 values at most."""

_SELECTED: Final = 500
_SELECTED_BYTES: Final = 4_000_000
"""Schedules, and bytes of messages, that are read at once when a filter matches many."""


class WaitingTable:
    """The schedules that wait, on a connection. Changes belong to its transaction.

    Schedules under keys that :meth:`look_ahead` has not found are added together, before the next query.

    Args:
        connection: a connection to a database with :data:`bide.gate.index_schema.SCHEMA`.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self._times: DueTimes | None = None
        self._added: dict[str, WaitingSchedule] = {}
        """Schedules that are not in the table yet, by key."""
        self._absent = set[str]()
        """Keys that are not in the table, including those of the added schedules."""

    def forget_waiting(self) -> None:
        """Drop added schedules and cached values, after a rollback or a change of the table from outside."""
        self._times = None
        self._added.clear()
        self._absent.clear()

    def write_waiting(self) -> None:
        """Write the added schedules."""
        added = list(map(_row, self._added.values()))
        self._added.clear()
        self._absent.clear()
        if added:
            self._sql.executemany(_INSERT, added)

    def look_ahead(self, keys: Sequence[str]) -> None:
        """Look up keys under which schedules may be added next. One query takes less time than one for each key."""
        self.write_waiting()
        found = set[str]()
        for start in range(0, len(keys), _LOOKED_UP):
            part = keys[start : start + _LOOKED_UP]
            places = ", ".join("?" * len(part))
            found.update(key for (key,) in self._sql.execute(_KEYS + f"WHERE key IN ({places})", part))
        self._absent = set(keys) - found

    def _query(self, query: str, values: Iterable[str | int] = ()) -> sqlite3.Cursor:
        self.write_waiting()
        return self._sql.execute(query, tuple(values))

    # -- one schedule

    def waiting(self, key: str) -> WaitingSchedule | None:
        """The schedule that waits under a key."""
        if key in self._absent:
            return self._added.get(key)
        row = self._sql.execute(_WAITING + "WHERE key = ?", (key,)).fetchone()
        return None if row is None else _waiting(row)

    def put_waiting(self, entry: WaitingSchedule) -> None:
        """Add or replace a schedule."""
        key, is_absent = entry.key, entry.key in self._absent
        before: tuple[str, int] | None
        if is_absent:
            added = self._added.get(key)
            before = None if added is None else (added.target, added.due)
        else:
            before = self._sql.execute("SELECT target, due FROM waiting WHERE key = ?", (key,)).fetchone()
        if before is not None:
            self.remove_waiting(key, *before)
        if self._times is not None:
            self._times.add(entry.target, entry.due)
        if is_absent:
            self._added[key] = entry
        else:
            self._sql.execute(_INSERT, _row(entry))

    def remove_waiting(self, key: str, target: str, due: int) -> None:
        """Remove an existing schedule."""
        if self._added.pop(key, None) is None:
            self._sql.execute("DELETE FROM waiting WHERE key = ?", (key,))
        if self._times is not None:
            self._times.remove(target, due)

    # -- several schedules

    def select(self, wanted: ScheduleFilter) -> Iterator[WaitingSchedule]:
        """The waiting schedules that a filter matches, by key.

        Schedules up to the last one that was returned may be changed meanwhile. The schedules are read in parts,
        because all their messages may not fit into memory.
        """
        after = None
        while True:
            part, size = list[WaitingSchedule](), 0
            for one in self.page(wanted, after=after, limit=_SELECTED):
                part.append(one)
                size += len(one.message.body)
                if size > _SELECTED_BYTES:
                    break
            if not part:
                return
            yield from part
            after = part[-1].key

    def page(
        self,
        wanted: ScheduleFilter,
        *,
        after: str | None = None,
        limit: int,
        with_messages: bool = True,
        is_recurring: bool = False,
    ) -> Iterator[WaitingSchedule]:
        """The first waiting schedules that a filter matches, by key, one by one.

        Args:
            after: the last key of the page before.
            is_recurring: whether only recurring schedules match.
        """
        where, values = where_of(wanted, after)
        columns = _WAITING if with_messages else _WAITING_WITHOUT_MESSAGE
        # Without the hint, SQLite may walk through the whole index by due time and sort.
        index, only = ("recurring", "recurrence IS NOT NULL AND ") if is_recurring else ("waiting_by_key", "")
        query = columns.rstrip() + f" INDEXED BY {index} WHERE {only}{where} ORDER BY key LIMIT ?"
        return (_waiting(row) for row in self._query(query, (*values, limit)))

    def due(self, now: int, *, without: Collection[str] = (), limit: int) -> list[WaitingSchedule]:
        """Schedules that are due and not paused, by due time, without their messages.

        Args:
            now: the time in milliseconds since the Unix epoch.
            without: targets to leave out.
        """
        query = _WAITING_WITHOUT_MESSAGE + f"WHERE NOT is_paused AND due <= ? {others(without)}ORDER BY due LIMIT ?"
        return [_waiting(row) for row in self._query(query, (now, *without, limit))]

    def next_due(self, *, without: Collection[str] = ()) -> int | None:
        """The earliest due time of a schedule that is not paused, in milliseconds since the Unix epoch.

        Args:
            without: targets to leave out.
        """
        query = f"SELECT due FROM waiting WHERE NOT is_paused {others(without)}ORDER BY due LIMIT 1"
        row = self._query(query, tuple(without)).fetchone()
        return None if row is None else int(row[0])

    def all_waiting(self) -> Iterator[WaitingSchedule]:
        """All schedules, by key."""
        return (_waiting(row) for row in self._query(_WAITING + "ORDER BY key"))

    @property
    def waiting_count(self) -> int:
        """The number of schedules that wait."""
        return len(self._due_times)

    @property
    def _due_times(self) -> DueTimes:
        """The due times of all schedules. They are read once, and then kept up to date with each change."""
        if self._times is None:
            self._times = DueTimes(self._query(_DUE_TIMES))
            for target, due in self._query(_PAUSED_DUE_TIMES):
                self._times.add(target, due)
        return self._times

    def number(self, wanted: ScheduleFilter, *, is_paused: bool = False) -> int:
        """The number of waiting schedules that a filter matches.

        Args:
            is_paused: whether only paused schedules match.
        """
        if not (wanted.prefix or is_paused):
            return sum(one.count for one in self.span(wanted))
        where, values = where_of(wanted)
        rows = "INDEXED BY paused WHERE is_paused AND" if is_paused else "INDEXED BY waiting_by_key WHERE"
        found: int = self._query(f"SELECT count(*) FROM waiting {rows} {where}", values).fetchone()[0]
        return found

    def timeline(self, wanted: ScheduleFilter, grid: TimeGrid) -> Iterator[TimelineCount]:
        """The numbers of waiting schedules that a filter matches, by target and interval."""
        times = self._due_times
        if wanted.prefix:
            where, values = where_of(wanted)
            times = DueTimes(self._query(_DUE_TIMES_BY_KEY + f"WHERE {where} ORDER BY due", values))
        return times.timeline(wanted, grid)

    def span(self, wanted: ScheduleFilter) -> tuple[TimelineCount, ...]:
        """The number, and the first and the last due time, of all waiting schedules that a filter matches."""
        if not wanted.prefix:
            return self._due_times.span(wanted)
        where, values = where_of(wanted)
        query = f"SELECT count(*), min(due), max(due) FROM waiting INDEXED BY waiting_by_key WHERE {where}"
        count, first, last = self._query(query, values).fetchone()
        if not count:
            return ()
        return (TimelineCount(target=OTHER_TARGETS, interval=0, count=count, first=first, last=last),)


def _row(entry: WaitingSchedule) -> tuple[Any, ...]:
    return (
        *(entry.key, entry.id, entry.version, entry.target, entry.routing_key, entry.nominal, entry.due),
        None if entry.recurrence is None else json.dumps(dict(entry.recurrence), ensure_ascii=False),
        *(entry.is_paused, entry.resumed_at, entry.message.properties, entry.message.body),
    )


def _waiting(row: tuple[Any, ...]) -> WaitingSchedule:
    key, schedule, version, target, routing_key, nominal, due, recurrence, is_paused, resumed_at, properties, body = row
    return WaitingSchedule(
        key=key,
        id=schedule,
        version=version,
        target=target,
        routing_key=routing_key,
        nominal=nominal,
        due=due,
        recurrence=None if recurrence is None else json.loads(recurrence),
        is_paused=bool(is_paused),
        resumed_at=resumed_at,
        message=ScheduledMessage(properties, body),
    )
