"""What a broker can do, as measured, and whether that is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bide.errors import InvalidInputError

Verdict = Literal["fits", "tight", "too much", "not judged"]

TIGHT: Final = 0.7
"""Of a capacity: beyond this share, a broker that does anything else as well is late."""

HOPS: Final[Mapping[str, Mapping[str, float]]] = {
    "3.10": {"clock": 19_000, "nservicebus": 15_000},
    "4.3": {"clock": 24_000, "nservicebus": 35_000},
}
"""Hops per second by release and layout: one node, four cores, persistent messages of 200 bytes, quorum queues."""

RELEASES: Final[Mapping[int, Mapping[str, float]]] = {
    32: {"3.10": 5_900, "4.3": 5_900},
    1000: {"3.10": 17_100, "4.3": 9_300},
}
"""Messages per second that leave one queue, by ``dead_letter_worker_consumer_prefetch`` and release.

30,000 messages of 200 bytes that leave it in the same moment, and are consumed: the table of docs/delays.md (3.10.8 and
4.3.6). The benchmark's 200,000 through one queue of 4.3.6 (``burst``, "Clock, 1 lane") were no slower, with medians of
6,207 and 13,465; of two figures the lower one is taken, since a plan that says "fits" should be right.
"""

DISK: Final[Mapping[str, int]] = {"clock": 420, "nservicebus": 870}
"""Bytes on disk of a message that waits, beside its body: what the data folder of RabbitMQ 4.3 grew by."""

MEMORY: Final[Mapping[str, int]] = {"clock": 1_760, "nservicebus": 1_830}
"""Bytes of memory of a message that waits: what the node grew by, on RabbitMQ 4.3. Bodies of 200 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a broker can do, and what a message costs it.

    Attributes:
        hops: per second, over all queues.
        release: messages per second that leave one queue.
        disk_each: bytes that a message takes on disk beside its body.
        memory_each: bytes of memory that a message takes.
        disk: bytes that there are for messages; None if that is not known. Likewise *memory*.
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
        """As measured on one machine of four cores; what is given wins.

        Raises:
            InvalidInputError: there is no measurement of this broker, layout or prefetch.
        """
        if broker not in HOPS:
            raise InvalidInputError(f"RabbitMQ {broker!r} was not measured: {', '.join(HOPS)} were")
        if prefetch not in RELEASES:
            known = " and ".join(map(str, RELEASES))
            raise InvalidInputError(f"a prefetch of {prefetch} was not measured: {known} were")
        if layout not in HOPS[broker]:
            raise InvalidInputError(f"the layout {layout!r} was not measured: {', '.join(HOPS[broker])} were")
        return cls(
            hops=HOPS[broker][layout] if hops is None else hops,
            release=RELEASES[prefetch][broker] if release is None else release,
            disk_each=DISK[layout],
            memory_each=MEMORY[layout],
            disk=disk,
            memory=memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One figure against what the broker can do.

    Attributes:
        what: ``hops/s``, ``release/s``, ``disk`` or ``memory``.
        wanted: the largest value in the plan.
        capacity: what there is; None if that is not known.
        lanes: queues per digit that are enough for ``release/s``, where there can be several; else None.
    """

    what: str
    wanted: float
    capacity: float | None
    lanes: int | None = None

    @property
    def load(self) -> float | None:
        """The share of the capacity that is wanted."""
        return None if self.capacity is None else self.wanted / self.capacity

    @property
    def verdict(self) -> Verdict:
        """In words: up to :data:`TIGHT` of the capacity fits."""
        if self.load is None:
            return "not judged"
        return "fits" if self.load <= TIGHT else "tight" if self.load <= 1 else "too much"


def judge(
    capacity: Capacity, *, hops: float, release: float, messages: float, bytes: float, lanes: int | None
) -> list[Judgement]:
    """Hold the largest figures of a plan against a capacity.

    Args:
        hops: the most in a second.
        release: the most that the queues of one digit release in a second.
        messages: the most that are held.
        bytes: of bodies, the most that are held.
        lanes: queues per digit, which share its messages evenly; None where there can be but one.
    """
    enough = None if lanes is None else max(-int(-release // (TIGHT * capacity.release)), 1)
    return [
        Judgement(what="hops/s", wanted=hops, capacity=capacity.hops),
        Judgement(what="release/s", wanted=release / (lanes or 1), capacity=capacity.release, lanes=enough),
        Judgement(what="disk", wanted=bytes + messages * capacity.disk_each, capacity=capacity.disk),
        Judgement(what="memory", wanted=messages * capacity.memory_each, capacity=capacity.memory),
    ]
