"""Arithmetic of a plan's ticks, for Spark columns and for numpy arrays alike.

Both support the same operators, so the formulas exist once. In a tick, *n* messages move and a rate changes by *rate*
messages per tick; *n_1*, *rate_1* and *rate_2* are moments of the times within the tick, see
:mod:`bide.pipelines.plan.occupancy`. *flow* is the rate before the tick, *start* the number held at its start, and
*gap* the number of ticks without a change that follow it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from bide.durations import MILLISECOND
from bide.errors import InvalidInputError

MEASURES: Final = ("n", "bytes")
"""The quantities counted at each level: messages, and bytes of bodies."""

ALL: Final = "all"
"""The name of the row with the sums over all levels."""

EPSILON: Final = 1e-6
"""Messages below this number are rounding errors."""


def check_spans(every: timedelta, tick: timedelta) -> None:
    """Check the length of spans and ticks.

    Raises:
        InvalidInputError: the tick is not a whole number of milliseconds, or the span is not a multiple of the tick.
    """
    if tick < MILLISECOND or tick % MILLISECOND:
        raise InvalidInputError(f"the tick of {tick} is not a whole number of milliseconds: give 1 ms or more")
    if every < tick or every % tick:
        raise InvalidInputError(f"spans of {every} are not a multiple of the tick of {tick}: change one of the two")


class Held(NamedTuple):
    """The number held in a tick and in the gap after it.

    Attributes:
        area: the sum over the tick and the gap of the mean number held.
        now: the mean over the tick.
        quiet: the means over the first and the last tick of the gap. One of them is the largest mean in the gap.
    """

    area: Any
    now: Any
    quiet: tuple[Any, Any]


def held_contribution(tick: Any, n: Any, rate: Any, rate_1: Any) -> Any:
    """The contribution of a tick to the number held, if the change of its rate is extrapolated back to tick 0.

    The number held at the start of a tick is ``tick * flow``, plus the contributions of all ticks before it.
    """
    return n - rate * tick - rate_1


def held(*, n: Any, n_1: Any, rate: Any, rate_1: Any, rate_2: Any, flow: Any, start: Any, gap: Any) -> Held:
    """The number held in a tick and in the gap after it."""
    now = start + flow / 2 + n - n_1 + (rate - 2 * rate_1 + rate_2) / 2
    end = start + flow + n + rate - rate_1
    later = flow + rate
    return Held(
        area=now + gap * end + later * gap * gap / 2,
        now=now,
        quiet=(end + later / 2, end + later * (gap - 0.5)),
    )


def passed(*, n: Any, rate: Any, rate_1: Any, flow: Any) -> tuple[Any, Any]:
    """The number that passes in a tick, and in each tick of the gap after it."""
    return flow + n + rate - rate_1, flow + rate
