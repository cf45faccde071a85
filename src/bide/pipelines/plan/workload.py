"""Workload of a plan: the messages of a table, or flows, as classes of equal messages.

A class of a table is ``n`` messages with the same delay, which are sent at the same time, rounded down to the grain. A
class of a flow has ``n_rate``, the change at that time of the number of messages sent per tick: positive at the start
of the flow, negative at its end. So a flow at an even rate needs two classes for each of its delays, for any number of
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 (the usual name)
from pyspark.sql.types import (
    DateType,
    DayTimeIntervalType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from bide.durations import MILLISECOND
from bide.errors import InvalidInputError
from bide.pipelines.plan.columns import (
    DEFAULT_GRAIN,
    Columns,
    check_columns,
    check_grain,
    check_rows,
    not_a_delay,
    not_a_number,
    not_a_time,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bide.pipelines.plan.flows import Flow

_TIME_TYPES = (TimestampType, TimestampNTZType, DateType, StringType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Classes of messages.

    Attributes:
        classes: a table with ``at`` and ``delay`` in milliseconds, ``n``, ``n_rate``, ``bytes`` and ``bytes_rate``; see
            the description of this module.
        messages: the number of messages.
        undelayed: messages without a delay, which are not part of the plan.
        bytes: the size of all bodies.
        first: when the first message is sent, rounded down to the grain, in milliseconds since the Unix epoch.
        longest: the longest delay in milliseconds.
        has_flows: whether any ``n_rate`` is not zero.
    """

    classes: DataFrame
    messages: float
    undelayed: float
    bytes: float
    first: int
    longest: int
    has_flows: bool


def of_table(rows: DataFrame, columns: Columns, *, grain: timedelta = DEFAULT_GRAIN) -> Workload:
    """The workload of a table, which is read twice.

    Raises:
        InvalidColumnError: a column is missing, or has the wrong type.
        InvalidRowError: rows have no time, delay, size or count, or a negative delay, size or count.
        InvalidInputError: the table is empty, the columns do not have exactly one of *delay* and *due*, or the grain is
            not a whole number of milliseconds.
    """
    check_columns(columns, rows.columns)
    check_grain(grain)
    step = grain // MILLISECOND
    at = _milliseconds(rows, columns.at)
    if columns.due is not None:
        # Not greatest(), which would return the zero if the due time is missing or invalid.
        wait = _milliseconds(rows, columns.due) - at
        delay = F.when(wait < 0, F.lit(0)).otherwise(wait)
    else:
        assert columns.delay is not None
        delay = _delay(rows, columns.delay)
    n = F.lit(1.0) if columns.count is None else _number(rows, columns.count).cast("double")
    size = F.lit(float(columns.constant_size)) if columns.size is None else _number(rows, columns.size).cast("double")
    read = rows.select(at.alias("at"), delay.alias("delay"), n.alias("n"), size.alias("size"))
    bad = "at is null or delay is null or delay < 0 or n is null or n < 0 or size is null or size < 0"
    found = read.agg(
        F.count(F.lit(1)).alias("rows"),
        F.count_if(F.expr(bad)).alias("bad"),
        F.sum("n").alias("messages"),
        F.sum(F.when(F.col("delay") == 0, F.col("n")).otherwise(0.0)).alias("undelayed"),
        F.sum(F.col("n") * F.col("size")).alias("bytes"),
        F.min("at").alias("first"),
        F.max("delay").alias("longest"),
    ).collect()[0]
    check_rows(found["rows"], found["bad"])
    zero = F.lit(0.0)
    classes = (
        read.where("delay > 0 and n > 0")
        .groupBy(F.expr(f"at - pmod(at, {step})").alias("at"), "delay")
        .agg(
            F.sum("n").alias("n"),
            zero.alias("n_rate"),
            F.sum(F.col("n") * F.col("size")).alias("bytes"),
            zero.alias("bytes_rate"),
        )
    )
    return Workload(
        classes=classes,
        messages=found["messages"],
        undelayed=found["undelayed"],
        bytes=found["bytes"],
        first=found["first"] // step * step,
        longest=found["longest"],
        has_flows=False,
    )


def of_flows(spark: SparkSession, flows: Sequence[Flow], *, tick: timedelta = timedelta(seconds=1)) -> Workload:
    """The workload of flows.

    Args:
        tick: the tick of the :class:`bide.pipelines.plan.occupancy.Timeline`.

    Raises:
        InvalidInputError: there are no flows.
    """
    if not flows:
        raise InvalidInputError("there are no flows, so there is nothing to plan for: give at least one")
    parts = [_classes(spark, one, tick) for one in flows]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.union(part)
    summed = [F.sum(one).alias(one) for one in ("n", "n_rate", "bytes", "bytes_rate")]
    return Workload(
        classes=whole.where("delay > 0").groupBy("at", "delay").agg(*summed),
        messages=sum(one.messages for one in flows),
        undelayed=sum(one.undelayed for one in flows),
        bytes=sum(one.messages * one.size for one in flows),
        first=min(one.first for one in flows),
        longest=max(one.longest for one in flows),
        has_flows=True,
    )


def _classes(spark: SparkSession, flow: Flow, tick: timedelta) -> DataFrame:
    changes = [(at, change * tick.total_seconds()) for at, change in flow.changes()]
    ramps = F.broadcast(spark.createDataFrame(changes, "at long, change double"))
    delays = spark.range(flow.points).select(
        F.expr(f"{flow.shortest} + id * {flow.longest - flow.shortest} div {max(flow.points - 1, 1)}").alias("delay")
    )
    rate = F.col("change") / flow.points
    zero = F.lit(0.0)
    return ramps.crossJoin(delays).select(
        "at",
        "delay",
        zero.alias("n"),
        rate.alias("n_rate"),
        zero.alias("bytes"),
        (rate * flow.size).alias("bytes_rate"),
    )


def _milliseconds(rows: DataFrame, name: str) -> Column:
    kind = rows.schema[name].dataType
    if not isinstance(kind, _TIME_TYPES):
        raise not_a_time(name, kind.simpleString())
    return F.unix_millis(rows[_quoted(name)].try_cast("timestamp"))


def _delay(rows: DataFrame, name: str) -> Column:
    kind = rows.schema[name].dataType
    if isinstance(kind, DayTimeIntervalType):
        # Rounded up to milliseconds, so that a message is never early.
        micros = F.unix_micros(F.timestamp_micros(F.lit(0)) + rows[_quoted(name)])
        return F.ceil(micros / 1000).cast("long")
    if isinstance(kind, NumericType):
        return F.ceil(rows[_quoted(name)]).cast("long")
    raise not_a_delay(name, kind.simpleString())


def _number(rows: DataFrame, name: str) -> Column:
    kind = rows.schema[name].dataType
    if not isinstance(kind, NumericType):
        raise not_a_number(name, kind.simpleString())
    return rows[_quoted(name)]


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
