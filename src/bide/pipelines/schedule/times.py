"""When messages of a table will be due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.types import DayTimeIntervalType, LongType, StringType

from bide.durations import parse_delay, to_microseconds
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
LATEST: Final = datetime.max.replace(tzinfo=UTC)
"""The ends of Python's calendar, which Spark's goes beyond: to the year 294247, and before the year 1."""

_LONGEST: Final = 10**14
"""Milliseconds of delays that nothing can hold: beyond this they are all the same."""


def due_of(messages: DataFrame, now: datetime) -> Column:
    """When messages are due, null where that cannot be read, or is before the year 1.

    Args:
        messages: with a column ``deliver_at``, or else ``delay``, of any type that the sink takes.
        now: what delays are counted from.
    """
    if "deliver_at" in messages.columns:
        due = messages["deliver_at"]
        return F.when(due >= literal(EARLIEST), due)
    delay = messages["delay"]
    kind = messages.schema["delay"].dataType
    if isinstance(kind, DayTimeIntervalType):
        # Rounded up, as the sink does.
        waited = F.ceil(F.unix_micros(F.timestamp_micros(F.lit(0)) + delay) / 1_000)
    elif isinstance(kind, StringType):
        # Arrow's conversions want Pandas on some releases.
        waited = F.udf(_milliseconds, LongType(), useArrow=False)(delay)
    else:
        waited = delay.cast("long")
    return F.when(waited >= 0, F.timestamp_micros(F.least(waited, F.lit(_LONGEST)) * 1_000 + to_microseconds(now)))


def literal(moment: datetime) -> Column:
    """A time as a column."""
    return F.timestamp_micros(F.lit(to_microseconds(moment)))


def _milliseconds(text: str | None) -> int | None:
    """A delay in a column of text, None where that is none."""
    try:
        return None if text is None else -(-parse_delay(text) // timedelta(milliseconds=1))
    except InvalidInputError:
        return None
