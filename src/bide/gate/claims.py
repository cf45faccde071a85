"""The claims of a gate in one partition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bide.errors import BideError
from bide.runtime.bounded_cache import BoundedCache
from bide.runtime.logs import logger
from bide.schedules.entries import WaitingSchedule
from bide.schedules.planning import plan
from bide.schedules.records import Claim, ClaimedOccurrence

log = logger(__name__)

CLAIM_ITEMS: Final = 1000
"""The maximum number of occurrences in one claim."""

_Seen = tuple[str, str, int, int]


class ClaimPlanner:
    """Claims due occurrences. An occurrence is not claimed again until its claim was read back from the log.

    Args:
        gate: the name of this gate.
    """

    def __init__(self, gate: str) -> None:
        self._gate = gate
        self._sent: set[_Seen] = set()
        self._unreadable = BoundedCache[tuple[str, str], None]()

    @property
    def passed_over(self) -> int:
        """An upper bound on the number of schedules that are due but must not be claimed."""
        return len(self._sent) + len(self._unreadable)

    def claim(self, due: Iterable[WaitingSchedule], now: int) -> Claim | None:
        """The next claim; None if there is nothing to claim.

        A schedule whose recurrence cannot be read on this machine, because it does not know the time zone for example,
        is logged and left to a gate that can read it, once such a gate leads.

        Args:
            due: schedules that are due and not paused; at least ``CLAIM_ITEMS + passed_over``, or all of them.
            now: the time by the gate's clock, in milliseconds since the Unix epoch.
        """
        items = list[ClaimedOccurrence]()
        for one in due:
            seen = (one.key, one.version, one.nominal, one.due)
            if seen in self._sent or (one.key, one.version) in self._unreadable:
                continue
            try:
                items.append(plan(one, now))
            except BideError as error:
                log.warning("the schedule %r is not claimed: %s", one.key, error)
                self._unreadable[one.key, one.version] = None
                continue
            self._sent.add(seen)
            if len(items) == CLAIM_ITEMS:
                break
        return Claim(gate=self._gate, items=tuple(items)) if items else None

    def read(self, claim: Claim) -> None:
        """Forget a claim that was read back, whether it took effect or not."""
        if claim.gate == self._gate:
            self._sent.difference_update((one.key, one.version, one.nominal, one.due) for one in claim.items)

    def on_connection_lost(self) -> None:
        """Claim the same occurrences again: claims that were sent may not reach the log, and a second claim changes
        nothing."""
        self._sent.clear()
