"""Figures of a report, collected from the tables of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from bide.durations import EPOCH, from_microseconds
from bide.pipelines.charts.scale import floored, span_for
from bide.pipelines.report import counting, tables
from bide.pipelines.report.figures import (
    FailureGroup,
    Failures,
    Figures,
    FlowFigures,
    Headline,
    PendingFigures,
    PendingTarget,
    ReportStep,
    ScheduleCounts,
    ScheduleFigures,
    Target,
    UndecodableFigures,
)

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
    pending_figures = None if pending is None else _pending(pending)
    headline = None if messages is None else _headline(messages, grace)
    if headline is not None and pending_figures is not None:
        # Messages that wait for a retry are counted in the table pending only.
        headline = replace(
            headline,
            pending=sum(one.pending for one in pending_figures.targets),
            overdue=sum(one.pending_overdue for one in pending_figures.targets),
            # The table of messages has schedules only when they have ended.
            scheduled=headline.scheduled + (0 if schedules is None else schedules.total.pending),
        )
    shown, more = ([], 0) if messages is None else _targets(messages)
    undecodable, total = _undecodable(found["undecodable"]) if "undecodable" in found else ([], 0)
    return Figures(
        folder=folder,
        missing=[name for name in tables.COLUMNS if name not in found],
        headline=headline,
        flow=None if messages is None or headline is None else _flow(messages, headline),
        lateness=None if messages is None else _lateness(messages),
        targets=shown,
        more_targets=more,
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


def _lateness(messages: DataFrame) -> list[ReportStep]:
    counts = {row["step"]: row["count"] for row in counting.lateness(messages).collect()}
    if not counts:
        return []
    return [
        ReportStep(low=_start_of(step) if step >= 0 else 0.0, high=_start_of(step + 1), count=counts.get(step, 0))
        for step in range(min(counts), max(counts) + 1)
    ]


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


def _pending(pending: DataFrame) -> PendingFigures:
    by_target = counting.pending_targets(pending)
    rows = by_target.limit(_PENDING_TARGETS + 1).collect()
    if not rows:
        return PendingFigures(first=EPOCH, width=_HOUR, spans=0, targets=[], others=0, earlier=0, later=0)
    others = by_target.count() - _PENDING_TARGETS if len(rows) > _PENDING_TARGETS else 0
    names = [row["target"] for row in rows[:_PENDING_TARGETS]]
    first, last = _pending_range(pending)
    width = max(span_for(last - first, _PENDING_SPANS), _HOUR)
    first = floored(first, width)
    spans = (last - first) // width + 1
    found = counting.pending_spans(pending, names, first, width).collect()
    targets = [_pending_target(name, found, spans) for name in [*names, *([None] if others else [])]]
    return PendingFigures(
        first=first,
        width=width,
        spans=spans,
        targets=targets,
        others=others,
        earlier=sum(row["count"] for row in found if row["span"] < 0),
        later=sum(row["count"] for row in found if row["span"] >= spans),
    )


def _pending_range(pending: DataFrame) -> tuple[datetime, datetime]:
    row = counting.pending_range(pending).collect()[0]
    first, last, low, high = (from_microseconds(row[name]) for name in ("first", "last", "low", "high"))
    most = _MAX_WIDENING * max(high - low, 24 * _HOUR)
    return low if high - first > most else first, high if last - low > most else last


def _pending_target(name: str | None, rows: list[Row], spans: int) -> PendingTarget:
    own = [row for row in rows if row["target"] == name]
    by_span = {row["span"]: row for row in own}
    return PendingTarget(
        name=name or "",
        counts=[by_span[span]["count"] if span in by_span else 0 for span in range(spans)],
        overdue=[by_span[span]["overdue"] if span in by_span else 0 for span in range(spans)],
        pending=sum(row["count"] for row in own),
        pending_overdue=sum(row["overdue"] for row in own),
    )


def _failures(table: DataFrame, failed: DataFrame | None) -> Failures:
    whole = counting.failures(table).collect()[0]
    if whole["first"] is None:
        return Failures(first=EPOCH, width=_SHORTEST, spans=0, groups=[], others=0, total=0)
    first, last = from_microseconds(whole["first"]), from_microseconds(whole["last"])
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
