"""The delayed retry of quorum queues: what comes back rests before it is delivered again (RabbitMQ 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from bide.testing.rules.entry import Entry
from bide.topology import Argument


class DelayedRetry:
    """Messages of one queue that rest.

    Args:
        arguments: of the queue; ``x-delayed-retry-type`` and its kin.
    """

    def __init__(self, arguments: Mapping[str, Argument]) -> None:
        kind = str(arguments.get("x-delayed-retry-type", "disabled"))
        shortest, longest = (arguments.get(f"x-delayed-retry-{one}") for one in ("min", "max"))
        self._shortest = shortest if isinstance(shortest, int) else 0
        self._longest = longest if isinstance(longest, int) else self._shortest
        self._kind = kind if self._shortest else "disabled"
        self._resting: list[tuple[int, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._resting)

    def takes(self, *, failed: bool) -> bool:
        """Whether what comes back in this way rests."""
        return self._kind in ("all", "failed" if failed else "returned")

    def add(self, entry: Entry, now: int) -> None:
        """Let one rest, the longer the more often it failed.

        Args:
            now: in milliseconds.
        """
        rest = min(self._shortest * max(1, entry.failed or 0), self._longest)
        heappush(self._resting, ((now + rest) * 1000, entry.number, entry))

    @property
    def next_due(self) -> int | None:
        """When the next has rested, in microseconds; None if there is none."""
        return self._resting[0][0] if self._resting else None

    def rested(self, now: int) -> list[Entry]:
        """Those that have rested by now, given in microseconds."""
        done = []
        while self._resting and self._resting[0][0] <= now:
            done.append(heappop(self._resting)[2])
        return done

    def clear(self) -> int:
        """Forget all, and tell how many there were."""
        number = len(self._resting)
        self._resting.clear()
        return number
