"""Figures of a report, collected from the tables of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 (the usual name)

from bide.durations import EPOCH, MILLISECOND, from_microseconds
from bide.pipelines.charts.scale import floored, span_for
from bide.pipelines.formats import for_spark, to_read
from bide.pipelines.report import counting, tables
from bide.pipelines.report.collecting_filters import collect_filters
from bide.pipelines.report.figures import (
    FailureGroup,
    Failures,
    Figures,
    FlowFigures,
    Headline,
    ReportStep,
    ScheduleCounts,
    ScheduleFigures,
    Target,
    UndecodableFigures,
)
from bide.pipelines.report.pending_figures import PendingFigures, PendingTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

GRACE: Final = timedelta(minutes=10)
"""Overdue time after which a message counts as lost, by default. It is longer than the 180 s after which RabbitMQ sends
a message again that its target queue has not confirmed (``dead_letter_worker_publisher_confirm_timeout``)."""

# The largest numbers of spans, targets and groups in a plot or table.
_FLOW_SPANS: Final = 120
_PENDING_SPANS: Final = 96
_FAILURE_SPANS: Final = 60
_TARGETS: Final = 10
_PENDING_TARGETS: Final = 6
_GROUPS: Final = 12
_SCHEDULE_SPANS: Final = 96
_SCHEDULE_TARGETS: Final = 12
_MAX_WIDENING: Final = 3
"""Messages with extreme due times are left out of the plot if they would make its time axis wider by this factor."""
_FARTHEST: Final = timedelta(days=3653)
"""Times that are farther from the median are left out of all plots. No delay is that long, so they are wrong."""

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_NO_OCCURRENCES: Final = ("target", "due_hour as due", "'' as outcome", "0d as lateness_ms")
_SHORTEST: Final = timedelta(seconds=1)


def collect(spark: SparkSession, folder: str, *, grace: timedelta = GRACE) -> Figures:
    """Read the tables in a folder, and compute the figures of a report.

    Args:
        grace: the overdue time after which a message counts as lost.

    Raises:
        InvalidInputError: see :func:`bide.pipelines.report.tables.read`.
    """
    found = tables.read(spark, folder)
    pending, failures = found.get("pending"), found.get("failures")
    waiting = found.get("schedules_pending")
    if pending is not None and waiting is not None:
        pending = pending.unionByName(waiting)
    schedules = None if waiting is None else _schedules(found.get("occurrences"), waiting)
    messages = counting.delayed(found["messages"]) if "messages" in found else None
    shown, more = ([], 0) if messages is None else _targets(messages)
    names = [one.name for one in shown]
    pending_figures, panels = (None, []) if pending is None else _pending(pending, names)
    headline = None if messages is None else _headline(messages, grace)
    flow = None if messages is None or headline is None else _flow(messages, headline)
    steps, first_step = ([], 0) if messages is None else _lateness(messages)
    overdue, filters = 0, None
    if messages is not None and headline is not None and flow is not None:
        overdue = headline.overdue
        filters = collect_filters(
            messages,
            targets=names,
            headline=headline,
            flow=flow,
            steps=len(steps),
            first_step=first_step,
            pending=pending_figures,
            panels=panels,
        )
    if headline is not None and pending_figures is not None:
        # Messages that wait for a retry are counted in the table pending only.
        headline = replace(
            headline,
            pending=sum(one.pending for one in pending_figures.targets),
            overdue=sum(one.pending_overdue for one in pending_figures.targets),
            # The table of messages has schedules only when they have ended.
            scheduled=headline.scheduled + (0 if schedules is None else schedules.total.pending),
        )
    undecodable, total = _undecodable(found["undecodable"]) if "undecodable" in found else ([], 0)
    return Figures(
        folder=folder,
        missing=[name for name in tables.COLUMNS if name not in found],
        headline=headline,
        flow=flow,
        lateness=None if messages is None else steps,
        targets=shown,
        more_targets=more,
        oldest=[] if filters is None else filters.choices[0].oldest,
        overdue=overdue,
        query=_query(folder, headline) if overdue and headline is not None else "",
        filters=filters,
        pending=pending_figures,
        failures=None if failures is None else _failures(failures, found.get("failed")),
        schedules=schedules,
        undecodable=undecodable,
        undecodable_total=total,
    )


def _headline(messages: DataFrame, grace: timedelta) -> Headline:
    row = counting.headline(messages).collect()[0].asDict()
    row["since"], row["until"] = _time_or_none(row["since"]), _time_or_none(row["until"])
    lost = 0
    if row["overdue"] and row["until"] is not None:
        lost = counting.lost(messages, row["until"] - grace).collect()[0]["lost"]
    return Headline(**row, lost=lost, grace=grace)


def _flow(messages: DataFrame, headline: Headline) -> FlowFigures:
    if headline.since is None or headline.until is None:
        return FlowFigures(first=EPOCH, width=_SHORTEST, scheduled=[], delivered=[], p50=[], p99=[])
    width = max(span_for(headline.until - headline.since, _FLOW_SPANS), _SHORTEST)
    first = floored(headline.since, width)
    spans = (headline.until - first) // width + 1
    rows = counting.flow(messages, first, width).collect()

    def column(name: str) -> list[Any]:
        known = {row["span"]: row[name] for row in rows if row[name] is not None}
        return [known.get(span) for span in range(spans)]

    return FlowFigures(
        first=first,
        width=width,
        scheduled=[one or 0 for one in column("scheduled")],
        delivered=[one or 0 for one in column("delivered")],
        p50=column("p50"),
        p99=column("p99"),
    )


def _lateness(messages: DataFrame) -> tuple[list[ReportStep], int]:
    counts = {row["step"]: row["count"] for row in counting.lateness(messages).collect()}
    if not counts:
        return [], 0
    return [
        ReportStep(low=_start_of(step) if step >= 0 else 0.0, high=_start_of(step + 1), count=counts.get(step, 0))
        for step in range(min(counts), max(counts) + 1)
    ], min(counts)


def _start_of(step: int) -> float:
    """The lateness in ms at which a step begins."""
    return float(10 ** (step / counting.STEPS))


def _targets(messages: DataFrame) -> tuple[list[Target], int]:
    by_target = counting.targets(messages)
    rows = by_target.limit(_TARGETS + 1).collect()
    more = by_target.count() - _TARGETS if len(rows) > _TARGETS else 0
    found = []
    for row in rows[:_TARGETS]:
        values = row.asDict()
        found.append(Target(name=values.pop("target") or "", **values))
    return found, more


def _query(folder: str, headline: Headline) -> str:
    """Spark SQL for all overdue messages."""
    table = to_read(for_spark(folder, "messages")).replace("`", "``")
    lost = ""
    if headline.until is not None:
        lost = f",\n       due < timestamp '{headline.until - headline.grace:%Y-%m-%d %H:%M:%S.%f}Z' as lost"
    return (
        f"select message_id, target, type, due{lost}\nfrom parquet.`{table}`\nwhere outcome = 'overdue'\n"
        "order by due, message_id"
    )


def _pending(pending: DataFrame, names: Sequence[str]) -> tuple[PendingFigures, list[PendingTarget]]:
    """The plot of pending messages, and those of each of these targets without a part of its own in the plot."""
    by_target = counting.pending_targets(pending)
    rows = by_target.limit(_PENDING_TARGETS + 1).collect()
    if not rows:
        return PendingFigures(first=EPOCH, width=_HOUR, spans=0, targets=[], others=0, earlier=0, later=0), []
    others = by_target.count() - _PENDING_TARGETS if len(rows) > _PENDING_TARGETS else 0
    shown = [row["target"] for row in rows[:_PENDING_TARGETS]]
    first, last = _pending_range(pending)
    width = max(span_for(last - first, _PENDING_SPANS), _HOUR)
    first = floored(first, width)
    spans = (last - first) // width + 1
    more = [name for name in names if name not in shown]
    found = counting.pending_spans(pending, [*shown, *more], first, width).collect()
    targets = [_pending_target(name, [row for row in found if row["target"] == name], spans) for name in shown]
    if others:
        targets.append(_pending_target("", [row for row in found if row["target"] not in shown], spans))
    panels = [_pending_target(name, [row for row in found if row["target"] == name], spans) for name in more]
    figures = PendingFigures(
        first=first,
        width=width,
        spans=spans,
        targets=targets,
        others=others,
        earlier=sum(row["count"] for row in found if row["span"] < 0),
        later=sum(row["count"] for row in found if row["span"] >= spans),
    )
    return figures, panels


def _pending_range(pending: DataFrame) -> tuple[datetime, datetime]:
    times = pending.where("count > 0").select(F.unix_millis("due_hour").alias("time"))
    return _time_range(times, widening=_MAX_WIDENING)


def _time_range(times: DataFrame, *, widening: int | None = None) -> tuple[datetime, datetime]:
    """The first and last time, without times that are certainly wrong.

    Args:
        times: at least one ``time`` in milliseconds.
        widening: leave out times that would make the range wider by this factor, too; None to keep them.
    """
    row = counting.time_range(times).collect()[0]
    far = _FARTHEST // MILLISECOND
    row = _within(times, row, row["median"] - far, row["median"] + far)
    if widening is not None:
        most = widening * max(row["high"] - row["low"], _DAY // MILLISECOND)
        row = _within(times, row, row["low"] - most, row["high"] + most)
    return from_microseconds(row["first"] * 1000), from_microseconds(row["last"] * 1000)


def _within(times: DataFrame, row: Row, low: int, high: int) -> Row:
    if low <= row["first"] and row["last"] <= high:
        return row
    return counting.time_range(times.where(F.col("time").between(low, high))).collect()[0]


def _pending_target(name: str, rows: Sequence[Row], spans: int) -> PendingTarget:
    counts, overdue = [0] * spans, [0] * spans
    for row in rows:
        if 0 <= row["span"] < spans:
            counts[row["span"]] += row["count"]
            overdue[row["span"]] += row["overdue"]
    return PendingTarget(
        name=name,
        counts=counts,
        overdue=overdue,
        pending=sum(row["count"] for row in rows),
        pending_overdue=sum(row["overdue"] for row in rows),
    )


def _failures(table: DataFrame, failed: DataFrame | None) -> Failures:
    whole = counting.failures(table).collect()[0]
    if not whole["timed"]:
        return Failures(first=EPOCH, width=_SHORTEST, spans=0, groups=[], others=0, total=0)
    first, last = _time_range(counting.failure_limits(table))
    width = max(span_for(last - first, _FAILURE_SPANS), _SHORTEST)
    first = floored(first, width)
    spans = (last - first) // width + 1
    rows = counting.failure_groups(table).limit(_GROUPS).collect()
    names = [row["group"] for row in rows]
    times = [] if failed is None else counting.failure_times(failed, names, first, width).collect()
    return Failures(
        first=first,
        width=width,
        spans=spans,
        groups=[_group(row, times, spans) for row in rows],
        others=whole["groups"] - len(rows),
        total=whole["total"],
    )


def _group(row: Row, times: list[Row], spans: int) -> FailureGroup:
    own = {one["span"]: one for one in times if (one["group"], one["endpoint"]) == (row["group"], row["endpoint"])}
    newest = max((span for span in own if own[span]["text"]), default=None)
    return FailureGroup(
        name=row["group"] or "",
        exception=row["exception"] or "",
        endpoint=row["endpoint"] or "",
        count=row["count"],
        messages=row["messages"],
        first_seen=from_microseconds(row["first_seen"]),
        last_seen=from_microseconds(row["last_seen"]),
        recent=row["recent"] or 0,
        before=row["before"] or 0,
        text="" if newest is None else own[newest]["text"],
        counts=[own[span]["count"] if span in own else 0 for span in range(spans)] if own else [],
    )


def _schedules(occurrences: DataFrame | None, pending: DataFrame) -> ScheduleFigures | None:
    """None if there has never been a schedule."""
    ended = pending.selectExpr(*_NO_OCCURRENCES).limit(0) if occurrences is None else occurrences
    rows = counting.schedule_targets(ended, pending).collect()
    counts = [_schedule_counts(row) for row in rows]
    if not counts:
        return None
    total = _sum(counts, "")
    shown, rest = counts[:_SCHEDULE_TARGETS], counts[_SCHEDULE_TARGETS:]
    first, width, spans, beyond = EPOCH, _DAY, list[ScheduleCounts](), 0
    if total.total > total.pending:
        first, last = _pending_range(counting.due_hours(ended))
        width = max(span_for(last - first, _SCHEDULE_SPANS), _DAY)
        first = floored(first, width)
        found = {row["span"]: row for row in counting.schedule_spans(ended, first, width).collect()}
        numbers = range((last - first) // width + 1)
        none = dict.fromkeys(counting.OUTCOMES, 0)
        spans = [
            ScheduleCounts(outcomes={name: row[name] for name in none} if (row := found.get(number)) else none)
            for number in numbers
        ]
        beyond = total.total - total.pending - sum(one.total for one in spans)
    return ScheduleFigures(
        total=total,
        targets=[*shown, *([_sum(rest, "")] if rest else [])],
        others=len(rest),
        first=first,
        width=width,
        spans=spans,
        beyond=beyond,
    )


def _schedule_counts(row: Row) -> ScheduleCounts:
    return ScheduleCounts(
        name=row["target"],
        outcomes={name: row[name] for name in counting.OUTCOMES},
        pending=row["pending"],
        overdue=row["overdue"],
        max=row["max"],
    )


def _sum(counts: Sequence[ScheduleCounts], name: str) -> ScheduleCounts:
    return ScheduleCounts(
        name=name,
        outcomes={outcome: sum(one.outcomes[outcome] for one in counts) for outcome in counting.OUTCOMES},
        pending=sum(one.pending for one in counts),
        overdue=sum(one.overdue for one in counts),
        max=max((one.max for one in counts if one.max is not None), default=None),
    )


def _undecodable(table: DataFrame) -> tuple[list[UndecodableFigures], int]:
    found = []
    for row in counting.undecodable(table).limit(_GROUPS).collect():
        times = {name: from_microseconds(row[name]) for name in ("first_seen", "last_seen")}
        found.append(UndecodableFigures(**{**row.asDict(), **times}))
    return found, table.count()


def _time_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else from_microseconds(micros)
