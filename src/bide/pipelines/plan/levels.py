"""Levels of a layout for a plan: the digits of a delay, and the wait at each level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from bide.delay.levels import DelayLevel
from bide.delay.protocol import DelayInfrastructure
from bide.durations import MILLISECOND
from bide.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The time of a message in the queue of a level.

    Attributes:
        level: the index of the level, from the highest.
        digit: the digit of the delay at this level.
        enter: when the message enters the queue, in milliseconds since the Unix epoch.
        leave: when the message leaves the queue, in milliseconds since the Unix epoch.
    """

    level: int
    digit: int
    enter: int
    leave: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLevels:
    """The levels of a delay infrastructure, and the limits of its delays.

    The unit of each level is the unit of the level below times one more than the highest digit there. So the digit of a
    delay at a level is ``delay // unit % (highest + 1)``, and a message that leaves the level has waited for
    ``delay - delay % unit``.

    Attributes:
        name: the name of the layout.
        levels: the levels, highest first.
        resolution: delays are rounded up to a multiple of this, in milliseconds.
        longest: the longest delay in milliseconds.
        lanes: the number of queues that share the messages of a digit evenly; None if a digit has exactly one queue.
    """

    name: str
    levels: tuple[DelayLevel, ...]
    resolution: int
    longest: int
    lanes: int | None = None

    @classmethod
    def of(cls, infrastructure: DelayInfrastructure) -> PlanLevels:
        """The levels of a delay infrastructure.

        Raises:
            InvalidInputError: the infrastructure has no levels.
        """
        found = infrastructure.delay_levels()
        if found is None:
            raise InvalidInputError(
                f"a plan does not support the layout {infrastructure.name!r}: choose clock or nservicebus"
            )
        return cls(
            name=infrastructure.name,
            levels=found.levels,
            resolution=infrastructure.resolution // MILLISECOND,
            longest=infrastructure.max_delay // MILLISECOND,
            lanes=found.lanes,
        )

    def wait(self, delay: int) -> int:
        """How long a message with this delay waits, both in milliseconds."""
        return -(-delay // self.resolution) * self.resolution

    def intervals(self, sent: int, delay: int) -> Iterator[Interval]:
        """The intervals of one message, in order; :mod:`bide.pipelines.plan.occupancy` computes those of many."""
        wait = self.wait(delay)
        for number, level in enumerate(self.levels):
            digit = wait // level.unit % (level.highest + 1)
            if digit:
                leave = sent + wait - wait % level.unit
                yield Interval(level=number, digit=digit, enter=leave - digit * level.unit, leave=leave)


def check_delays(longest: int, layout: PlanLevels) -> None:
    """Check that a layout supports the longest delay, in milliseconds.

    Raises:
        InvalidInputError: the delay is too long.
    """
    if longest > layout.longest:
        # A column of a table may have numbers that no timedelta can hold.
        is_huge = longest > timedelta.max // MILLISECOND
        delay = f"{longest:,} ms" if is_huge else timedelta(milliseconds=longest)
        raise InvalidInputError(
            f"there is a delay of {delay}, but {layout.name} supports at most "
            f"{timedelta(milliseconds=layout.longest)}: leave out longer delays, or plan for another layout"
        )
