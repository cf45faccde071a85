"""The delayed retry of quorum queues (RabbitMQ 4.3): failed messages wait before redelivery."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from bide.testing.rules.entry import Entry
from bide.topology import Argument


class DelayedRetry:
    """The messages of a queue that wait for their redelivery.

    Args:
        arguments: the arguments of the queue, with ``x-delayed-retry-type`` and similar.
    """

    def __init__(self, arguments: Mapping[str, Argument]) -> None:
        kind = str(arguments.get("x-delayed-retry-type", "disabled"))
        shortest, longest = (arguments.get(f"x-delayed-retry-{one}") for one in ("min", "max"))
        self._shortest = shortest if isinstance(shortest, int) else 0
        self._longest = longest if isinstance(longest, int) else self._shortest
        self._kind = kind if self._shortest else "disabled"
        self._waiting: list[tuple[int, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def delays(self, *, failed: bool) -> bool:
        """Whether a message that returns in this way is delayed."""
        return self._kind in ("all", "failed" if failed else "returned")

    def add(self, entry: Entry, now: int) -> None:
        """Delay a message; the delay grows with the number of its failures.

        Args:
            entry: the message.
            now: the time in milliseconds.
        """
        delay = min(self._shortest * max(1, entry.failed or 0), self._longest)
        heappush(self._waiting, ((now + delay) * 1000, entry.number, entry))

    @property
    def next_due(self) -> int | None:
        """When the next delay ends, in microseconds; None if no message is delayed."""
        return self._waiting[0][0] if self._waiting else None

    def pop_due(self, now: int) -> list[Entry]:
        """Remove and return the messages whose delay has ended; *now* is in microseconds."""
        done = []
        while self._waiting and self._waiting[0][0] <= now:
            done.append(heappop(self._waiting)[2])
        return done

    def clear(self) -> int:
        """Drop all messages; returns their number."""
        number = len(self._waiting)
        self._waiting.clear()
        return number
