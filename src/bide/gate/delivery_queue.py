"""The occurrences of a partition that its leader delivers, from the claim to the report."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Final, NamedTuple

from bide.delay.forwarding import LONGEST_PAUSE
from bide.gate.target_windows import TargetWindows
from bide.schedules.entries import Outcome
from bide.schedules.records import EndedOccurrence

IN_FLIGHT: Final = 500
"""The maximum number of messages of a partition in flight: sent and not confirmed."""

IN_FLIGHT_BYTES: Final = 8_000_000
"""The size of the messages in flight, in bytes, from which on no more are sent."""

CROWDED: Final = 1000
"""The number of waiting occurrences of one target from which on no more are claimed for it."""

REPORT_ITEMS: Final = 1000
"""The maximum number of occurrences in one report."""

REPORT_AFTER: Final = 0.1
"""Seconds for which a report waits for more occurrences while others are in flight."""

REPORT_BEFORE_DUE: Final = 0.025
"""Seconds for which a report waits for more occurrences while others are claimed and not due yet."""


class OccurrenceHead(NamedTuple):
    """A claimed occurrence without its message.

    Attributes:
        target: the target of the message.
        size: the size of the message in bytes.
        due: the time before which it is not sent, in milliseconds since the Unix epoch; 0 if it is sent at once.
    """

    occurrence: str
    target: str
    size: int
    due: int = 0


class DeliveryQueue:
    """The occurrences to deliver, to deliver again, and to report. Due times are those of the log; all other times are
    seconds by a monotonic clock.

    Targets take turns, and each has its own limit of messages in flight. So a target with many messages, or a slow one,
    does not use up the places of others.

    Args:
        on_place: called when there may be something to send again.

    Attributes:
        in_flight: the number of occurrences that were sent and are not confirmed.
        crowded: targets for which nothing more should be claimed for now, because too many occurrences wait for them.
    """

    def __init__(self, on_place: Callable[[], None] = lambda: None) -> None:
        self.in_flight = 0
        self.crowded = set[str]()
        self._on_place = on_place
        self._windows = TargetWindows()
        self._bytes_in_flight = 0
        self._known: dict[str, OccurrenceHead] = {}
        """Occurrences that are not due yet, queued, in flight, refused, or ended and not reported yet."""
        self._early: list[tuple[int, OccurrenceHead]] = []
        """Occurrences that are not known to be due, by due time."""
        self._queued: dict[str, deque[OccurrenceHead]] = {}
        self._turns: dict[str, None] = {}
        """Targets with queued occurrences and perhaps a place, in the order of their turns."""
        self._waiting = Counter[str]()
        """Occurrences that are queued or refused, by target."""
        self._all_waiting = 0
        self._refusals: dict[str, int] = {}
        self._retries: list[tuple[float, OccurrenceHead]] = []
        self._unreported = deque[EndedOccurrence]()
        self._reported: dict[str, EndedOccurrence] = {}
        self._unreported_since = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight, and everything that ended was reported and read back."""
        return not (self.in_flight or self._unreported or self._reported)

    @property
    def backlog(self) -> int:
        """The number of due occurrences that wait to be sent, without those whose targets have no place."""
        return sum(len(self._queued[one]) for one in self._turns)

    @property
    def early(self) -> int:
        """The number of occurrences that are not due yet."""
        return len(self._early)

    @property
    def next_due(self) -> int | None:
        """The due time of the next occurrence that is not due yet, in milliseconds since the Unix epoch, or None."""
        return self._early[0][0] if self._early else None

    @property
    def pending(self) -> int:
        """The number of occurrences that were claimed and have not ended. Other threads may read it."""
        return self.in_flight + self._all_waiting + len(self._early)

    def add(self, occurrences: Iterable[OccurrenceHead]) -> None:
        """Take occurrences that are under way. Those that are known already are ignored."""
        for one in occurrences:
            if one.occurrence not in self._known:
                self._known[one.occurrence] = one
                if one.due:
                    heapq.heappush(self._early, (one.due, one))
                else:
                    self._wait_for_turn(one)

    def queue_due(self, clock: int) -> None:
        """Let occurrences that have become due take their turns.

        Args:
            clock: the time by the gate's clock, in milliseconds since the Unix epoch.
        """
        while self._early and self._early[0][0] <= clock:
            self._wait_for_turn(heapq.heappop(self._early)[1])

    def take(self, now: float, most: int) -> list[str]:
        """Occurrences to send now: due ones, and refused ones whose pause is over."""
        while self._retries and self._retries[0][0] <= now:
            one = heapq.heappop(self._retries)[1]
            self._remove_waiting(one.target)
            self._wait_for_turn(one)
        taken = list[str]()
        while self._turns and len(taken) < most and self._has_room:
            target = next(iter(self._turns))
            del self._turns[target]
            if not self._windows.enter(target, self._take_turn):
                continue
            queued = self._queued[target]
            one = queued.popleft()
            if queued:
                self._turns[target] = None
            else:
                del self._queued[target]
            self._remove_waiting(target)
            self.in_flight += 1
            self._bytes_in_flight += one.size
            taken.append(one.occurrence)
        return taken

    def not_sent(self, occurrences: Collection[str]) -> None:
        """Give back the places of occurrences that were taken and will not be sent."""
        for one in occurrences:
            self._windows.leave(self._known[one].target)

    def gone(self, occurrence: str) -> None:
        """Forget an occurrence that was taken and is no longer under way."""
        self.not_sent([occurrence])
        self._no_longer_in_flight(occurrence)
        self._forget(occurrence)

    def ended(self, occurrence: str, outcome: Outcome, now: float) -> None:
        """Record the end of an occurrence that was taken, for a report."""
        self._no_longer_in_flight(occurrence)
        if not self._unreported:
            self._unreported_since = now
        self._unreported.append(EndedOccurrence(occurrence=occurrence, outcome=outcome))

    def refused(self, occurrence: str, now: float) -> None:
        """Let an occurrence that its target refused wait: 1 s, 2 s, 4 s ... 64 s."""
        one = self._no_longer_in_flight(occurrence)
        refusals = self._refusals.get(occurrence, 0)
        self._refusals[occurrence] = min(refusals + 1, 63)
        pause = min(1 << refusals, LONGEST_PAUSE.total_seconds())
        heapq.heappush(self._retries, (now + pause, one))
        self._add_waiting(one.target)

    def report(self, now: float) -> tuple[EndedOccurrence, ...]:
        """The ended occurrences to report now. A single one is reported at once; many are reported together."""
        if self.in_flight or self._turns:
            wait = REPORT_AFTER
        else:
            wait = REPORT_BEFORE_DUE if self._early else 0.0
        if not self._unreported or (len(self._unreported) < REPORT_ITEMS and now - self._unreported_since < wait):
            return ()
        items = tuple(self._unreported.popleft() for _ in range(min(len(self._unreported), REPORT_ITEMS)))
        self._reported.update((one.occurrence, one) for one in items)
        return items

    def read(self, occurrences: Iterable[str]) -> None:
        """Forget occurrences whose end was read in the log, whichever gate reported it."""
        for one in occurrences:
            if self._reported.pop(one, None) is not None:
                self._forget(one)

    def release(self) -> None:
        """Leave the occurrences that were not sent yet to another gate."""
        for queued in self._queued.values():
            for one in queued:
                del self._known[one.occurrence]
        for _, one in chain(self._early, self._retries):
            del self._known[one.occurrence]
        self._early.clear()
        self._queued.clear()
        self._turns.clear()
        self._retries.clear()
        self._waiting.clear()
        self._all_waiting = 0
        self._refusals.clear()
        self.crowded.clear()

    def on_connection_lost(self, windows: TargetWindows) -> None:
        """Forget the occurrences in flight. Repeat reports that were not read back: they may not reach the log.

        Args:
            windows: the places of the new connection.
        """
        self.release()
        self._windows = windows
        self.in_flight = self._bytes_in_flight = 0
        self._unreported.extendleft(self._reported.values())
        self._reported.clear()
        self._known = {one.occurrence: self._known[one.occurrence] for one in self._unreported}

    @property
    def _has_room(self) -> bool:
        return self.in_flight < IN_FLIGHT and self._bytes_in_flight < IN_FLIGHT_BYTES

    def _wait_for_turn(self, one: OccurrenceHead) -> None:
        queued = self._queued.get(one.target)
        if queued is None:
            queued = self._queued[one.target] = deque()
            self._turns[one.target] = None
        queued.append(one)
        self._add_waiting(one.target)

    def _take_turn(self, target: str) -> None:
        """Give a target its turn: it may have a place again."""
        if target in self._queued:
            self._turns[target] = None
            self._on_place()

    def _add_waiting(self, target: str) -> None:
        self._all_waiting += 1
        self._waiting[target] += 1
        if self._waiting[target] >= CROWDED:
            self.crowded.add(target)

    def _remove_waiting(self, target: str) -> None:
        self._all_waiting -= 1
        self._waiting[target] -= 1
        if self._waiting[target] < CROWDED:
            self.crowded.discard(target)
        if not self._waiting[target]:
            del self._waiting[target]

    def _no_longer_in_flight(self, occurrence: str) -> OccurrenceHead:
        one = self._known[occurrence]
        self.in_flight -= 1
        self._bytes_in_flight -= one.size
        return one

    def _forget(self, occurrence: str) -> None:
        self._known.pop(occurrence, None)
        self._refusals.pop(occurrence, None)
