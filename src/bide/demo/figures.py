"""Figures that the demonstration measures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Final

from bide.runtime.wording import quantity

_ROUND_FACTORS: Final = (1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late messages were, in milliseconds: from the due time to the receipt."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Lateness | None:
        """The percentiles (nearest rank) of these values in milliseconds; None if there are no values."""
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
        """The percentiles as JSON, rounded to microseconds."""
        return {name: round(getattr(self, name), 3) for name in ("p50", "p90", "p99", "max")}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least *percent* of the values do not exceed."""
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureBar:
    """One bar of a histogram: values from *low* (included) to *high* (not included), in milliseconds.

    Attributes:
        high: None for a last bar without an upper end.
    """

    low: int
    high: int | None
    count: int


class Histogram:
    """Counts of lateness by the millisecond. Another thread may read the counts at any time."""

    def __init__(self, *, longest: int = 10_000) -> None:
        self._counts = [0] * (longest + 1)
        self.total = 0

    def add(self, milliseconds: float) -> None:
        """Count one value, clamped to the range from 0 to *longest*."""
        self._counts[min(int(max(milliseconds, 0.0)), len(self._counts) - 1)] += 1
        self.total += 1

    def quantile(self, fraction: float) -> int:
        """The smallest whole number of milliseconds above this fraction of the values; 0 without values."""
        wanted, total = fraction * self.total, 0
        for milliseconds, count in enumerate(self._counts):
            total += count
            if count and total >= wanted:
                return milliseconds + 1
        return 0

    def bars(self, most: int) -> list[FigureBar]:
        """Bars of the same round width, and a last one for all larger values; *most* bars at most.

        The width is the smallest round one with at most one in a hundred values in the last bar.
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
    """The smallest of 1, 2, 5, 10, 20, 50... that is not less than the value."""
    magnitude = 1
    while True:
        for factor in _ROUND_FACTORS:
            if factor * magnitude >= value:
                return factor * magnitude
        magnitude *= 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopFigures:
    """How the orders of the shop ended.

    Attributes:
        orders: the number of orders.
        handled: orders that a handler processed.
        parked: orders in the error queue.
        failed: failed attempts.
        wrong: orders that did not end as planned, or did not end at all.
        pending: messages due in the next days, published in addition to the orders.
    """

    orders: int
    handled: int
    parked: int
    failed: int
    wrong: int
    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
    """The figures of the whole demonstration.

    Attributes:
        release: the release of the broker.
        published: messages that the broker confirmed.
        expected: copies that had to arrive; the topic exchange routes a message to several queues.
        delivered: expected copies that arrived.
        lost: expected copies that did not arrive.
        early: copies that arrived before their due time.
        duplicates: copies that arrived again.
        misrouted: copies that arrived in a queue that should not have received them.
        altered: copies whose routing key, exchange, headers or body were not as sent.
        undeliverable: messages in the undeliverable queue.
        lateness: the percentiles of the lateness; None if no message arrived.
        hops: number of queues that a message waited in -> number of messages.
        seconds: phase -> its duration.
        shop: the figures of the second part; None without a second part.
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
    shop: ShopFigures | None = None

    @property
    def hops_per_message(self) -> float:
        """The mean number of queues that a message waited in."""
        return sum(hops * count for hops, count in self.hops.items()) / max(sum(self.hops.values()), 1)

    @property
    def problems(self) -> list[str]:
        """The problems in words; empty if there are none.

        A duplicate is not a problem, because bide guarantees at-least-once delivery.
        """
        counts = {
            "lost": self.lost,
            "early": self.early,
            "misrouted": self.misrouted,
            "altered": self.altered,
            "undeliverable": self.undeliverable,
        }
        problems = [f"{count:,} {what}" for what, count in counts.items() if count]
        if self.shop is not None and self.shop.wrong:
            problems.append(quantity(self.shop.wrong, "order") + " did not end as planned")
        return problems

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
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
            "shop": None if self.shop is None else asdict(self.shop),
        }
