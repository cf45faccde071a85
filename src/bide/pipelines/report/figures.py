"""Figures of a report: a few hundred numbers for any number of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from bide.pipelines.charts.scale import add_spans
from bide.pipelines.report.filters import Filters
from bide.pipelines.report.pending_figures import OverdueMessage, PendingFigures

ENDED_UNDELIVERED: Final = ("cancelled", "superseded", "skipped", "undeliverable", "unknown")
"""Outcomes of schedules that ended without a delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The figures of all messages together.

    Attributes:
        scheduled: messages that were scheduled.
        delivered: scheduled messages that were delivered or processed.
        pending: messages that are not delivered yet or wait for a retry, including the overdue ones.
        overdue: pending messages whose due time has passed.
        lost: overdue messages that were due more than *lost_after* before *until*.
        early: messages that were delivered before their due time.
        lost_after: a message that has been overdue for longer counts as lost.
        since: when the first message was scheduled or delivered.
        until: when the last message was scheduled or delivered; the report computes overdue times up to then.
        p50: the median lateness in ms; None if no message was delivered.
        p95: the 95th percentile of the lateness in ms.
        p99: the 99th percentile of the lateness in ms.
        max: the largest lateness in ms.
        cancelled: schedules that were cancelled.
        superseded: schedules that were replaced.
        skipped: runs of recurring schedules that were skipped.
        undeliverable: scheduled messages that a gate moved to the undeliverable queue.
        unknown: schedules that ended in records of the schedule log which were lost.
    """

    scheduled: int
    delivered: int
    pending: int
    overdue: int
    lost: int
    early: int
    lost_after: timedelta
    since: datetime | None
    until: datetime | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    cancelled: int = 0
    superseded: int = 0
    skipped: int = 0
    undeliverable: int = 0
    unknown: int = 0

    @property
    def ended(self) -> dict[str, int]:
        """Messages that ended without a delivery, by outcome; outcomes without messages are left out."""
        return {name: count for name in ENDED_UNDELIVERED if (count := getattr(self, name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFigures:
    """Messages scheduled and delivered in equal spans of time.

    Attributes:
        first: the start of the first span.
        width: the length of a span.
        scheduled: messages scheduled, for each span.
        delivered: messages delivered, for each span.
        p50: the median lateness in ms of the messages delivered in each span; None for a span without deliveries.
        p99: the 99th percentile of the lateness in ms of the messages delivered in each span.
    """

    first: datetime
    width: timedelta
    scheduled: Sequence[int]
    delivered: Sequence[int]
    p50: Sequence[float | None]
    p99: Sequence[float | None]

    @property
    def last(self) -> datetime:
        """The end of the last span."""
        return add_spans(self.first, self.width, len(self.scheduled))

    def waiting(self) -> list[int]:
        """The number of messages that are scheduled and not delivered at the end of each span."""
        total, found = 0, []
        for scheduled, delivered in zip(self.scheduled, self.delivered, strict=True):
            total += scheduled - delivered
            found.append(total)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessBin:
    """Delivered messages whose lateness is in a range.

    Attributes:
        low: the lower end of the range in ms; 0 for the range of all lateness below 1 ms.
        high: the upper end of the range in ms.
        count: the number of messages.
    """

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFigures:
    """The messages of one target.

    Attributes:
        name: ``q:<queue>`` or ``x:<exchange>``.
        scheduled: messages that were scheduled.
        delivered: messages that were delivered.
        overdue: messages that are overdue.
        p50: the median lateness in ms; None if no message was delivered.
        p95: the 95th percentile of the lateness in ms.
        p99: the 99th percentile of the lateness in ms.
        max: the largest lateness in ms.
    """

    name: str
    scheduled: int
    delivered: int
    overdue: int
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """A group of similar failures.

    Attributes:
        name: the name of the group.
        exception: the name of the exception.
        endpoint: the endpoint on which the attempts failed.
        count: failed attempts.
        messages: messages that failed.
        first_seen: the time of the first failure.
        last_seen: the time of the last failure.
        recent: failures in the last hour.
        before: failures in the hour before that.
        text: the text of the newest failure, shortened.
        counts: failures for each span of time; empty if unknown.
    """

    name: str
    exception: str
    endpoint: str
    count: int
    messages: int
    first_seen: datetime
    last_seen: datetime
    recent: int
    before: int
    text: str
    counts: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFigures:
    """The groups with most failures.

    Attributes:
        first: the start of the first span.
        width: the length of a span.
        spans: the number of spans.
        groups: the groups, the one with most failures first.
        others: the number of groups that are left out.
        total: failed attempts in all groups.
    """

    first: datetime
    width: timedelta
    spans: int
    groups: Sequence[FailureGroup]
    others: int
    total: int

    @property
    def last(self) -> datetime:
        """The end of the last span."""
        return add_spans(self.first, self.width, self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecodableFigures:
    """Messages of a stream that cannot be decoded for the same reason.

    Attributes:
        stream: the name of the stream.
        reason: why the messages cannot be decoded.
        count: the number of messages.
        first_offset: the offset of the first one.
        first_seen: when the first one was stored.
        last_seen: when the last one was stored.
    """

    stream: str
    reason: str
    count: int
    first_offset: int
    first_seen: datetime
    last_seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCounts:
    """Occurrences of schedules by outcome.

    Attributes:
        name: the target, ``q:<queue>`` or ``x:<exchange>``; empty for several targets together.
        outcomes: occurrences that have ended, by outcome.
        pending: occurrences that have not ended.
        overdue: pending occurrences whose due time has passed.
        max: the largest lateness of a delivered occurrence in ms; None if none was delivered, or for a span.
    """

    name: str = ""
    outcomes: Mapping[str, int]
    pending: int = 0
    overdue: int = 0
    max: float | None = None

    @property
    def total(self) -> int:
        """All occurrences."""
        return sum(self.outcomes.values()) + self.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFigures:
    """Occurrences of schedules by target, and the due times of ended occurrences in equal spans.

    Attributes:
        total: all occurrences.
        targets: the targets with most occurrences, then all other targets together if there are more.
        others: how many targets the last of *targets* stands for; 0 if it stands for itself.
        first: the start of the first span.
        width: the length of a span, a day or more.
        spans: occurrences that have ended and were due in each span.
        beyond: occurrences that have ended and were due before or after all spans.
    """

    total: ScheduleCounts
    targets: Sequence[ScheduleCounts]
    others: int
    first: datetime
    width: timedelta
    spans: Sequence[ScheduleCounts]
    beyond: int

    @property
    def last(self) -> datetime:
        """The end of the last span."""
        return add_spans(self.first, self.width, len(self.spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures of a report. A figure is empty if its table is empty, and None or empty if its table is missing.

    Attributes:
        folder: the folder of the tables.
        missing: tables that are missing.
        more_targets: the number of targets that are left out of *targets*.
        oldest: the overdue messages with the earliest due times.
        overdue: overdue messages in the table of messages. Overdue schedules and retries are not in this table.
        query: selects all overdue messages from the table of messages: Spark SQL, or a Python program if it is a Delta
            table.
        filters: the messages by target and type.
        schedules: the occurrences of schedules; None if there has never been a schedule.
        undecodable: the most frequent reasons, the one with most messages first.
        undecodable_total: undecodable messages of all reasons.
    """

    folder: str
    missing: Sequence[str]
    headline: Headline | None = None
    flow: FlowFigures | None = None
    lateness: Sequence[LatenessBin] | None = None
    targets: Sequence[TargetFigures] = ()
    more_targets: int = 0
    oldest: Sequence[OverdueMessage] = ()
    overdue: int = 0
    query: str = ""
    filters: Filters | None = None
    pending: PendingFigures | None = None
    failures: FailureFigures | None = None
    schedules: ScheduleFigures | None = None
    undecodable: Sequence[UndecodableFigures] = ()
    undecodable_total: int = 0
