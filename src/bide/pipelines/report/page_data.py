"""Data of the page's filters and zoom, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from bide.durations import EPOCH
from bide.foreign_text import visible
from bide.pipelines.charts.scale import ROUND_SPANS
from bide.pipelines.report import content, plots
from bide.pipelines.report.figures import Figures
from bide.pipelines.report.filters import FilterChoice, Filters
from bide.pipelines.report.pending_figures import PendingTarget

_MILLISECOND: Final = timedelta(milliseconds=1)


def page_data(figures: Figures, filters: Filters) -> str:
    """The data as the text of a ``script`` element, escaped so that no text of a message can end the element."""
    text = json.dumps(_visible(_data(figures, filters)), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(figures: Figures, filters: Filters) -> dict[str, Any]:
    flow = figures.flow
    return {
        "first": 0 if flow is None else _milliseconds(flow.first),
        "width": 1 if flow is None else _milliseconds(flow.width),
        "spans": 0 if flow is None else len(flow.scheduled),
        "short": _milliseconds(filters.short),
        "round": [_milliseconds(one) for one in ROUND_SPANS],
        "bins": [[one.low, one.high] for one in figures.lateness or ()],
        "targets": [plots.in_words(one) for one in filters.targets],
        "types": list(filters.types),
        "choices": [_choice(one, figures) for one in filters.choices],
        "pending": _pending(figures, filters),
    }


def _choice(one: FilterChoice, figures: Figures) -> dict[str, Any]:
    return {
        "target": one.target,
        "type": one.type,
        "scheduled": one.scheduled,
        "delivered": one.delivered,
        "p50": [_rounded(value) for value in one.p50],
        "p99": [_rounded(value) for value in one.p99],
        "late": [_rounded(value) for value in one.late],
        "bins": one.bins,
        "pending": one.pending,
        "overdue": one.overdue,
        "oldest": [list(row) for row in content.oldest_rows(one.oldest, figures.headline)],
    }


def _pending(figures: Figures, filters: Filters) -> dict[str, Any] | None:
    found = figures.pending
    if found is None or not found.targets:
        return None
    named = {one.name: one for one in [*filters.pending, *found.targets[: len(found.targets) - bool(found.others)]]}
    until = None if figures.headline is None else figures.headline.until
    return {
        "first": _milliseconds(found.first),
        "width": _milliseconds(found.width),
        "spans": found.spans,
        "now": None if until is None else _milliseconds(until),
        "targets": [_panel(one, plots.target_name(found, one)) for one in found.targets],
        "each": [_panel(named[name], plots.in_words(name)) if name in named else None for name in filters.targets],
    }


def _panel(one: PendingTarget, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "counts": list(one.counts),
        "overdue": list(one.overdue),
        "pending": one.pending,
        "late": one.pending_overdue,
    }


def _milliseconds(value: timedelta | datetime) -> float:
    """A span, or a time since the Unix epoch, in milliseconds. Whole numbers are integers, to keep the JSON short."""
    number = (value - EPOCH if isinstance(value, datetime) else value) / _MILLISECOND
    return int(number) if number.is_integer() else number


def _rounded(value: float | None) -> float | None:
    """A duration, rounded to five significant digits, which are enough for a plot."""
    return None if value is None else float(f"{value:.5g}")


def _visible(value: Any) -> Any:
    """A value for JSON in which all texts have control characters made visible, as elsewhere on the page."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: _visible(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [_visible(one) for one in value]
    return value
