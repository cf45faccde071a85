"""Schedules of delayed retries: each is a tuple of delays, one per retry."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from bide.arguments import real_number, whole_number
from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidInputError

MAX_RETRIES: Final = 1000
"""More delayed retries than this are a mistake."""


def delays_of(values: Iterable[DelayLike]) -> tuple[timedelta, ...]:
    """Delays as a schedule.

    Raises:
        InvalidInputError: there are more than :data:`MAX_RETRIES`, or they are not a list.
        InvalidDelayError: one of them is not a delay.
    """
    if isinstance(values, str | timedelta) or not isinstance(values, Iterable):
        raise InvalidInputError(f"delays={values!r}: give a list of delays, such as ['5s', '30s', '5m']")
    delays = tuple(parse_delay(one) for one in values)
    if len(delays) > MAX_RETRIES:
        raise InvalidInputError(f"{len(delays)} delayed retries were asked for; the limit is {MAX_RETRIES}")
    return delays


def linear(step: DelayLike, *, times: int) -> tuple[timedelta, ...]:
    """Delays that grow by the same amount: ``linear("10s", times=3)`` is 10, 20 and 30 s, NServiceBus's default.

    Args:
        step: the first delay, and what each has more than the one before.
        times: how many retries, 1 to 1,000.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    base = parse_delay(step)
    try:
        return tuple(base * number for number in range(1, whole_number("times", times, 1, MAX_RETRIES) + 1))
    except OverflowError as error:
        raise InvalidInputError(f"{times} steps of {step!s} end after the year 9999: give fewer") from error


def exponential(
    first: DelayLike, *, times: int, factor: float = 2.0, longest: DelayLike = timedelta(days=1)
) -> tuple[timedelta, ...]:
    """Delays that grow by the same factor: ``exponential("5s", times=5)`` is 5, 10, 20, 40 and 80 s.

    Args:
        first: the first delay.
        times: how many retries, 1 to 1,000.
        factor: the ratio of each delay to the one before; at least 1.
        longest: none is longer.

    Raises:
        InvalidInputError: in one of its kinds.
    """
    real_number("factor", factor, 1, 1000)
    delay, limit = parse_delay(first), parse_delay(longest)
    delays = []
    for _ in range(whole_number("times", times, 1, MAX_RETRIES)):
        delays.append(min(delay, limit))
        try:
            delay = min(delay, limit) * factor
        except OverflowError:
            delay = limit
    return tuple(delays)
