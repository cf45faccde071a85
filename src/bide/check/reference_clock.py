"""The clock by which a history is judged: monotonic, and no fault changes it."""

from __future__ import annotations

import time
from datetime import datetime

from bide.durations import to_microseconds


class ReferenceClock:
    """Microseconds since the start of a run, by the monotonic clock of this process.

    bide computes due times with the system clock. The offset between the two clocks, read just before each publish,
    converts a due time to this clock. The change of the offset during the publish is the largest error.
    """

    def __init__(self) -> None:
        self._start = time.monotonic_ns()
        self.first_offset = self.last_offset = self.offset()

    def now(self) -> int:
        """Microseconds since the start."""
        return (time.monotonic_ns() - self._start) // 1_000

    def offset(self) -> int:
        """The system clock minus this clock, in microseconds."""
        before = time.monotonic_ns()
        system = time.time_ns()
        self.last_offset = (system - (before + time.monotonic_ns()) // 2 + self._start) // 1_000
        return self.last_offset

    def of(self, moment: datetime, offset: int) -> int:
        """Convert a time of the system clock to this clock, with an offset that was read at about that time."""
        return to_microseconds(moment) - offset

    @property
    def drift(self) -> int:
        """How far the system clock has moved against this clock since the start, in microseconds."""
        return abs(self.offset() - self.first_offset)
