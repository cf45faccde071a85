"""The levels of a delay infrastructure as data: the wait and the queue of each digit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLevel:
    """One level.

    Attributes:
        name: a readable name.
        unit: the wait of the digit 1, in milliseconds.
        highest: the highest digit.
        queue: the name of its queue, or the start of its queues' names, before the digit.
        has_queue_per_digit: whether each digit has its own queue.
    """

    name: str
    unit: int
    highest: int
    queue: str
    has_queue_per_digit: bool

    def queue_of(self, digit: int) -> str:
        """The name of the queue that holds messages with this digit."""
        return f"{self.queue}{digit}" if self.has_queue_per_digit else self.queue


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLevels:
    """The levels of a delay infrastructure.

    The unit of a level is ``unit * (highest + 1)`` of the level below. The digit of a delay at a level is therefore
    ``delay // unit % (highest + 1)``, and a message that leaves the level has waited ``delay - delay % unit``.

    Attributes:
        levels: the levels, highest first.
        lanes: the number of queues that share the messages of a digit evenly; None if a digit can have only one.
    """

    levels: tuple[DelayLevel, ...]
    lanes: int | None = None
