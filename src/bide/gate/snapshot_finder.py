"""Search for complete snapshots among the records of a schedule log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from bide.schedules.encoding import chunk_without_entries
from bide.schedules.records import SnapshotChunk
from bide.schedules.state import LogPosition


@dataclass(slots=True)
class FoundSnapshot:
    """A snapshot, with the chunks of it that were read.

    Attributes:
        name: its cycle.
        position: the position of the state. ``snapshot`` is the offset of the first chunk.
        numbers: the numbers of the chunks.
        last: the number of the last chunk; None if that was not read yet.
        end: the offset of the chunk that was read last, a copy or not.
    """

    name: str
    position: LogPosition
    numbers: set[int] = field(default_factory=set)
    last: int | None = None
    end: int = -1

    @classmethod
    def of(cls, chunk: SnapshotChunk, first_offset: int) -> Self:
        """A snapshot whose first chunk is this one."""
        position = LogPosition(
            offset=chunk.as_of, count=chunk.count, tick=chunk.tick, carried=chunk.count, snapshot=first_offset
        )
        return cls(chunk.cycle, position)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks were read."""
        return self.last is not None and len(self.numbers) == self.last + 1

    def number_of(self, body: bytes) -> int | None:
        """The number of a chunk of this snapshot; None for any other record."""
        chunk = chunk_without_entries(body)
        return chunk.number if chunk is not None and chunk.cycle == self.name else None


class SnapshotFinder:
    """Finds complete snapshots. Give it the records of gates in their order."""

    def __init__(self) -> None:
        self._cycles: dict[str, FoundSnapshot] = {}

    def add(self, offset: int, body: bytes) -> FoundSnapshot | None:
        """Take the next record. Return its snapshot if the snapshot is complete, again for each copy of a chunk."""
        if (chunk := chunk_without_entries(body)) is None:
            return None
        cycle = self._cycles.setdefault(chunk.cycle, FoundSnapshot.of(chunk, offset))
        cycle.numbers.add(chunk.number)
        cycle.end = offset
        if chunk.is_last:
            cycle.last = chunk.number
        return cycle if cycle.is_complete else None
