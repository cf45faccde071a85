"""State of a partition of the schedule log in an audit, without the bodies of messages."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from bide.durations import LATEST_MILLISECOND
from bide.errors import InvalidInputError, ScheduleRecordError
from bide.gate.index_schema import SCHEMA, SCHEMA_VERSION
from bide.gate.sqlite_state import SqliteState
from bide.schedules.entries import StateEntry, UnderWay, WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.records import ScheduleFilter

Occurrence = WaitingSchedule | UnderWay

_HOUR: Final = 3_600_000
# Applications may schedule for a time after the year 9999, which Python cannot represent.
_DUE_HOUR: Final = f"min(due, {LATEST_MILLISECOND}) / {_HOUR} AS hour"
_PENDING_QUERY: Final = f"""
SELECT target, {_DUE_HOUR}, count(*), sum(NOT is_paused AND due <= :before), sum(is_paused), 0
FROM waiting GROUP BY target, hour
UNION ALL
SELECT target, {_DUE_HOUR}, count(*), sum(due <= :before), 0, count(*)
FROM under_way GROUP BY target, hour
"""  # noqa: S608 (the numbers are constants)


class PendingCount(NamedTuple):
    """Counts of occurrences that have not ended, for one target and one hour of the due time.

    Attributes:
        target: ``q:<queue>`` or ``x:<exchange>``.
        hour: the hour of the due time, in hours since the Unix epoch.
        total: all of these occurrences.
        overdue: the occurrences whose due time is over, without paused ones.
        paused: the occurrences that are paused.
        under_way: the occurrences that a gate has claimed.
    """

    target: str
    hour: int
    total: int
    overdue: int
    paused: int
    under_way: int


class OccurrenceState(SqliteState):
    """State that keeps only some properties of each message, and records which occurrences a record has looked up.

    The fold does not read messages. Therefore this state replaces each message with a small one. The body of the small
    message is JSON: the id and type of the original, the times of the records that scheduled and claimed the original,
    and the version of its schedule. A small message has no properties, by which :meth:`put` recognizes it.

    Attributes:
        time: when the broker stored the record that the fold applies, in milliseconds since the Unix epoch; None while
            a snapshot is read.
        looked_up: the occurrences that the fold has looked up for this record, by id, as they were before the record.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.time: int | None = None
        self.looked_up: dict[str, Occurrence] = {}
        self._versions: dict[str, str] = {}

    def begin_record(self, time: int) -> None:
        """Begin a record: clear :attr:`looked_up`.

        Args:
            time: when the broker stored the record.
        """
        self.time = time
        self.looked_up.clear()
        self._versions.clear()

    def waiting(self, key: str) -> WaitingSchedule | None:
        """The schedule that waits under a key."""
        found = super().waiting(key)
        if found is not None:
            self._remember(found)
        return found

    def under_way(self, occurrence: str) -> UnderWay | None:
        """A claimed occurrence."""
        found = super().under_way(occurrence)
        if found is not None:
            self.looked_up[occurrence] = found
        return found

    def select(self, wanted: ScheduleFilter) -> Iterator[WaitingSchedule]:
        """The waiting schedules that a filter matches, by key."""
        for one in super().select(wanted):
            self._remember(one)
            yield one

    def _remember(self, found: WaitingSchedule) -> None:
        self.looked_up[found.occurrence] = found
        self._versions[found.id] = found.version

    def put(self, entry: StateEntry) -> None:
        """Add or replace an entry. A message in the entry is replaced with a small one."""
        match entry:
            case WaitingSchedule() if entry.message.properties:
                entry = replace(entry, message=_reduced_message(entry.message, scheduled=self.time))
            case UnderWay() if entry.message.properties:
                entry = replace(entry, message=_reduced_message(entry.message))
            case UnderWay():
                more = {"claimed": self.time, "version": self._versions.get(entry.id)}
                entry = replace(entry, message=ScheduledMessage(b"", _json(stored_values(entry) | more)))
            case _:
                pass
        super().put(entry)

    def occurrences(self) -> Iterator[Occurrence]:
        """The next occurrences of all waiting schedules, and all occurrences that are under way."""
        yield from self.select(ScheduleFilter())
        yield from self.all_under_way()

    def pending(self, before: int) -> list[PendingCount]:
        """Count occurrences by target and hour of the due time, those that wait and those under way separately.

        Args:
            before: occurrences that were due at this time or earlier are overdue, unless they are paused.
        """
        return [PendingCount(*row) for row in self._sql.execute(_PENDING_QUERY, {"before": before})]


def stored_values(entry: Occurrence) -> dict[str, Any]:
    """The values that the state keeps of a message: ``id``, ``type``, ``scheduled``, ``claimed`` and ``version``."""
    found: dict[str, Any] = json.loads(entry.message.body)
    return found


def _reduced_message(message: ScheduledMessage, *, scheduled: int | None = None) -> ScheduledMessage:
    try:
        values: Mapping[str, Any] = message.values
    except ScheduleRecordError:
        values = {}
    reduced = {"id": values.get("message_id"), "type": values.get("type"), "scheduled": scheduled}
    return ScheduledMessage(b"", _json(reduced))


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps({name: one for name, one in values.items() if one is not None}, separators=(",", ":")).encode()


@contextmanager
def open_state(path: Path, *, is_new: bool) -> Iterator[OccurrenceState]:
    """Open a file with a state, and write all changes of the block to the file at the end.

    There is no journal. If the block raises, the file is damaged, so open a copy.

    Args:
        is_new: whether the file is empty or missing, so that a state has to be created.

    Raises:
        InvalidInputError: another release of bide wrote the file.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        if is_new:
            connection.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        elif (version := connection.execute("PRAGMA user_version").fetchone()[0]) != SCHEMA_VERSION:
            raise InvalidInputError(
                f"the audit's state of schedules has version {version}, but this bide writes version {SCHEMA_VERSION}: "
                "audit into another folder"
            )
        connection.execute("BEGIN")
        state = OccurrenceState(connection)
        yield state
        state.flush()
        connection.execute("COMMIT")
