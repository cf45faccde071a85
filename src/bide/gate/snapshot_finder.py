"""Search for complete snapshots among the records of a schedule log."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Self

from bide.schedules.state import LogPosition

_CHUNK: Final = re.compile(
    rb'\{"v":1,"kind":"snapshot","cycle":"(?P<cycle>[^"\\]+)","as_of":(?P<as_of>-?\d+),"count":(?P<count>\d+),'
    rb'"tick":(?P<tick>\d+),"number":(?P<number>\d+)(?P<is_last>,"is_last":true)?,"entries":'
)
"""The beginning of a chunk. Its entries are not decoded to find a snapshot, because that takes most of the time."""


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

    name: bytes
    position: LogPosition
    numbers: set[int] = field(default_factory=set)
    last: int | None = None
    end: int = -1

    @classmethod
    def of(cls, head: re.Match[bytes], first_offset: int) -> Self:
        """A snapshot whose first chunk begins like this."""
        count = int(head["count"])
        position = LogPosition(
            offset=int(head["as_of"]), count=count, tick=int(head["tick"]), carried=count, snapshot=first_offset
        )
        return cls(head["cycle"], position)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks were read."""
        return self.last is not None and len(self.numbers) == self.last + 1

    def number_of(self, body: bytes) -> int | None:
        """The number of a chunk of this snapshot; None for any other record."""
        head = _CHUNK.match(body)
        return int(head["number"]) if head is not None and head["cycle"] == self.name else None


class SnapshotFinder:
    """Finds complete snapshots. Give it the records of gates in their order."""

    def __init__(self) -> None:
        self._cycles: dict[bytes, FoundSnapshot] = {}

    def add(self, offset: int, body: bytes) -> FoundSnapshot | None:
        """Take the next record. Return its snapshot if the snapshot is complete, again for each copy of a chunk."""
        if (head := _CHUNK.match(body)) is None:
            return None
        cycle = self._cycles.setdefault(head["cycle"], FoundSnapshot.of(head, offset))
        cycle.numbers.add(int(head["number"]))
        cycle.end = offset
        if head["is_last"]:
            cycle.last = int(head["number"])
        return cycle if cycle.is_complete else None
