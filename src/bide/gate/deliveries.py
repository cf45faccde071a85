"""The occurrences of a partition that its leader delivers, from the claim to the report."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Final

from bide.delay.forwarding import LONGEST_PAUSE
from bide.schedules.entries import Outcome
from bide.schedules.records import EndedOccurrence

IN_FLIGHT: Final = 500
"""Messages of a partition that are sent and not confirmed."""

REPORT_ITEMS: Final = 1000
"""Occurrences in one report."""

REPORT_AFTER: Final = 0.1
"""Seconds for which a report waits for more occurrences while others are in flight."""


class Deliveries:
    """Which occurrences to deliver, deliver again, and report. All times are seconds by a monotonic clock.

    Attributes:
        in_flight: the number of occurrences that were sent and are not confirmed.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._queued = deque[str]()
        self._known = set[str]()
        """Occurrences that are queued, in flight, refused, or ended and not reported yet."""
        self._refusals: dict[str, int] = {}
        self._retries: list[tuple[float, str]] = []
        self._unreported = deque[EndedOccurrence]()
        self._reported: dict[str, EndedOccurrence] = {}
        self._unreported_since = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight, and everything that ended was reported and read back."""
        return not (self.in_flight or self._unreported or self._reported)

    @property
    def backlog(self) -> int:
        """How many wait to be sent for the first time."""
        return len(self._queued)

    def add(self, occurrences: Iterable[str]) -> None:
        """Take occurrences that are under way. Those that are known already are ignored."""
        for one in occurrences:
            if one not in self._known:
                self._known.add(one)
                self._queued.append(one)

    def take(self, now: float, most: int) -> list[str]:
        """Occurrences to send now: refused ones whose pause is over, and new ones."""
        most = min(most, IN_FLIGHT - self.in_flight)
        taken = list[str]()
        while self._retries and self._retries[0][0] <= now and len(taken) < most // 2:
            taken.append(heapq.heappop(self._retries)[1])
        while self._queued and len(taken) < most:
            taken.append(self._queued.popleft())
        self.in_flight += len(taken)
        return taken

    def gone(self, occurrence: str) -> None:
        """Forget an occurrence that was taken and is no longer under way."""
        self.in_flight -= 1
        self._forget(occurrence)

    def ended(self, occurrence: str, outcome: Outcome, now: float) -> None:
        """Remember to report an occurrence that was taken."""
        self.in_flight -= 1
        if not self._unreported:
            self._unreported_since = now
        self._unreported.append(EndedOccurrence(occurrence=occurrence, outcome=outcome))

    def refused(self, occurrence: str, now: float) -> None:
        """Let an occurrence that its target refused wait: 1 s, 2 s, 4 s ... 64 s."""
        self.in_flight -= 1
        refusals = self._refusals.get(occurrence, 0)
        self._refusals[occurrence] = min(refusals + 1, 63)
        pause = min(1 << refusals, LONGEST_PAUSE.total_seconds())
        heapq.heappush(self._retries, (now + pause, occurrence))

    def report(self, now: float) -> tuple[EndedOccurrence, ...]:
        """What to report now. Single ones are reported at once; many are reported together."""
        if not self._unreported or (
            (self.in_flight or self._queued)
            and len(self._unreported) < REPORT_ITEMS
            and now - self._unreported_since < REPORT_AFTER
        ):
            return ()
        items = tuple(self._unreported.popleft() for _ in range(min(len(self._unreported), REPORT_ITEMS)))
        self._reported.update((one.occurrence, one) for one in items)
        return items

    def read(self, occurrences: Iterable[str]) -> None:
        """Forget occurrences whose end was read in the log, whichever gate reported it."""
        for one in occurrences:
            if self._reported.pop(one, None) is not None:
                self._forget(one)

    def next_at(self) -> float | None:
        """When a refused occurrence is to be sent again."""
        return self._retries[0][0] if self._retries else None

    def release(self) -> None:
        """Leave what was not sent yet to another gate."""
        self._known.difference_update(self._queued)
        self._known.difference_update(one for _, one in self._retries)
        self._queued.clear()
        self._retries.clear()
        self._refusals.clear()

    def on_connection_lost(self) -> None:
        """Forget what is in flight, and report again what was not read back: it may never be in the log."""
        self.release()
        self.in_flight = 0
        self._unreported.extendleft(self._reported.values())
        self._reported.clear()
        self._known = {one.occurrence for one in self._unreported}

    def _forget(self, occurrence: str) -> None:
        self._known.discard(occurrence)
        self._refusals.pop(occurrence, None)
