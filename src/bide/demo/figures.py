"""What the demonstration measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil
from typing import Any, Final

_MILLISECOND: Final = timedelta(milliseconds=1)
_NICE: Final = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late messages were, in milliseconds: from the due time to the receipt."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Lateness | None:
        """The percentiles (nearest rank) of so many milliseconds; None where there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )

    def to_dict(self) -> dict[str, float]:
        """The same, rounded, for JSON."""
        return {name: round(getattr(self, name), 3) for name in ("p50", "p90", "p99", "max")}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least *percent* of the values do not exceed."""
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureBar:
    """One line of a histogram: values from *low* (included) to *high* (not included), in milliseconds.

    Attributes:
        high: None for the last bar, which has no upper end.
    """

    low: int
    high: int | None
    count: int


class Histogram:
    """Counts of lateness by the millisecond. Another thread may read them at any moment."""

    def __init__(self, *, longest: int = 10_000) -> None:
        self._counts = [0] * (longest + 1)
        self.total = 0

    def add(self, milliseconds: float) -> None:
        """Count one value; what is under zero counts as zero, and over the longest as the longest."""
        self._counts[min(int(max(milliseconds, 0.0)), len(self._counts) - 1)] += 1
        self.total += 1

    def quantile(self, fraction: float) -> int:
        """The full milliseconds that this part of the values stays under; 0 without values."""
        wanted, seen = fraction * self.total, 0
        for milliseconds, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return milliseconds + 1
        return 0

    def bars(self, most: int) -> list[FigureBar]:
        """At most so many bars of equal width, a round one, and what is beyond them in the last bar.

        The width is the smallest that leaves at most one in a hundred values to the last bar.
        """
        width = _round_up(self.quantile(0.99) / (most - 1))
        bars = [
            FigureBar(low=low, high=low + width, count=sum(self._counts[low : low + width]))
            for low in range(0, width * (most - 1), width)
        ]
        while bars and not bars[-1].count:
            bars.pop()
        rest = sum(self._counts[len(bars) * width :])
        if rest:
            bars.append(FigureBar(low=len(bars) * width, high=None, count=rest))
        return bars


def _round_up(value: float) -> int:
    """The value, or the next of 1, 2, 5, 10, 20, 50... above it."""
    magnitude = 1
    while True:
        for factor in _NICE:
            if factor * magnitude >= value:
                return factor * magnitude
        magnitude *= 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sold:
    """How the shop's orders ended.

    Attributes:
        orders: how many there were.
        handled: those that a handler was done with.
        parked: those in the error queue.
        failed: attempts that failed.
        wrong: orders that did not end as planned, or not at all.
        pending: messages of days to come that were published beside them.
    """

    orders: int
    handled: int
    parked: int
    failed: int
    wrong: int
    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
    """The outcome.

    Attributes:
        release: of the broker.
        published: messages that the broker confirmed.
        expected: copies that had to arrive: a topic exchange makes several of one message.
        delivered: of these, those that arrived.
        lost: those that did not.
        early: copies that arrived before their due time.
        duplicates: copies that arrived again.
        misrouted: copies that arrived where they did not belong.
        altered: copies whose routing key, exchange, headers or body were not as sent.
        undeliverable: messages in the undeliverable queue.
        lateness: in milliseconds; None where nothing arrived.
        hops: number of queues that a message waited in -> messages.
        seconds: phase -> how long it took.
        sold: the outcome of the second part; None where there was none.
    """

    release: str
    published: int
    expected: int
    delivered: int
    lost: int
    early: int
    duplicates: int
    misrouted: int
    altered: int
    undeliverable: int
    lateness: Lateness | None
    hops: Mapping[int, int]
    seconds: Mapping[str, float]
    sold: Sold | None = None

    @property
    def hops_per_message(self) -> float:
        """The mean number of queues that a message waited in."""
        return sum(hops * count for hops, count in self.hops.items()) / max(sum(self.hops.values()), 1)

    @property
    def problems(self) -> list[str]:
        """What should not have happened, in words; empty when all is well.

        A duplicate is none: bide promises delivery at least once.
        """
        counts = {
            "lost": self.lost,
            "early": self.early,
            "misrouted": self.misrouted,
            "altered": self.altered,
            "undeliverable": self.undeliverable,
            "orders without their end": self.sold.wrong if self.sold is not None else 0,
        }
        return [f"{count:,} {what}" for what, count in counts.items() if count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "release": self.release,
            "published": self.published,
            "expected": self.expected,
            "delivered": self.delivered,
            "lost": self.lost,
            "early": self.early,
            "duplicates": self.duplicates,
            "misrouted": self.misrouted,
            "altered": self.altered,
            "undeliverable": self.undeliverable,
            "lateness_ms": None if self.lateness is None else self.lateness.to_dict(),
            "hops_per_message": round(self.hops_per_message, 3),
            "hops": {str(hops): count for hops, count in sorted(self.hops.items())},
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "shop": None if self.sold is None else asdict(self.sold),
        }
