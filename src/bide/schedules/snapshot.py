"""Snapshots of the state in the log: cut into chunks, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from bide.schedules.entries import (
    FinishedKey,
    RememberedAnswer,
    ScheduleSession,
    StateEntry,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.records import SnapshotChunk
from bide.schedules.state import LogPosition, ScheduleMemory

CHUNK_ENTRIES: Final = 500
CHUNK_BYTES: Final = 500_000
"""The limits of a chunk. A single entry may be larger: a message may be nearly as large as the broker accepts. The
bytes are estimated: JSON takes up to six times as many for some characters."""

_ENTRY_BYTES: Final = 200
_RANGE_BYTES: Final = 30


def cut(
    cycle: str, position: LogPosition, entries: Iterable[StateEntry], *, most: int = CHUNK_ENTRIES
) -> Iterator[SnapshotChunk]:
    """The chunks of a snapshot, to be appended in this order.

    Args:
        cycle: names the snapshot; a new one each time.
        position: the position of the state in the log.
        entries: everything in the state, none of it changed since that position.
        most: the maximum number of entries of a chunk.
    """
    blank = SnapshotChunk(
        cycle=cycle,
        as_of=position.offset,
        count=position.count,
        tick=position.tick,
        number=0,
        is_last=False,
        entries=(),
    )
    number, part, size = 0, list[StateEntry](), 0
    for entry in entries:
        more = _size(entry)
        if part and (len(part) == most or size + more > CHUNK_BYTES):
            yield replace(blank, number=number, entries=tuple(part))
            number, part, size = number + 1, [], 0
        part.append(entry)
        size += more
    yield replace(blank, number=number, is_last=True, entries=tuple(part))


def _size(entry: StateEntry) -> int:
    match entry:
        case WaitingSchedule():
            recurrence = sum(len(name) + len(str(value)) for name, value in (entry.recurrence or {}).items())
            return _ENTRY_BYTES + recurrence + len(entry.message.properties) + len(entry.message.body)
        case UnderWay():
            return _ENTRY_BYTES + len(entry.message.properties) + len(entry.message.body)
        case ScheduleSession():
            return _ENTRY_BYTES + _RANGE_BYTES * len(entry.applied.starts)
        case RememberedAnswer():
            return _ENTRY_BYTES + sum(map(len, entry.answer.keys)) + sum(map(len, entry.answer.under_way))
        case FinishedKey():
            return _ENTRY_BYTES


@dataclass(slots=True)
class _Cycle:
    chunks: dict[int, SnapshotChunk] = field(default_factory=dict)
    last: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.last is not None and len(self.chunks) == self.last + 1


class SnapshotSearch:
    """Finds the latest complete snapshot among the records of a log.

    Give it every chunk from the first retained record on. Chunks that were appended twice count once.
    """

    def __init__(self) -> None:
        self._cycles: dict[str, _Cycle] = {}
        self._found: _Cycle | None = None

    def add(self, chunk: SnapshotChunk) -> None:
        """Take the next chunk."""
        cycle = self._cycles.setdefault(chunk.cycle, _Cycle())
        cycle.chunks[chunk.number] = chunk
        if chunk.is_last:
            cycle.last = chunk.number
        if not cycle.is_complete:
            return
        del self._cycles[chunk.cycle]
        if self._found is None or self._found.chunks[0].as_of < chunk.as_of:
            self._found = cycle

    def result(self) -> ScheduleMemory | None:
        """The state of the latest complete snapshot; None if there is none.

        The caller has to check that the record at the snapshot's offset is still in the log, and to fold the records
        after it. Without that record, later ones may be missing too, and the snapshot cannot be used.
        """
        if self._found is None:
            return None
        first = self._found.chunks[0]
        position = LogPosition(offset=first.as_of, count=first.count, tick=first.tick, carried=first.count)
        state = ScheduleMemory(position=position)
        for number in range(len(self._found.chunks)):
            for entry in self._found.chunks[number].entries:
                state.put(entry)
        return state
