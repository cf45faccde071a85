"""The levels of a delay infrastructure as data: what each digit of a delay waits, and in which queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLevel:
    """One level.

    Attributes:
        name: what people call it.
        unit: the wait of the digit 1, in milliseconds.
        highest: the highest digit.
        queue: name of its queue, or what the names of its queues start with, before the digit.
        has_queue_per_digit: whether each digit has a queue of its own.
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

    The unit of each level is that of the level below times one more than the highest digit there, so that the digit of
    a delay at a level is ``delay // unit % (highest + 1)``, and what a message has waited when it leaves the level is
    ``delay - delay % unit``.

    Attributes:
        levels: highest first.
        lanes: queues that share the messages of a digit evenly; None where a digit can have but one.
    """

    levels: tuple[DelayLevel, ...]
    lanes: int | None = None
