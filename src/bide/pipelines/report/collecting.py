"""Figures of a report, collected from the tables of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.durations import EPOCH, MICROSECOND, from_microseconds
from bide.pipelines.charts.scale import floored, span_for
from bide.pipelines.report import queries
from bide.pipelines.report.collecting_filters import Percentiles, collect_filters
from bide.pipelines.report.figures import (
    FailureFigures,
    FailureGroup,
    Figures,
    FlowFigures,
    Headline,
    LatenessBin,
    ScheduleCounts,
    ScheduleFigures,
    TargetFigures,
    UndecodableFigures,
)
from bide.pipelines.report.pending_figures import PendingFigures, PendingTarget
from bide.pipelines.report.tables import COLUMNS, ReportTables, runnable_query

ResultRow = Mapping[str, Any]

DEFAULT_LOST_AFTER: Final = timedelta(minutes=10)
"""By default, a message that has been overdue for longer counts as lost. Shorter delays can be retries of RabbitMQ: it
publishes a message to the target queue again after 180 s without a confirm
(``dead_letter_worker_publisher_confirm_timeout``)."""

# The largest numbers of spans, targets, types and groups in a plot or table.
_FLOW_SPANS: Final = 120
_PENDING_SPANS: Final = 96
_FAILURE_SPANS: Final = 60
_TARGETS: Final = 10
_TYPES: Final = 6
_PENDING_TARGETS: Final = 6
_GROUPS: Final = 12
_SCHEDULE_SPANS: Final = 96
_SCHEDULE_TARGETS: Final = 12
_MAX_WIDENING: Final = 3
"""A plot leaves out due times that are farther from the middle 90 % than this many times the length of that range."""
_FARTHEST: Final = timedelta(days=3653)
"""A plot of due times or failures leaves out times that are farther from the median: they are probably wrong."""

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_SHORTEST_SPAN: Final = timedelta(seconds=1)
_NO_PERCENTILES: Final[ResultRow] = dict.fromkeys(("p50", "p95", "p99", "max"))


def collect(tables: ReportTables, *, lost_after: timedelta = DEFAULT_LOST_AFTER) -> Figures:
    """Compute the figures of a report.

    Args:
        tables: the tables of an audit, as of :func:`bide.pipelines.report.spark_tables.spark_tables` or
            :func:`bide.pipelines.report.duckdb_tables.small_tables`. Both give the same figures.
        lost_after: a message that has been overdue for longer counts as lost.
    """
    found = tables.names
    pending, waiting = found.get("pending"), found.get("schedules_pending")
    if pending is not None and waiting is not None:
        pending = tables.define(queries.union_all(pending, waiting))
    schedules = None if waiting is None else _schedules(tables, found.get("occurrences"), waiting)
    messages = tables.define(queries.only_delayed(found["messages"])) if "messages" in found else None
    target_rows = [] if messages is None else tables.rows(queries.targets(messages, _TARGETS))
    names = [row["target"] for row in target_rows]
    pending_figures, unplotted = (None, []) if pending is None else _pending(tables, pending, names)
    headline, flow, bins, filters, overdue = None, None, None, None, 0
    percentiles: Percentiles = {}
    if messages is not None:
        types = [row["type"] for row in tables.rows(queries.types(messages, _TYPES))]
        counts = tables.rows(queries.headline(messages))[0]
        first, width, spans = _flow_spans(counts)
        numbered = tables.define(queries.with_filter_numbers(messages), targets=names, types=types)
        percentiles = {
            (row.pop("target_number"), row.pop("type_number"), row.pop("span")): row
            for row in tables.rows(queries.percentiles(numbered, first, width))
        }
        headline = _headline(tables, messages, counts, percentiles, lost_after)
        flow = _flow(tables.rows(queries.flow(messages, first, width)), percentiles, first, width, spans)
        bins, first_bin = _lateness(tables.rows(queries.lateness(messages)))
        overdue = headline.overdue
        filters = collect_filters(
            tables,
            numbered,
            targets=names,
            types=types,
            percentiles=percentiles,
            overdue=overdue,
            flow=flow,
            bins=len(bins),
            first_bin=first_bin,
            pending=pending_figures,
            unplotted=unplotted,
        )
    query = _query(tables.folder, headline) if overdue and headline is not None else ""
    if headline is not None and pending_figures is not None:
        # Only the table pending counts messages that wait for a retry.
        headline = replace(
            headline,
            pending=sum(one.pending for one in pending_figures.targets),
            overdue=sum(one.pending_overdue for one in pending_figures.targets),
            # The table of messages has only schedules that have ended.
            scheduled=headline.scheduled + (0 if schedules is None else schedules.total.pending),
        )
    undecodable, total = ([], 0) if "undecodable" not in found else _undecodable(tables, found["undecodable"])
    return Figures(
        folder=tables.folder,
        missing=[name for name in COLUMNS if name not in found],
        headline=headline,
        flow=flow,
        lateness=bins,
        targets=[_target(row, percentiles, number) for number, row in enumerate(target_rows, start=1)],
        more_targets=target_rows[0]["targets"] - len(target_rows) if target_rows else 0,
        oldest=[] if filters is None else filters.choices[0].oldest,
        overdue=overdue,
        query=query,
        filters=filters,
        pending=pending_figures,
        failures=_failures(tables, found["failures"], found.get("failed")) if "failures" in found else None,
        schedules=schedules,
        undecodable=undecodable,
        undecodable_total=total,
    )


def _headline(
    tables: ReportTables, messages: str, counts: ResultRow, percentiles: Percentiles, lost_after: timedelta
) -> Headline:
    since, until = _time_or_none(counts["since"]), _time_or_none(counts["until"])
    lost = 0
    if counts["overdue"] and until is not None:
        lost = tables.rows(queries.lost_count(messages, until - lost_after))[0]["lost"]
    late = percentiles.get((0, 0, queries.ALL_SPANS), _NO_PERCENTILES)
    return Headline(**{**counts, **late, "since": since, "until": until}, lost=lost, lost_after=lost_after)


def _flow_spans(counts: ResultRow) -> tuple[datetime, timedelta, int]:
    """The start, the length and the number of the spans of scheduled and delivered messages."""
    since, until = _time_or_none(counts["since"]), _time_or_none(counts["until"])
    if since is None or until is None:
        return EPOCH, _SHORTEST_SPAN, 0
    width = max(span_for(until - since, _FLOW_SPANS), _SHORTEST_SPAN)
    first = floored(since, width)
    return first, width, (until - first) // width + 1


def _flow(
    rows: Sequence[ResultRow], percentiles: Percentiles, first: datetime, width: timedelta, spans: int
) -> FlowFigures:
    counts = {(row["part"], row["span"]): row["count"] for row in rows}
    late = [percentiles.get((0, 0, span), _NO_PERCENTILES) for span in range(spans)]
    return FlowFigures(
        first=first,
        width=width,
        scheduled=[counts.get(("scheduled", span), 0) for span in range(spans)],
        delivered=[counts.get(("delivered", span), 0) for span in range(spans)],
        p50=[one["p50"] for one in late],
        p99=[one["p99"] for one in late],
    )


def _lateness(rows: Sequence[ResultRow]) -> tuple[list[LatenessBin], int]:
    """The histogram, and the number of its first bin."""
    counts = {row["bin"]: row["count"] for row in rows}
    if not counts:
        return [], 0
    return [
        LatenessBin(
            low=_start_of(number) if number >= 0 else 0.0, high=_start_of(number + 1), count=counts.get(number, 0)
        )
        for number in range(min(counts), max(counts) + 1)
    ], min(counts)


def _start_of(number: int) -> float:
    """The lateness in ms at which a bin begins."""
    return float(10 ** (number / queries.BINS_PER_DECADE))


def _target(row: ResultRow, percentiles: Percentiles, number: int) -> TargetFigures:
    counts = {name: row[name] for name in ("scheduled", "delivered", "overdue")}
    return TargetFigures(
        name=row["target"], **counts, **percentiles.get((number, 0, queries.ALL_SPANS), _NO_PERCENTILES)
    )


def _query(folder: str, headline: Headline) -> str:
    """A query for all overdue messages, which readers of the report can run."""
    lost = ""
    if headline.until is not None:
        lost = f",\n       due < timestamp '{headline.until - headline.lost_after:%Y-%m-%d %H:%M:%S.%f}Z' as lost"
    columns = f"message_id, target, type, due{lost}"
    query = f"select {columns}\nfrom {{table}}\nwhere outcome = 'overdue'\norder by due, message_id"
    return runnable_query(folder, "messages", query)


def _pending(tables: ReportTables, pending: str, names: Sequence[str]) -> tuple[PendingFigures, list[PendingTarget]]:
    """The figures of the plot of pending messages, and the same for the named targets that the plot does not show.

    Args:
        names: the targets of the page's filter.
    """
    rows = tables.rows(queries.pending_targets(pending, _PENDING_TARGETS))
    if not rows:
        return PendingFigures(first=EPOCH, width=_HOUR, spans=0, targets=[], others=0, earlier=0, later=0), []
    others = rows[0]["targets"] - len(rows)
    shown = [row["target"] for row in rows]
    first, last = _time_range(tables, queries.pending_times(pending), widening=_MAX_WIDENING)
    width = max(span_for(last - first, _PENDING_SPANS), _HOUR)
    first = floored(first, width)
    spans = (last - first) // width + 1
    hidden = [name for name in names if name not in shown]
    found = tables.rows(queries.pending_spans(pending, first, width), names=[*shown, *hidden])
    targets = [_pending_target(name, [row for row in found if row["target"] == name], spans) for name in shown]
    if others:
        targets.append(_pending_target("", [row for row in found if row["target"] not in shown], spans))
    unplotted = [_pending_target(name, [row for row in found if row["target"] == name], spans) for name in hidden]
    figures = PendingFigures(
        first=first,
        width=width,
        spans=spans,
        targets=targets,
        others=others,
        earlier=sum(row["count"] for row in found if row["span"] < 0),
        later=sum(row["count"] for row in found if row["span"] >= spans),
    )
    return figures, unplotted


def _time_range(tables: ReportTables, times: str, *, widening: int | None = None) -> tuple[datetime, datetime]:
    """The first and last time, without those that are farther than :data:`_FARTHEST` from the median.

    Args:
        times: a query of at least one ``time``.
        widening: also leave out times that are farther from the middle 90 % than this many times the length of that
            range, or this many days if it is shorter than a day; None to keep them.
    """
    row: ResultRow = tables.rows(queries.time_range(times))[0]
    far = _FARTHEST // MICROSECOND
    row = _within(tables, times, row, row["median"] - far, row["median"] + far)
    if widening is not None:
        most = widening * max(row["high"] - row["low"], _DAY // MICROSECOND)
        row = _within(tables, times, row, row["low"] - most, row["high"] + most)
    return from_microseconds(row["first"]), from_microseconds(row["last"])


def _within(tables: ReportTables, times: str, row: ResultRow, low: int, high: int) -> ResultRow:
    if low <= row["first"] and row["last"] <= high:
        return row
    return tables.rows(queries.time_range(times, (low, high)))[0]


def _pending_target(name: str, rows: Sequence[ResultRow], spans: int) -> PendingTarget:
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


def _failures(tables: ReportTables, table: str, failed: str | None) -> FailureFigures:
    whole = tables.rows(queries.failures(table))[0]
    if not whole["timed"]:
        return FailureFigures(first=EPOCH, width=_SHORTEST_SPAN, spans=0, groups=[], others=0, total=0)
    first, last = _time_range(tables, queries.failure_time_bounds(table))
    width = max(span_for(last - first, _FAILURE_SPANS), _SHORTEST_SPAN)
    first = floored(first, width)
    spans = (last - first) // width + 1
    rows = tables.rows(queries.failure_groups(table, _GROUPS))
    names = [row["group_name"] for row in rows]
    times = [] if failed is None else tables.rows(queries.failure_times(failed, first, width), groups=names)
    return FailureFigures(
        first=first,
        width=width,
        spans=spans,
        groups=[_group(row, times, spans) for row in rows],
        others=whole["groups"] - len(rows),
        total=whole["total"],
    )


def _group(row: ResultRow, times: Sequence[ResultRow], spans: int) -> FailureGroup:
    name = (row["group_name"], row["endpoint"])
    own = {one["span"]: one for one in times if (one["group_name"], one["endpoint"]) == name}
    newest = max((span for span in own if own[span]["text"]), default=None)
    return FailureGroup(
        name=row["group_name"],
        exception=row["exception"],
        endpoint=row["endpoint"],
        count=row["count"],
        messages=row["messages"],
        first_seen=from_microseconds(row["first_seen"]),
        last_seen=from_microseconds(row["last_seen"]),
        recent=row["recent"] or 0,
        before=row["before"] or 0,
        text="" if newest is None else own[newest]["text"],
        counts=[own[span]["count"] if span in own else 0 for span in range(spans)] if own else [],
    )


def _schedules(tables: ReportTables, occurrences: str | None, pending: str) -> ScheduleFigures | None:
    """The figures of schedules; None if there has never been a schedule."""
    ended = tables.define(queries.empty_occurrences(pending)) if occurrences is None else occurrences
    counts = [_schedule_counts(row) for row in tables.rows(queries.schedule_targets(ended, pending))]
    if not counts:
        return None
    total = _sum(counts, "")
    shown, rest = counts[:_SCHEDULE_TARGETS], counts[_SCHEDULE_TARGETS:]
    first, width, spans, beyond = EPOCH, _DAY, list[ScheduleCounts](), 0
    if total.total > total.pending:
        first, last = _time_range(tables, queries.occurrence_due_times(ended), widening=_MAX_WIDENING)
        width = max(span_for(last - first, _SCHEDULE_SPANS), _DAY)
        first = floored(first, width)
        found = {row["span"]: row for row in tables.rows(queries.schedule_spans(ended, first, width))}
        numbers = range((last - first) // width + 1)
        none = dict.fromkeys(queries.OUTCOMES, 0)
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


def _schedule_counts(row: ResultRow) -> ScheduleCounts:
    return ScheduleCounts(
        name=row["target"],
        outcomes={name: row[name] for name in queries.OUTCOMES},
        pending=row["pending"],
        overdue=row["overdue"],
        max=row["max"],
    )


def _sum(counts: Sequence[ScheduleCounts], name: str) -> ScheduleCounts:
    return ScheduleCounts(
        name=name,
        outcomes={outcome: sum(one.outcomes[outcome] for one in counts) for outcome in queries.OUTCOMES},
        pending=sum(one.pending for one in counts),
        overdue=sum(one.overdue for one in counts),
        max=max((one.max for one in counts if one.max is not None), default=None),
    )


def _undecodable(tables: ReportTables, table: str) -> tuple[list[UndecodableFigures], int]:
    found, total = [], 0
    for row in tables.rows(queries.undecodable(table, _GROUPS)):
        total = row.pop("total")
        times = {name: from_microseconds(row[name]) for name in ("first_seen", "last_seen")}
        found.append(UndecodableFigures(**{**row, **times}))
    return found, total


def _time_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else from_microseconds(micros)
