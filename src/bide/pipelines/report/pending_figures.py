"""Figures of pending and overdue messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from bide.pipelines.charts.scale import add_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueMessage:
    """A message that is overdue.

    Attributes:
        message_id: the id of the message.
        target: ``q:<queue>`` or ``x:<exchange>``.
        type: the type of the message; empty if unknown.
        due: the due time; None if unknown.
    """

    message_id: str
    target: str
    type: str
    due: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTarget:
    """Pending messages of one target, in spans of the due time.

    Attributes:
        name: ``q:<queue>`` or ``x:<exchange>``; empty for all other targets together.
        counts: messages for each span, including overdue ones.
        overdue: overdue messages for each span.
        pending: all messages, including those due before or after the spans.
        pending_overdue: all overdue messages.
    """

    name: str
    counts: Sequence[int]
    overdue: Sequence[int]
    pending: int
    pending_overdue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFigures:
    """Pending messages by target and due time.

    Attributes:
        first: the start of the first span.
        width: the length of a span.
        spans: the number of spans.
        targets: the targets with most messages, then one for all others if there are more.
        others: how many targets the last of *targets* stands for; 0 if it stands for itself.
        earlier: messages due before the first span.
        later: messages due after the last span.
    """

    first: datetime
    width: timedelta
    spans: int
    targets: Sequence[PendingTarget]
    others: int
    earlier: int
    later: int

    @property
    def last(self) -> datetime:
        """The end of the last span."""
        return add_spans(self.first, self.width, self.spans)
