"""Schedules of delayed retries, as tuples of delays."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from bide.durations import DelayLike, parse_delay
from bide.errors import InvalidInputError
from bide.runtime.arguments import real_number, whole_number

MAX_RETRIES: Final = 1000
"""The longest schedule that is accepted; more retries are taken for a mistake."""


def delays_of(values: Iterable[DelayLike]) -> tuple[timedelta, ...]:
    """Parse the delays of a schedule.

    Raises:
        InvalidInputError: the value is not a list, or has more than :data:`MAX_RETRIES` delays.
        InvalidDelayError: an element is not a delay.
    """
    if isinstance(values, str | timedelta) or not isinstance(values, Iterable):
        raise InvalidInputError(f"delays={values!r}: give a list of delays, such as ['5s', '30s', '5m']")
    delays = tuple(parse_delay(one) for one in values)
    if len(delays) > MAX_RETRIES:
        raise InvalidInputError(f"{len(delays)} delayed retries are more than the limit of {MAX_RETRIES}: give fewer")
    return delays


def linear(step: DelayLike, *, times: int) -> tuple[timedelta, ...]:
    """Delays that grow by the same amount: ``linear("10s", times=3)`` is 10, 20 and 30 s, NServiceBus's default.

    Args:
        step: the first delay, and the difference between one delay and the next.
        times: number of retries, 1 to 1,000.

    Raises:
        InvalidInputError: an argument is invalid.
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
        times: number of retries, 1 to 1,000.
        factor: the ratio of each delay to the one before, at least 1.
        longest: upper bound of all delays.

    Raises:
        InvalidInputError: an argument is invalid.
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
