"""Percentiles of lateness."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

from benchmarks.suite.task import Values

KEEPS_PACE: Final = 0.97
"""Part of the rate asked for that a sender has to reach."""

KEEPS_UP_MS: Final = 5_000.0
"""A system of which one message in a hundred comes later than this has fallen behind."""

RESOLUTION_MS: Final = 1.0
"""The broker counts a TTL in whole milliseconds, and a due time is one: less than this is not early."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least *percent* of the values do not exceed (nearest rank)."""
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


def lateness(milliseconds: Sequence[float], *, expected: int, sent_per_second: float, rate: float) -> Values:
    """The quantities of a run with a steady rate.

    Args:
        milliseconds: from the due time to the receipt, of every message that arrived; at least one.
        expected: messages that had to arrive.
        sent_per_second: the rate that was reached.
        rate: the rate that was asked for.
    """
    ordered = sorted(milliseconds)
    p99, lost = percentile(ordered, 99), expected - len(ordered)
    kept_up = sent_per_second >= KEEPS_PACE * rate and lost <= 0 and p99 <= KEEPS_UP_MS
    return {
        "sent": sent_per_second,
        "p50": percentile(ordered, 50),
        "p99": p99,
        "max": ordered[-1],
        "min": ordered[0],
        "early": sum(1 for one in ordered if one < -RESOLUTION_MS),
        "lost": lost,
        "sustained": float(kept_up),
    }
