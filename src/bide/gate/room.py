"""The part of a log's retention that is not carried forward, and what a gate may write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bide.schedules.names import MAX_RESERVATIONS
from bide.schedules.state import LogPosition

RoomLevel = Literal["free", "reserved", "full"]
"""``reserved``: only beats and snapshots may be written. ``full``: nothing."""


@dataclass(slots=True)
class LogRoom:
    """The room in the log of one partition.

    Applications may append a quarter of the retention without a gate. Gates may append until five eighths are not
    carried forward by a snapshot. The last eighth is for the segment that retention removes as a whole, and for late
    copies.

    Attributes:
        retention: the retention of the log, in bytes.
        reservations: reservations of applications in the room queue, when it was last counted.
        last_cycle: bytes from the position of this gate's last snapshot to its last chunk; less if the state shrank.
        state_size: the size of the state in that snapshot.
    """

    retention: int
    reservations: int = 0
    last_cycle: int = 0
    state_size: int = 0

    def level(self, position: LogPosition) -> RoomLevel:
        """The level, which decides what a gate may write."""
        uncarried = position.size - position.carried_size
        if uncarried * 8 > self.retention * 5:
            return "full"
        return "reserved" if uncarried * 2 > self.retention else "free"

    @property
    def is_too_large_to_free(self) -> bool:
        """Whether the room should be freed, and the last snapshot was too large for that."""
        return self._is_half_full and not self.may_purge(self.last_cycle)

    @property
    def _is_half_full(self) -> bool:
        return self.reservations * 2 > MAX_RESERVATIONS

    def state_shrank(self, size: int) -> None:
        """Expect a smaller snapshot than the last one, if the state is smaller.

        Args:
            size: the size of the state now.
        """
        if size < self.state_size:
            self.last_cycle = self.last_cycle * size // self.state_size
            self.state_size = size

    def needs_snapshot(self, position: LogPosition) -> bool:
        """Whether it is time to carry the state forward."""
        if self._is_half_full and self.may_purge(self.last_cycle):
            return True
        uncarried = position.size - position.carried_size
        # If the snapshot of a large state takes a quarter itself, the state is not carried again at once. But above
        # half, a gate delivers nothing until the state is carried.
        is_more = (uncarried - self.last_cycle) * 8 > self.retention or uncarried * 2 > self.retention
        return uncarried * 4 > self.retention and is_more

    def may_purge(self, appended: int) -> bool:
        """Whether to free the room of applications after a snapshot.

        The queue can only be purged as a whole, so what was appended since the position of the snapshot has to be
        little.

        Args:
            appended: bytes appended since the position of the snapshot.
        """
        return appended * 8 < self.retention
