"""The records of a partition's log, applied to the state in their order."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from bide.errors import NewerRecordError, ScheduleRecordError
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.logs import logger
from bide.schedules.encoding import chunk_without_entries, decode
from bide.schedules.fold import FoldResult, ScheduleFold
from bide.schedules.names import RECORD_OVERHEAD, ScheduleNames
from bide.schedules.records import Beat, ScheduleRecord, SnapshotChunk

log = logger(__name__)

_SIZE_STEP: Final = 200_000

_MOST_RUNS: Final = 10_000
_MOST_CYCLES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecord:
    """A record of the log, and its effect.

    Attributes:
        record: the record; None if it cannot be decoded, or came through the wrong exchange.
        result: the effect on the state.
        completed: the cycle of the snapshot that this record completes; None if it completes none.
    """

    record: ScheduleRecord | None
    result: FoldResult
    completed: str | None = None


@dataclass(slots=True)
class _ReadCycle:
    first_offset: int
    numbers: set[int] = field(default_factory=set)


class LogFollower:
    """Applies the records of one partition.

    Retention may overtake a reader, and the broker then goes on at the first record that is left, without an error.
    Beats and snapshots name an offset and the count of records up to it, by which the follower notices what it missed.

    Args:
        fold: the fold, whose state includes every record before the next one.

    Attributes:
        has_missed: whether records are missing, so that the state is wrong. It has to be built anew from a snapshot.
    """

    def __init__(self, fold: ScheduleFold, names: ScheduleNames) -> None:
        self.has_missed = False
        self._fold = fold
        self._names = names
        position = fold.state.position
        self._seen = _SeenOffsets(position.offset, position.count)
        self._sizes = _SeenSizes(position.count, position.size)
        self._cycles = BoundedCache[str, _ReadCycle](_MOST_CYCLES)

    def read(self, offset: int, exchange: str, body: bytes) -> ReadRecord:
        """Decode and apply the next record.

        Args:
            exchange: the exchange that the record was published to.

        Raises:
            NewerRecordError: a later release of bide wrote the record. Nothing was applied.
        """
        return self.apply(offset, exchange, body, self.decode(offset, exchange, body))

    def decode(self, offset: int, exchange: str, body: bytes) -> ScheduleRecord | None:
        """The record in a body; None for one that changes nothing, because it cannot be decoded or is of another
        exchange. A chunk of a snapshot has no entries.

        Raises:
            NewerRecordError: a later release of bide wrote the record.
        """
        if exchange not in (self._names.gates, self._names.operations):
            return None
        try:
            return chunk_without_entries(body) or decode(body)
        except NewerRecordError:
            raise
        except ScheduleRecordError as error:
            log.debug("the record at offset %d changes nothing: %s", offset, error)
            return None

    def apply(self, offset: int, exchange: str, body: bytes, record: ScheduleRecord | None) -> ReadRecord:
        """Apply the next record, after :meth:`decode`."""
        by_gate = exchange == self._names.gates
        result = self._fold.apply(offset, record, by_gate=by_gate)
        position = self._fold.state.position
        position.checksum = zlib.crc32(body)
        position.size += len(body) + RECORD_OVERHEAD
        self._sizes.add(position.count, position.size)
        self._seen.add(offset, position.count)
        completed = None
        if by_gate and isinstance(record, Beat):
            self._compare(record.after, record.count)
        elif by_gate and isinstance(record, SnapshotChunk):
            self._compare(record.as_of, record.count)
            completed = self._complete(offset, record)
        return ReadRecord(record=record, result=result, completed=completed)

    def _compare(self, offset: int, count: int) -> None:
        self.has_missed = self.has_missed or not self._seen.agrees(offset, count)

    def _complete(self, offset: int, chunk: SnapshotChunk) -> str | None:
        """The cycle that this chunk completes, or None. A chunk that was appended twice counts once."""
        cycle = self._cycles.get(chunk.cycle)
        if cycle is None:
            cycle = self._cycles[chunk.cycle] = _ReadCycle(offset)
        cycle.numbers.add(chunk.number)
        position = self._fold.state.position
        if not chunk.is_last or len(cycle.numbers) <= chunk.number:
            return None
        if chunk.count > position.carried:
            position.carried = chunk.count
            position.carried_size = max(position.carried_size, self._sizes.at(chunk.count))
            position.snapshot = cycle.first_offset
        return chunk.cycle


class _SeenOffsets:
    """The offsets that were read, and the count at each, as runs without a gap."""

    def __init__(self, offset: int, count: int) -> None:
        self._starts = deque([offset], _MOST_RUNS)
        self._counts = deque([count], _MOST_RUNS)
        self._last, self._last_count = offset, count

    def add(self, offset: int, count: int) -> None:
        if offset != self._last + 1:
            self._starts.append(offset)
            self._counts.append(count)
        self._last, self._last_count = offset, count

    def agrees(self, offset: int, count: int) -> bool:
        """Whether the record at an offset was read with this count. True for offsets before the known ones."""
        place = bisect_right(self._starts, offset) - 1
        if place < 0:
            return True
        is_latest = place + 1 == len(self._starts)
        end = self._last_count + 1 if is_latest else self._counts[place + 1]
        return count == self._counts[place] + offset - self._starts[place] < end


class _SeenSizes:
    """The bytes read at some counts of records."""

    def __init__(self, count: int, size: int) -> None:
        self._counts = deque([count], _MOST_RUNS)
        self._sizes = deque([size], _MOST_RUNS)

    def add(self, count: int, size: int) -> None:
        if size >= self._sizes[-1] + _SIZE_STEP:
            self._counts.append(count)
            self._sizes.append(size)

    def at(self, count: int) -> int:
        """The size at a count, or somewhat less; 0 if it is not known."""
        place = bisect_right(self._counts, count) - 1
        return 0 if place < 0 else self._sizes[place]
