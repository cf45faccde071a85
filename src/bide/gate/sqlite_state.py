"""The state of a partition of the schedule log in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Final

from bide.gate.delivery_queue import OccurrenceHead
from bide.gate.waiting_table import WaitingTable
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
from bide.schedules.questions import (
    CountQuestion,
    KeyQuestion,
    PageQuestion,
    QuestionAnswer,
    ScheduleQuestion,
    TimelineQuestion,
    answer_for_key,
    answer_for_page,
)
from bide.schedules.state import LogPosition
from bide.schedules.timeline import largest

_POSITION: Final = ("record", "count", "tick", "carried", "checksum", "size", "carried_size", "snapshot")
_POSITION_FIELDS: Final = ("offset", *_POSITION[1:])
_TABLES: Final = ("sessions", "answers", "finished", "under_way", "waiting")
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


class SqliteState(WaitingTable):
    """The state on a connection, as a :class:`bide.schedules.state.ScheduleState`.

    Changes belong to the transaction of the connection. Sessions change with each request, so they are written by
    :meth:`flush` only.

    Args:
        connection: a connection to a database with :data:`bide.gate.index_schema.SCHEMA`.

    Attributes:
        position: the last record that the state contains.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self._changed_sessions: dict[str, ScheduleSession] = {}
        self.reload()

    def reload(self) -> None:
        """Read the position again after a rollback, and drop changes that were not written."""
        self._changed_sessions.clear()
        self.forget_waiting()
        row = self._sql.execute(f"SELECT {', '.join(_POSITION)} FROM position").fetchone()
        self.position = LogPosition(**dict(zip(_POSITION_FIELDS, row, strict=True)))

    def flush(self) -> None:
        """Write added schedules, changed sessions and the position."""
        self.write_waiting()
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
        self.forget_waiting()
        self.position = LogPosition()

    # -- one entry

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
                self.put_waiting(entry)
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
        """Remove an existing entry."""
        match entry:
            case WaitingSchedule():
                self.remove_waiting(entry.key, entry.target, entry.due)
            case UnderWay():
                self._sql.execute("DELETE FROM under_way WHERE occurrence = ?", (entry.occurrence,))
            case FinishedKey():
                self._sql.execute("DELETE FROM finished WHERE key = ?", (entry.key,))
            case ScheduleSession():
                self._changed_sessions.pop(entry.session, None)
                self._sql.execute("DELETE FROM sessions WHERE session = ?", (entry.session,))
            case RememberedAnswer():
                self._sql.execute("DELETE FROM answers WHERE request = ?", (entry.request,))

    def forget(self, *, sessions: int, others: int) -> None:
        """Forget sessions up to the tick *sessions*, and answers and finished keys up to the tick *others*."""
        for name in [one.session for one in self._changed_sessions.values() if one.tick <= sessions]:
            del self._changed_sessions[name]
        # A session that was used since it was written is not forgotten: flush() writes it again.
        self._sql.execute("DELETE FROM sessions WHERE tick <= ?", (sessions,))
        self._sql.execute("DELETE FROM answers WHERE tick <= ?", (others,))
        self._sql.execute("DELETE FROM finished WHERE tick <= ?", (others,))

    # -- several entries

    def under_way_heads(self) -> list[OccurrenceHead]:
        """All claimed occurrences, the earliest due first."""
        return [OccurrenceHead(*row) for row in self._sql.execute(_HEADS + "ORDER BY due")]

    def heads(self, occurrences: Iterable[str]) -> list[OccurrenceHead]:
        """The heads of those occurrences that are still under way."""
        rows = (self._sql.execute(_HEADS + "WHERE occurrence = ?", (one,)).fetchone() for one in occurrences)
        return [OccurrenceHead(*row) for row in rows if row is not None]

    def size(self) -> int:
        """The approximate bytes of waiting schedules and claimed occurrences. Large messages are not read for this."""
        queries = (
            f"SELECT total(length(key) + length(properties) + length(body) + {_ENTRY_BYTES}) FROM {table}"
            for table in ("waiting", "under_way")
        )
        return sum(int(self._query(one).fetchone()[0]) for one in queries)

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
        yield from self.all_waiting()


def answer_question(state: SqliteState, question: ScheduleQuestion) -> QuestionAnswer:
    """The answer to a question about a state."""
    match question:
        case KeyQuestion():
            return answer_for_key(state.waiting(question.key), state.under_way_of(question.key))
        case PageQuestion():
            found = state.page(
                question.filter,
                after=question.after,
                limit=question.limit + 1,
                with_messages=question.with_messages,
                is_recurring=question.is_recurring,
            )
            return answer_for_page(question, found)
        case CountQuestion():
            return QuestionAnswer(count=state.number(question.filter, is_paused=question.is_paused))
        case TimelineQuestion():
            if question.grid is None:
                return QuestionAnswer(timeline=state.span(question.filter))
            return QuestionAnswer(timeline=largest(state.timeline(question.filter, question.grid)))


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
