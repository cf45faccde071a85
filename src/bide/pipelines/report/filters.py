"""Figures of the page's filters: the messages of each target and type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from bide.pipelines.charts.scale import ROUND_SPANS

if TYPE_CHECKING:
    from bide.pipelines.report.pending_figures import OverdueMessage, PendingTarget

_PARTS: Final = 8


@dataclass(slots=True, kw_only=True)
class FilterChoice:
    """The messages of one choice of the filters.

    Attributes:
        target: the number of the target in the filter, from 1; 0 for all targets.
        type: the number of the type in the filter, from 1; 0 for all types.
        scheduled: messages scheduled, for each short span.
        delivered: messages delivered, for each short span.
        p50: the median lateness in ms, for each span of the plot; None for a span without deliveries.
        p99: the 99th percentile of the lateness in ms, for each span of the plot.
        bins: messages for each range of lateness of the histogram.
        late: the median, the 95th and 99th percentile and the maximum of the lateness in ms.
        pending: messages that are not delivered yet, for each span of the due time.
        overdue: overdue messages, for each span of the due time.
        oldest: the overdue messages with the earliest due times.
    """

    target: int
    type: int
    scheduled: list[int]
    delivered: list[int]
    p50: list[float | None]
    p99: list[float | None]
    bins: list[int]
    pending: list[int]
    overdue: list[int]
    late: list[float | None] = field(default_factory=lambda: [None] * 4)
    oldest: list[OverdueMessage] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of the page.

    Attributes:
        targets: the targets with most messages.
        types: the types with most messages.
        short: the length of the short spans, into which the spans of the plot are divided.
        choices: the choice of all targets and types, then the other choices that have messages.
        pending: pending messages of those *targets* that the plot of pending messages does not show.
    """

    targets: Sequence[str]
    types: Sequence[str]
    short: timedelta
    choices: Sequence[FilterChoice]
    pending: Sequence[PendingTarget] = ()


def short_span(width: timedelta) -> timedelta:
    """The shortest round span that divides a span into at most eight equal parts."""
    return next((one for one in ROUND_SPANS if not width % one and width // one <= _PARTS), width)
