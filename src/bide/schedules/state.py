"""The state of a partition: schedules that wait, occurrences under way, applied requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from bide.schedules.entries import (
    FinishedKey,
    RememberedAnswer,
    ScheduleSession,
    StateEntry,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.records import ScheduleFilter


@dataclass(slots=True, kw_only=True)
class LogPosition:
    """The last record of the log that the state contains.

    Attributes:
        offset: its offset; -1 before the first record.
        count: records read since the log began. Offsets have gaps, because a stream keeps records of its own too.
        tick: the last tick.
        carried: the count of the latest snapshot that is in the log as a whole.
        checksum: CRC-32 of the last record's body, by which a gate recognises the log that its index belongs to.
        size: bytes of the records that were read, estimated.
        carried_size: the value of ``size`` at that snapshot, or less.
        snapshot: offset of the first chunk of that snapshot; None before the first one. The gate keeps this and the
            previous four attributes here; the fold reads none of them.
    """

    offset: int = -1
    count: int = 0
    tick: int = 0
    carried: int = 0
    checksum: int = 0
    size: int = 0
    carried_size: int = 0
    snapshot: int | None = None


class ScheduleState(Protocol):
    """Storage of the state, for the fold: in memory, or in the index of a gate."""

    position: LogPosition

    def waiting(self, key: str) -> WaitingSchedule | None:
        """The schedule that waits under a key."""

    def under_way(self, occurrence: str) -> UnderWay | None:
        """A claimed occurrence."""

    def under_way_of(self, key: str) -> Iterable[UnderWay]:
        """The claimed occurrences of a key."""

    def finished(self, key: str) -> FinishedKey | None:
        """The last end of an occurrence of a key."""

    def session(self, session: str) -> ScheduleSession | None:
        """The applied requests of a session."""

    def answer(self, request: str) -> RememberedAnswer | None:
        """The answer to a request."""

    def put(self, entry: StateEntry) -> None:
        """Add or replace an entry."""

    def remove(self, entry: StateEntry) -> None:
        """Remove an existing entry."""

    def select(self, wanted: ScheduleFilter) -> Iterable[WaitingSchedule]:
        """The waiting schedules that a filter matches, in the order of keys. The caller may change each one before it
        takes the next."""

    def forget(self, *, sessions: int, others: int) -> None:
        """Forget sessions up to one tick, and answers and finished keys up to another.

        Args:
            sessions: the last tick whose sessions are forgotten.
            others: the last tick whose answers and finished keys are forgotten.
        """


@dataclass(slots=True)
class ScheduleMemory:
    """The state in memory."""

    position: LogPosition = field(default_factory=LogPosition)
    _waiting: dict[str, WaitingSchedule] = field(default_factory=dict)
    _under_way: dict[str, UnderWay] = field(default_factory=dict)
    _of_key: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _finished: dict[str, FinishedKey] = field(default_factory=dict)
    _sessions: dict[str, ScheduleSession] = field(default_factory=dict)
    _answers: dict[str, RememberedAnswer] = field(default_factory=dict)

    def waiting(self, key: str) -> WaitingSchedule | None:
        """The schedule that waits under a key."""
        return self._waiting.get(key)

    def under_way(self, occurrence: str) -> UnderWay | None:
        """A claimed occurrence."""
        return self._under_way.get(occurrence)

    def under_way_of(self, key: str) -> list[UnderWay]:
        """The claimed occurrences of a key."""
        return [self._under_way[one] for one in self._of_key.get(key, ())]

    def finished(self, key: str) -> FinishedKey | None:
        """The last end of an occurrence of a key."""
        return self._finished.get(key)

    def session(self, session: str) -> ScheduleSession | None:
        """The applied requests of a session."""
        return self._sessions.get(session)

    def answer(self, request: str) -> RememberedAnswer | None:
        """The answer to a request."""
        return self._answers.get(request)

    def put(self, entry: StateEntry) -> None:
        """Add or replace an entry."""
        match entry:
            case WaitingSchedule():
                self._waiting[entry.key] = entry
            case UnderWay():
                if entry.occurrence not in self._under_way:
                    self._of_key[entry.key].append(entry.occurrence)
                self._under_way[entry.occurrence] = entry
            case FinishedKey():
                self._finished[entry.key] = entry
            case ScheduleSession():
                self._sessions[entry.session] = entry
            case RememberedAnswer():
                self._answers[entry.request] = entry

    def remove(self, entry: StateEntry) -> None:
        """Remove an existing entry."""
        match entry:
            case WaitingSchedule():
                del self._waiting[entry.key]
            case UnderWay():
                del self._under_way[entry.occurrence]
                self._of_key[entry.key].remove(entry.occurrence)
                if not self._of_key[entry.key]:
                    del self._of_key[entry.key]
            case FinishedKey():
                del self._finished[entry.key]
            case ScheduleSession():
                del self._sessions[entry.session]
            case RememberedAnswer():
                del self._answers[entry.request]

    def select(self, wanted: ScheduleFilter) -> list[WaitingSchedule]:
        """The waiting schedules that a filter matches, in the order of keys."""
        found = (one for one in self._waiting.values() if wanted.matches(one.key, one.target, one.due))
        return sorted(found, key=lambda one: one.key)

    def forget(self, *, sessions: int, others: int) -> None:
        """See :meth:`ScheduleState.forget`."""
        self._sessions = {name: one for name, one in self._sessions.items() if one.tick > sessions}
        self._answers = {name: one for name, one in self._answers.items() if one.tick > others}
        self._finished = {name: one for name, one in self._finished.items() if one.tick > others}

    def entries(self) -> Iterator[StateEntry]:
        """Everything, in an order that depends on the state alone."""
        tables: Iterable[dict[str, StateEntry]] = (
            self._sessions,  # type: ignore[assignment]  # dict is invariant
            self._answers,
            self._finished,
            self._under_way,
            self._waiting,
        )
        for table in tables:
            for name in sorted(table):
                yield table[name]
