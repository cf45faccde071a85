"""Figures of the page's filters, collected from the table of messages."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from bide.durations import from_microseconds
from bide.pipelines.report import queries
from bide.pipelines.report.filters import FilterChoice, Filters, short_span
from bide.pipelines.report.pending_figures import OverdueMessage

if TYPE_CHECKING:
    from bide.pipelines.report.figures import FlowFigures
    from bide.pipelines.report.pending_figures import PendingFigures, PendingTarget
    from bide.pipelines.report.tables import ReportTables

MAX_OLDEST: Final = 20
"""The largest number of overdue messages that the page lists for each choice of the filters."""

Percentiles = Mapping[tuple[int, int, int], Mapping[str, Any]]
"""The rows of :func:`~bide.pipelines.report.queries.percentiles` by target, type and span."""


def collect_filters(
    tables: ReportTables,
    numbered: str,
    *,
    targets: Sequence[str],
    types: Sequence[str],
    percentiles: Percentiles,
    overdue: int,
    flow: FlowFigures,
    bins: int,
    first_bin: int,
    pending: PendingFigures | None,
    unplotted: Sequence[PendingTarget],
) -> Filters:
    """Count the messages of each target and type.

    Args:
        numbered: the messages, as of :func:`~bide.pipelines.report.queries.with_filter_numbers`.
        targets: the targets to filter by.
        types: the types to filter by.
        overdue: the number of overdue messages.
        bins: the number of ranges of lateness in the histogram.
        first_bin: the number of the first of them, as in :func:`~bide.pipelines.report.queries.lateness`.
        unplotted: pending messages of the targets that the plot of pending messages does not show.
    """
    short = short_span(flow.width)
    lengths = {
        "scheduled": len(flow.scheduled) * (flow.width // short),
        "delivered": len(flow.scheduled) * (flow.width // short),
        "late": bins,
        "pending": 0 if pending is None else pending.spans,
    }
    choices: dict[tuple[int, int], FilterChoice] = {}

    def choice(key: tuple[int, int]) -> FilterChoice:
        if key not in choices:
            choices[key] = FilterChoice(
                target=key[0],
                type=key[1],
                scheduled=[0] * lengths["scheduled"],
                delivered=[0] * lengths["delivered"],
                p50=[None] * len(flow.scheduled),
                p99=[None] * len(flow.scheduled),
                bins=[0] * bins,
                pending=[0] * lengths["pending"],
                overdue=[0] * lengths["pending"],
            )
        return choices[key]

    choice((0, 0))
    due = (flow.first, flow.width) if pending is None else (pending.first, pending.width)
    for row in tables.rows(queries.counts_by_filter(numbered, flow=(flow.first, short), due=due)):
        number = row["number"] - (first_bin if row["part"] == "late" else 0)
        if 0 <= number < lengths[row["part"]]:
            for key in _keys(row):
                _add(choice(key), row, number)
    for (target, kind, span), late in percentiles.items():
        one = choice((target, kind))
        if span == queries.ALL_SPANS:
            one.late = [late[name] for name in ("p50", "p95", "p99", "max")]
        else:
            one.p50[span], one.p99[span] = late["p50"], late["p99"]
    if overdue:
        _add_oldest(choices, tables.rows(queries.oldest_overdue(numbered, MAX_OLDEST)))
    return Filters(
        targets=targets, types=types, short=short, choices=[choices[key] for key in sorted(choices)], pending=unplotted
    )


def _keys(row: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The choices that the messages of a row belong to."""
    target, kind = row["target_number"], row["type_number"]
    yield 0, 0
    if target:
        yield target, 0
    if kind:
        yield 0, kind
    if target and kind:
        yield target, kind


def _add(one: FilterChoice, row: Mapping[str, Any], number: int) -> None:
    counts = {"scheduled": one.scheduled, "delivered": one.delivered, "late": one.bins, "pending": one.pending}
    counts[row["part"]][number] += row["count"]
    if row["part"] == "pending":
        one.overdue[number] += row["overdue"]


def _add_oldest(choices: Mapping[tuple[int, int], FilterChoice], rows: Sequence[Mapping[str, Any]]) -> None:
    order = operator.itemgetter("target", "type")
    for row in sorted(rows, key=lambda one: (one["due"] is None, one["due"] or 0, one["message_id"] or "", order(one))):
        message = OverdueMessage(
            message_id=row["message_id"] or "",
            target=row["target"],
            type=row["type"],
            due=None if row["due"] is None else from_microseconds(row["due"]),
        )
        for key in _keys(row):
            # A message that is in no plot has added no choice.
            if key in choices and len(choices[key].oldest) < MAX_OLDEST:
                choices[key].oldest.append(message)
