"""The state of a partition of the schedule log in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from bide.gate.delivery_queue import OccurrenceHead
from bide.gate.sql_conditions import others, where_of
from bide.schedules.due_times import DueTimes
from bide.schedules.entries import (
    FinishedKey,
    RememberedAnswer,
    ScheduleSession,
    StateEntry,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.entry_fields import EntryReader, EntryWriter
from bide.schedules.message import ScheduledMessage
from bide.schedules.records import ScheduleFilter
from bide.schedules.state import LogPosition
from bide.schedules.timeline import OTHER_TARGETS, TimeGrid, TimelineCount

_POSITION: Final = ("record", "count", "tick", "carried", "checksum", "size", "carried_size", "snapshot")
_POSITION_FIELDS: Final = ("offset", *_POSITION[1:])
_TABLES: Final = ("sessions", "answers", "finished", "under_way", "waiting")
_WAITING: Final = (
    "SELECT key, id, version, target, routing_key, nominal, due, recurrence, is_paused, resumed_at, properties, body "
    "FROM waiting "
)
_WAITING_WITHOUT_MESSAGE: Final = _WAITING.replace("properties, body", "x'0000', x''")
_DUE_TIMES: Final = "SELECT target, due FROM waiting INDEXED BY waiting_by_due WHERE NOT is_paused ORDER BY due"
_DUE_TIMES_BY_KEY: Final = "SELECT target, due FROM waiting INDEXED BY waiting_by_key "
_PAUSED_DUE_TIMES: Final = "SELECT target, due FROM waiting INDEXED BY paused WHERE is_paused"
_HEADS: Final = (
    "SELECT occurrence, target, length(properties) + length(body), CASE WHEN is_run_now THEN 0 ELSE due END "
    "FROM under_way "
)
_UNDER_WAY: Final = (
    "SELECT occurrence, key, id, target, routing_key, nominal, due, is_recurring, is_run_now, properties, body "
    "FROM under_way "
)
_ENTRY_BYTES: Final = 200
"""Approximate bytes of an entry in a snapshot, without its key and message."""

_SELECTED: Final = 500
_SELECTED_BYTES: Final = 4_000_000
"""Schedules, and bytes of messages, that are read at once when a filter matches many."""


class SqliteState:
    """The state on a connection, as a :class:`bide.schedules.state.ScheduleState`.

    Changes belong to the transaction of the connection. Sessions change with each request, so they are written by
    :meth:`flush` only.

    Args:
        connection: a connection to a database with :data:`bide.gate.index_schema.SCHEMA`.

    Attributes:
        position: the last record that the state contains.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection
        self._times: DueTimes | None = None
        self._changed_sessions: dict[str, ScheduleSession] = {}
        self.reload()

    def reload(self) -> None:
        """Read the position, and forget sessions that were not written: after a rollback."""
        self._changed_sessions.clear()
        self._times = None
        row = self._sql.execute(f"SELECT {', '.join(_POSITION)} FROM position").fetchone()
        self.position = LogPosition(**dict(zip(_POSITION_FIELDS, row, strict=True)))

    def flush(self) -> None:
        """Write the position, and the sessions that have changed."""
        self._sql.executemany(
            "REPLACE INTO sessions VALUES (?, ?, ?)",
            [(one.session, one.tick, _encode(one)) for one in self._changed_sessions.values()],
        )
        self._changed_sessions.clear()
        self._sql.execute(
            f"UPDATE position SET {', '.join(f'{column} = ?' for column in _POSITION)}",
            [getattr(self.position, name) for name in _POSITION_FIELDS],
        )

    def clear(self) -> None:
        """Remove all entries, and set the position before the first record."""
        for table in _TABLES:
            self._sql.execute(f"DELETE FROM {table}")
        self._changed_sessions.clear()
        self._times = None
        self.position = LogPosition()

    # -- one entry

    def waiting(self, key: str) -> WaitingSchedule | None:
        """The schedule that waits under a key."""
        row = self._sql.execute(_WAITING + "WHERE key = ?", (key,)).fetchone()
        return None if row is None else _waiting(row)

    def under_way(self, occurrence: str) -> UnderWay | None:
        """A claimed occurrence."""
        row = self._sql.execute(_UNDER_WAY + "WHERE occurrence = ?", (occurrence,)).fetchone()
        return None if row is None else _under_way(row)

    def under_way_of(self, key: str) -> Iterator[UnderWay]:
        """The claimed occurrences of a key, one by one."""
        return (_under_way(row) for row in self._sql.execute(_UNDER_WAY + "WHERE key = ?", (key,)))

    def finished(self, key: str) -> FinishedKey | None:
        """The last end of an occurrence of a key."""
        row = self._sql.execute("SELECT key, version, tick FROM finished WHERE key = ?", (key,)).fetchone()
        return None if row is None else FinishedKey(key=row[0], version=row[1], tick=row[2])

    def session(self, session: str) -> ScheduleSession | None:
        """The applied requests of a session."""
        if (found := self._changed_sessions.get(session)) is not None:
            return found
        row = self._sql.execute("SELECT entry FROM sessions WHERE session = ?", (session,)).fetchone()
        return None if row is None else _decode(row[0])

    def answer(self, request: str) -> RememberedAnswer | None:
        """The answer to a request."""
        row = self._sql.execute("SELECT entry FROM answers WHERE request = ?", (request,)).fetchone()
        return None if row is None else _decode(row[0])

    def put(self, entry: StateEntry) -> None:
        """Add or replace an entry."""
        match entry:
            case WaitingSchedule():
                before = self._sql.execute("SELECT target, due FROM waiting WHERE key = ?", (entry.key,)).fetchone()
                if before is not None:
                    self._remove_waiting(entry.key, *before)
                if self._times is not None:
                    self._times.add(entry.target, entry.due)
                row = (
                    *(entry.key, entry.id, entry.version, entry.target, entry.routing_key, entry.nominal, entry.due),
                    None if entry.recurrence is None else json.dumps(dict(entry.recurrence), ensure_ascii=False),
                    *(entry.is_paused, entry.resumed_at, entry.message.properties, entry.message.body),
                )
                self._sql.execute("INSERT INTO waiting VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            case UnderWay():
                self._sql.execute("DELETE FROM under_way WHERE occurrence = ?", (entry.occurrence,))
                values = (
                    *(entry.occurrence, entry.key, entry.id, entry.target, entry.routing_key, entry.nominal, entry.due),
                    *(entry.is_recurring, entry.is_run_now, entry.message.properties, entry.message.body),
                )
                self._sql.execute("INSERT INTO under_way VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            case FinishedKey():
                self._sql.execute("REPLACE INTO finished VALUES (?, ?, ?)", (entry.key, entry.version, entry.tick))
            case ScheduleSession():
                self._changed_sessions[entry.session] = entry
            case RememberedAnswer():
                self._sql.execute("REPLACE INTO answers VALUES (?, ?, ?)", (entry.request, entry.tick, _encode(entry)))

    def remove(self, entry: StateEntry) -> None:
        """Remove an entry that is there."""
        match entry:
            case WaitingSchedule():
                self._remove_waiting(entry.key, entry.target, entry.due)
            case UnderWay():
                self._sql.execute("DELETE FROM under_way WHERE occurrence = ?", (entry.occurrence,))
            case FinishedKey():
                self._sql.execute("DELETE FROM finished WHERE key = ?", (entry.key,))
            case ScheduleSession():
                self._changed_sessions.pop(entry.session, None)
                self._sql.execute("DELETE FROM sessions WHERE session = ?", (entry.session,))
            case RememberedAnswer():
                self._sql.execute("DELETE FROM answers WHERE request = ?", (entry.request,))

    def _remove_waiting(self, key: str, target: str, due: int) -> None:
        self._sql.execute("DELETE FROM waiting WHERE key = ?", (key,))
        if self._times is not None:
            self._times.remove(target, due)

    def forget(self, *, sessions: int, others: int) -> None:
        """Forget sessions up to the one tick, and answers and finished keys up to the other."""
        for name in [one.session for one in self._changed_sessions.values() if one.tick <= sessions]:
            del self._changed_sessions[name]
        # A session that was used since it was written is not forgotten: flush() writes it again.
        self._sql.execute("DELETE FROM sessions WHERE tick <= ?", (sessions,))
        self._sql.execute("DELETE FROM answers WHERE tick <= ?", (others,))
        self._sql.execute("DELETE FROM finished WHERE tick <= ?", (others,))

    # -- several entries

    def select(self, wanted: ScheduleFilter) -> Iterator[WaitingSchedule]:
        """The waiting schedules that a filter matches, by key. The state may be changed meanwhile, up to the last one.

        They are read in parts, because all their messages may not fit into memory.
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
        return (_waiting(row) for row in self._sql.execute(query, (*values, limit)))

    def due(self, now: int, *, without: Collection[str] = (), limit: int) -> list[WaitingSchedule]:
        """Schedules that are due and not paused, by due time, without their messages.

        Args:
            now: the time in milliseconds since the Unix epoch.
            without: targets to leave out.
        """
        query = _WAITING_WITHOUT_MESSAGE + f"WHERE NOT is_paused AND due <= ? {others(without)}ORDER BY due LIMIT ?"
        return [_waiting(row) for row in self._sql.execute(query, (now, *without, limit))]

    def next_due(self, *, without: Collection[str] = ()) -> int | None:
        """The earliest due time of a schedule that is not paused, in milliseconds since the Unix epoch.

        Args:
            without: targets to leave out.
        """
        query = f"SELECT due FROM waiting WHERE NOT is_paused {others(without)}ORDER BY due LIMIT 1"
        row = self._sql.execute(query, tuple(without)).fetchone()
        return None if row is None else int(row[0])

    def under_way_heads(self) -> list[OccurrenceHead]:
        """All claimed occurrences, the earliest due first."""
        return [OccurrenceHead(*row) for row in self._sql.execute(_HEADS + "ORDER BY due")]

    def heads(self, occurrences: Iterable[str]) -> list[OccurrenceHead]:
        """Those of the occurrences that are under way."""
        rows = (self._sql.execute(_HEADS + "WHERE occurrence = ?", (one,)).fetchone() for one in occurrences)
        return [OccurrenceHead(*row) for row in rows if row is not None]

    @property
    def waiting_count(self) -> int:
        """The number of schedules that wait."""
        return len(self._due_times)

    @property
    def _due_times(self) -> DueTimes:
        """The due times of what waits. They are read once, and then each change is noted."""
        if self._times is None:
            self._times = DueTimes(self._sql.execute(_DUE_TIMES))
            for target, due in self._sql.execute(_PAUSED_DUE_TIMES):
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
        found: int = self._sql.execute(f"SELECT count(*) FROM waiting {rows} {where}", values).fetchone()[0]
        return found

    def timeline(self, wanted: ScheduleFilter, grid: TimeGrid) -> Iterator[TimelineCount]:
        """The numbers of waiting schedules that a filter matches, by target and interval."""
        times = self._due_times
        if wanted.prefix:
            where, values = where_of(wanted)
            times = DueTimes(self._sql.execute(_DUE_TIMES_BY_KEY + f"WHERE {where} ORDER BY due", values))
        return times.timeline(wanted, grid)

    def span(self, wanted: ScheduleFilter) -> tuple[TimelineCount, ...]:
        """The number, and the first and the last due time, of all waiting schedules that a filter matches."""
        if not wanted.prefix:
            return self._due_times.span(wanted)
        where, values = where_of(wanted)
        query = f"SELECT count(*), min(due), max(due) FROM waiting INDEXED BY waiting_by_key WHERE {where}"
        count, first, last = self._sql.execute(query, values).fetchone()
        if not count:
            return ()
        return (TimelineCount(target=OTHER_TARGETS, interval=0, count=count, first=first, last=last),)

    def size(self) -> int:
        """The bytes of what waits and is under way, about. Large messages are not read."""
        queries = (
            f"SELECT total(length(key) + length(properties) + length(body) + {_ENTRY_BYTES}) FROM {table}"
            for table in ("waiting", "under_way")
        )
        return sum(int(self._sql.execute(one).fetchone()[0]) for one in queries)

    def all_under_way(self) -> Iterator[UnderWay]:
        """All claimed occurrences, by id."""
        return (_under_way(row) for row in self._sql.execute(_UNDER_WAY + "ORDER BY occurrence"))

    def entries(self) -> Iterator[StateEntry]:
        """All entries that were written, in an order that depends on the state alone."""
        for row in self._sql.execute("SELECT entry FROM sessions ORDER BY session"):
            yield _decode(row[0])
        for row in self._sql.execute("SELECT entry FROM answers ORDER BY request"):
            yield _decode(row[0])
        for row in self._sql.execute("SELECT key, version, tick FROM finished ORDER BY key"):
            yield FinishedKey(key=row[0], version=row[1], tick=row[2])
        yield from self.all_under_way()
        for row in self._sql.execute(_WAITING + "ORDER BY key"):
            yield _waiting(row)


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


def _under_way(row: tuple[Any, ...]) -> UnderWay:
    occurrence, key, schedule, target, routing_key, nominal, due, is_recurring, is_run_now, properties, body = row
    return UnderWay(
        occurrence=occurrence,
        key=key,
        id=schedule,
        target=target,
        routing_key=routing_key,
        nominal=nominal,
        due=due,
        is_recurring=bool(is_recurring),
        is_run_now=bool(is_run_now),
        message=ScheduledMessage(properties, body),
    )


def _encode(entry: ScheduleSession | RememberedAnswer) -> str:
    return json.dumps(EntryWriter().entry(entry), ensure_ascii=False, separators=(",", ":"))


def _decode(text: str) -> Any:
    return EntryReader(b"").entry(json.loads(text))
