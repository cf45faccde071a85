"""A delay infrastructure as the arithmetic that it is: the digits of a delay, and a wait for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from bide.delay.levels import DelayLevel
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A message in the queue of a level, in milliseconds since the Unix epoch."""

    level: int
    digit: int
    enter: int
    leave: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLevels:
    """The levels of a delay infrastructure, highest first.

    The unit of each level is that of the level below times one more than the highest digit there, so that the digit of
    a delay at a level is ``delay // unit % (highest + 1)``, and what a message has waited when it leaves the level is
    ``delay - delay % unit``.

    Attributes:
        name: of the layout.
        resolution: delays are rounded up to a multiple of it; milliseconds.
        longest: the longest delay; milliseconds.
        lanes: queues that share the messages of a digit evenly; None where a digit can have but one.
    """

    name: str
    rungs: tuple[DelayLevel, ...]
    resolution: int
    longest: int
    lanes: int | None = None

    @classmethod
    def of(cls, infrastructure: DelayInfrastructure) -> PlanLevels:
        """The levels of an infrastructure that tells them.

        Raises:
            InvalidInputError: it does not.
        """
        found = infrastructure.delay_levels()
        if found is None:
            raise InvalidInputError(
                f"the layout {infrastructure.name!r} cannot be planned for: clock and nservicebus can"
            )
        return cls(
            name=infrastructure.name,
            rungs=found.levels,
            resolution=infrastructure.resolution // _MILLISECOND,
            longest=infrastructure.max_delay // _MILLISECOND,
            lanes=found.lanes,
        )

    def wait(self, delay: int) -> int:
        """What a message with this delay waits, both in milliseconds."""
        return -(-delay // self.resolution) * self.resolution

    def stays(self, sent: int, delay: int) -> Iterator[Interval]:
        """Where a message waits, in order, one message at a time; :mod:`bide.pipelines.plan.occupancy` does many."""
        wait = self.wait(delay)
        for level, rung in enumerate(self.rungs):
            digit = wait // rung.unit % (rung.highest + 1)
            if digit:
                leave = sent + wait - wait % rung.unit
                yield Interval(level=level, digit=digit, enter=leave - digit * rung.unit, leave=leave)
