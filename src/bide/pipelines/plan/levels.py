"""A delay infrastructure as the arithmetic that it is: the digits of a delay, and a wait for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from bide.delay.clock import Clock
from bide.delay.clock_digits import LEVELS
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure
from bide.errors import InvalidInputError

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLevel:
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
    rungs: tuple[PlanLevel, ...]
    resolution: int
    longest: int
    lanes: int | None = None

    @classmethod
    def of(cls, infrastructure: DelayInfrastructure) -> PlanLevels:
        """The ladder of ``Clock``, or of NServiceBus's binary cascade.

        Raises:
            InvalidInputError: it is neither.
        """
        match infrastructure:
            case Clock():
                rungs = tuple(
                    PlanLevel(
                        name=level.letter,
                        unit=level.unit // _MILLISECOND,
                        highest=level.highest,
                        queue=infrastructure.digit_queue(level, 1).removesuffix("1"),
                        has_queue_per_digit=True,
                    )
                    for level in LEVELS
                )
                lanes: int | None = infrastructure.lanes
            case NServiceBus():
                cascade = infrastructure.cascade
                rungs = tuple(
                    PlanLevel(
                        name=f"{level:02}",
                        unit=1000 << level,
                        highest=1,
                        queue=cascade.level_names[level],
                        has_queue_per_digit=False,
                    )
                    for level in reversed(range(cascade.levels))
                )
                lanes = None
            case _:
                raise InvalidInputError(
                    f"the layout {infrastructure.name!r} cannot be planned for: clock and nservicebus can"
                )
        return cls(
            name=infrastructure.name,
            rungs=rungs,
            resolution=infrastructure.resolution // _MILLISECOND,
            longest=infrastructure.max_delay // _MILLISECOND,
            lanes=lanes,
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
