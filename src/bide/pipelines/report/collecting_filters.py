"""Figures of the page's filters, collected from the table of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bide.durations import from_microseconds
from bide.pipelines.report import counting
from bide.pipelines.report.filters import Choice, Filters, short_span
from bide.pipelines.report.pending_figures import OverdueMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from bide.pipelines.report.figures import FlowFigures, Headline
    from bide.pipelines.report.pending_figures import PendingFigures, PendingTarget

OLDEST: Final = 20
"""Overdue messages that are listed."""

_TYPES: Final = 6


def collect_filters(
    messages: DataFrame,
    *,
    targets: Sequence[str],
    headline: Headline,
    flow: FlowFigures,
    steps: int,
    first_step: int,
    pending: PendingFigures | None,
    panels: Sequence[PendingTarget],
) -> Filters:
    """Count the messages of each target and type.

    Args:
        targets: the targets to filter by.
        steps: the number of ranges of lateness in the histogram.
        first_step: the number of the first of them, as in :func:`~bide.pipelines.report.counting.lateness`.
        panels: pending messages of targets that have no plot of their own.
    """
    types = [row["type"] for row in counting.types(messages).limit(_TYPES).collect()]
    numbered = counting.numbered(messages, targets, types)
    short = short_span(flow.width)
    lengths = {
        "scheduled": len(flow.scheduled) * (flow.width // short),
        "delivered": len(flow.scheduled) * (flow.width // short),
        "late": steps,
        "pending": 0 if pending is None else pending.spans,
    }
    choices: dict[tuple[int, int], Choice] = {}

    def choice(key: tuple[int, int]) -> Choice:
        if key not in choices:
            choices[key] = Choice(
                target=key[0],
                type=key[1],
                scheduled=[0] * lengths["scheduled"],
                delivered=[0] * lengths["delivered"],
                p50=[None] * len(flow.scheduled),
                p99=[None] * len(flow.scheduled),
                steps=[0] * steps,
                pending=[0] * lengths["pending"],
                overdue=[0] * lengths["pending"],
            )
        return choices[key]

    # The choice of all targets and types has the figures that the page shows first.
    whole = choice((0, 0))
    whole.p50[:], whole.p99[:] = flow.p50, flow.p99
    whole.late = [headline.p50, headline.p95, headline.p99, headline.max]
    due = (flow.first, flow.width) if pending is None else (pending.first, pending.width)
    for row in counting.parts(numbered, flow=(flow.first, short), due=due).collect():
        number = row["number"] - (first_step if row["part"] == "late" else 0)
        if 0 <= number < lengths[row["part"]]:
            for key in _keys(row):
                _add(choice(key), row, number)
    for row in counting.lateness_of_choices(numbered, flow.first, flow.width).collect():
        one = choice((row["target_number"], row["type_number"]))
        if row["span"] < 0:
            one.late = [row["p50"], row["p95"], row["p99"], row["max"]]
        else:
            one.p50[row["span"]], one.p99[row["span"]] = row["p50"], row["p99"]
    if headline.overdue:
        _add_oldest(choices, counting.oldest(numbered, OLDEST).collect())
    return Filters(
        targets=targets, types=types, short=short, choices=[choices[key] for key in sorted(choices)], pending=panels
    )


def _keys(row: Row) -> Iterator[tuple[int, int]]:
    """The choices that the messages of a row belong to."""
    target, kind = row["target_number"], row["type_number"]
    yield 0, 0
    if target:
        yield target, 0
    if kind:
        yield 0, kind
    if target and kind:
        yield target, kind


def _add(one: Choice, row: Row, number: int) -> None:
    counts = {"scheduled": one.scheduled, "delivered": one.delivered, "late": one.steps, "pending": one.pending}
    counts[row["part"]][number] += row["count"]
    if row["part"] == "pending":
        one.overdue[number] += row["overdue"]


def _add_oldest(choices: Mapping[tuple[int, int], Choice], rows: Sequence[Row]) -> None:
    for row in sorted(rows, key=lambda one: (one["due"] is None, one["due"] or 0, one["message_id"] or "")):
        message = OverdueMessage(
            message_id=row["message_id"] or "",
            target=row["target"],
            type=row["type"],
            due=None if row["due"] is None else from_microseconds(row["due"]),
        )
        for key in _keys(row):
            # A message whose other times are all unknown has added no choice.
            if key in choices and len(choices[key].oldest) < OLDEST:
                choices[key].oldest.append(message)
