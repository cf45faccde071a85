"""Measured capacity of a broker, and verdicts on a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bide.errors import InvalidInputError

Verdict = Literal["fits", "tight", "too much", "not judged"]

TIGHT_LOAD: Final = 0.7
"""Share of a capacity up to which a plan fits. Above it, a broker that has other work to do delivers messages late."""

HOP_RATES: Final[Mapping[str, Mapping[str, float]]] = {
    "3.10": {"clock": 19_000, "nservicebus": 15_000},
    "4.3": {"clock": 24_000, "nservicebus": 35_000},
}
"""Hops per second by release and layout: one node, four cores, persistent messages of 200 bytes, quorum queues."""

RELEASE_RATES: Final[Mapping[int, Mapping[str, float]]] = {
    32: {"3.10": 5_900, "4.3": 5_900},
    1000: {"3.10": 17_100, "4.3": 9_300},
}
"""Messages per second that leave one queue, by ``dead_letter_worker_consumer_prefetch`` and release.

Measured with 30,000 messages of 200 bytes that expire at the same time and are consumed: the table in docs/delays.md
(3.10.8 and 4.3.6). In the benchmark ``burst`` ("Clock, 1 lane"), with 200,000 messages through one queue of 4.3.6, the
medians were 6,207 (prefetch 32) and 13,465 (prefetch 1,000). The lower figures are used, so that the verdict "fits" is
safe.
"""

DISK_BYTES: Final[Mapping[str, int]] = {"clock": 420, "nservicebus": 870}
"""Bytes on disk per waiting message in addition to its body: the growth of the data folder of RabbitMQ 4.3."""

MEMORY_BYTES: Final[Mapping[str, int]] = {"clock": 1_760, "nservicebus": 1_830}
"""Bytes of memory per waiting message with a body of 200 bytes: the growth of a node of RabbitMQ 4.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a broker, and the cost of a message.

    Attributes:
        hops: hops per second, over all queues.
        release: messages per second that leave one queue.
        disk_each: bytes on disk per message, in addition to its body.
        memory_each: bytes of memory per message.
        disk: bytes of disk available for messages; None if unknown.
        memory: bytes of memory available for messages; None if unknown.
    """

    hops: float
    release: float
    disk_each: int
    memory_each: int
    disk: int | None = None
    memory: int | None = None

    @classmethod
    def measured(
        cls,
        layout: str,
        *,
        broker: str = "4.3",
        prefetch: int = 32,
        hops: float | None = None,
        release: float | None = None,
        disk: int | None = None,
        memory: int | None = None,
    ) -> Capacity:
        """The capacity measured on a machine with four cores, overridden by the given values.

        Raises:
            InvalidInputError: this broker, layout or prefetch was not measured.
        """
        if broker not in HOP_RATES:
            raise InvalidInputError(f"RabbitMQ {broker!r} was not measured: choose from {', '.join(HOP_RATES)}")
        if prefetch not in RELEASE_RATES:
            known = ", ".join(map(str, RELEASE_RATES))
            raise InvalidInputError(f"a prefetch of {prefetch} was not measured: choose from {known}")
        if layout not in HOP_RATES[broker]:
            known = ", ".join(HOP_RATES[broker])
            raise InvalidInputError(f"the layout {layout!r} was not measured: choose from {known}")
        return cls(
            hops=HOP_RATES[broker][layout] if hops is None else hops,
            release=RELEASE_RATES[prefetch][broker] if release is None else release,
            disk_each=DISK_BYTES[layout],
            memory_each=MEMORY_BYTES[layout],
            disk=disk,
            memory=memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The comparison of one figure with the capacity.

    Attributes:
        what: ``hops/s``, ``release/s``, ``disk`` or ``memory``.
        wanted: the largest value in the plan.
        capacity: the capacity; None if unknown.
        lanes: for ``release/s``, the number of queues per digit at which the plan fits; None if a digit has exactly one
            queue.
    """

    what: str
    wanted: float
    capacity: float | None
    lanes: int | None = None

    @property
    def load(self) -> float | None:
        """The share of the capacity that the plan uses."""
        return None if self.capacity is None else self.wanted / self.capacity

    @property
    def verdict(self) -> Verdict:
        """The verdict: up to :data:`TIGHT_LOAD` of the capacity the plan fits."""
        if self.load is None:
            return "not judged"
        return "fits" if self.load <= TIGHT_LOAD else "tight" if self.load <= 1 else "too much"


def judge(
    capacity: Capacity, *, hops: float, release: float, messages: float, bytes: float, lanes: int | None
) -> list[Judgement]:
    """Compare the largest figures of a plan with a capacity.

    Args:
        hops: the largest number of hops in a second.
        release: the largest number of messages that the queues of one digit release in a second.
        messages: the largest number of messages held.
        bytes: the largest size of the bodies held.
        lanes: queues per digit, which share its messages evenly; None if a digit has exactly one queue.
    """
    enough = None if lanes is None else max(-int(-release // (TIGHT_LOAD * capacity.release)), 1)
    return [
        Judgement(what="hops/s", wanted=hops, capacity=capacity.hops),
        Judgement(what="release/s", wanted=release / (lanes or 1), capacity=capacity.release, lanes=enough),
        Judgement(what="disk", wanted=bytes + messages * capacity.disk_each, capacity=capacity.disk),
        Judgement(what="memory", wanted=messages * capacity.memory_each, capacity=capacity.memory),
    ]
