"""The levels of ``Clock``, and a delay as their digits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final


@dataclass(frozen=True, slots=True)
class Level:
    """One unit of time.

    Attributes:
        letter: its name in exchanges, queues and keys.
        unit: the wait of the digit 1.
        highest: the highest digit.
    """

    letter: str
    unit: timedelta
    highest: int


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a delay, and the key that leads to its queue.

    Attributes:
        value: zero for a level that the message passes without a wait.
        lane: which of the parallel queues of the digit.
        padding: the words before the key; see :func:`bide.delay.clock_keys.padding_of`.
    """

    level: Level
    value: int
    lane: int = 0
    padding: str = ""


LEVELS: Final = (
    Level("e", timedelta(days=100), 31),
    Level("d", timedelta(days=1), 99),
    Level("h", timedelta(hours=1), 23),
    Level("m", timedelta(minutes=1), 59),
    Level("s", timedelta(seconds=1), 59),
    Level("c", timedelta(milliseconds=10), 99),
)
"""Highest first. The longest wait of one queue, 31 x 100 days, is under RabbitMQ's limit of ten years for a TTL."""

RESOLUTION: Final = LEVELS[-1].unit
MAX_DELAY: Final = sum((level.unit * level.highest for level in LEVELS), timedelta(0))


def digits_of(wait: timedelta) -> list[tuple[Level, int]]:
    """Every level from the highest with a non-zero digit down to the lowest, with its digit."""
    digits: list[tuple[Level, int]] = []
    for level in LEVELS:
        digit, wait = divmod(wait, level.unit)
        if digit or digits:
            digits.append((level, digit))
    return digits
