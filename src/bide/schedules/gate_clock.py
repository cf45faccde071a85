"""The wall clock of a gate, held back after a step forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOLERANCE: Final = 100
"""Milliseconds by which the wall clock may run ahead of the monotonic clock between two readings."""

HOLD: Final = 600_000
"""Milliseconds after which a step forward is believed, and the time before a step back is forgotten."""


@dataclass(slots=True)
class GateClock:
    """A clock that does not follow a wrong step forward of the wall clock.

    A step forward is believed when another gate's clock confirms it, or after ten minutes. Until then, the time goes on
    as before the step. A step back is believed at once: too late is better than too early. For ten minutes after a step
    back, a step forward that undoes it is also believed at once.
    """

    _trusted: int | None = None
    _monotonic: int = 0
    _held_since: int | None = None
    _back_since: int | None = None

    def now(self, *, wall: int, monotonic: int) -> int:
        """The time, in milliseconds since the Unix epoch.

        Args:
            wall: reading of the wall clock.
            monotonic: milliseconds by a clock that cannot be set, and that goes on while the machine is suspended.
        """
        trusted = wall if self._trusted is None else self._trusted + monotonic - self._monotonic
        self._monotonic = monotonic
        if wall > trusted + TOLERANCE:
            if self._held_since is None:
                self._held_since = monotonic
            if monotonic - self._held_since < HOLD:
                self._trusted = trusted
                return trusted
        self._held_since = None
        # A difference within the tolerance corrects a slow or fast clock, and is followed. After a step back, the time
        # as before the step is kept for a while, so that a step forward to it is believed.
        if wall > trusted - TOLERANCE:
            self._back_since = None
        elif self._back_since is None:
            self._back_since = monotonic
        is_kept = self._back_since is not None and monotonic - self._back_since < HOLD
        self._trusted = trusted if is_kept else wall
        return wall

    def hear(self, wall: int, other: int) -> None:
        """Compare with the clock of a gate on another machine, read just now.

        Args:
            wall: reading of the wall clock of this machine.
            other: reading of the other gate's clock.
        """
        if self._held_since is not None and abs(wall - other) <= TOLERANCE:
            self._trusted, self._held_since = wall, None

    @property
    def is_held(self) -> bool:
        """Whether a step forward is not believed yet."""
        return self._held_since is not None
