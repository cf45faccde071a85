"""Due times of the messages of a table."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import DayTimeIntervalType, LongType, StringType

from bide.durations import EARLIEST, to_microseconds
from bide.pipelines.schedule.delays import LONGEST, milliseconds_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def due_of(messages: DataFrame, now: datetime) -> Column:
    """The due times of messages; null for an invalid value, or a time before the year 1.

    Args:
        messages: a table with a column ``deliver_at`` or ``delay``, of any type that the sink accepts.
        now: the time to which delays are added.
    """
    if "deliver_at" in messages.columns:
        due = messages["deliver_at"]
        return F.when(due >= literal(EARLIEST), due)
    delay = messages["delay"]
    kind = messages.schema["delay"].dataType
    if isinstance(kind, DayTimeIntervalType):
        # Rounded up, as the sink does.
        milliseconds = F.ceil(F.unix_micros(F.timestamp_micros(F.lit(0)) + delay) / 1_000)
    elif isinstance(kind, StringType):
        # Without Arrow, because its conversion needs pandas on some releases of PySpark.
        milliseconds = F.udf(milliseconds_of, LongType(), useArrow=False)(delay)
    else:
        milliseconds = delay.cast("long")
    due = F.least(milliseconds, F.lit(LONGEST)) * 1_000 + to_microseconds(now)
    return F.when(milliseconds >= 0, F.timestamp_micros(due))


def literal(moment: datetime) -> Column:
    """A constant time as a column."""
    return F.timestamp_micros(F.lit(to_microseconds(moment)))
