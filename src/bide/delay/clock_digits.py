"""The levels of ``Clock``, and the digits of a delay."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from bide.durations import format_delay
from bide.errors import InvalidDelayError


@dataclass(frozen=True, slots=True)
class Level:
    """One unit of time.

    Attributes:
        letter: the level's name in exchanges, queues and keys.
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
        value: the digit; zero for a level that the message passes without a wait.
        lane: the number of the parallel queue of the digit.
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
"""The levels, highest first. The longest wait of a queue, 31 x 100 days, is below RabbitMQ's TTL limit of ten years."""

RESOLUTION: Final = LEVELS[-1].unit
MAX_DELAY: Final = sum((level.unit * level.highest for level in LEVELS), timedelta(0))


def digits_of(wait: timedelta) -> list[tuple[Level, int]]:
    """The levels from the highest with a non-zero digit down to the lowest, each with its digit."""
    digits: list[tuple[Level, int]] = []
    for level in LEVELS:
        digit, wait = divmod(wait, level.unit)
        if digit or digits:
            digits.append((level, digit))
    return digits


def longest_delay(max_delay: timedelta, resolution: timedelta) -> timedelta:
    """Check ``max_delay`` and ``resolution``, and return the longest delay of a ``Clock``.

    The largest possible ``max_delay`` is rounded down to a multiple of the resolution.

    Raises:
        InvalidDelayError: one of them is out of range, or not a valid multiple.
    """
    if not RESOLUTION <= max_delay <= MAX_DELAY:
        raise InvalidDelayError(
            f"max_delay {format_delay(max_delay)} must be from {format_delay(RESOLUTION)} to {format_delay(MAX_DELAY)}"
        )
    if not any(
        level.unit <= resolution < above and not resolution % level.unit and not above % resolution
        for level, above in zip(LEVELS, (MAX_DELAY, *(level.unit for level in LEVELS)), strict=False)
    ):
        raise InvalidDelayError(
            f"the resolution {format_delay(resolution)} must be a multiple of a unit (10 ms, 1 s, 1 min, 1 h, "
            "1 d) that divides the next unit: 50 ms, 1 s or 15 s for example"
        )
    odd = max_delay % resolution
    if odd and max_delay != MAX_DELAY:
        raise InvalidDelayError(
            f"max_delay {format_delay(max_delay)} is not a multiple of the resolution {format_delay(resolution)}: give "
            f"{format_delay(max(max_delay - odd, resolution))} for example"
        )
    return max_delay - odd
