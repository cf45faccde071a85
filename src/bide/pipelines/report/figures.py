"""What a report shows, as plain figures: a few hundred numbers, however many messages there were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from bide.pipelines.report.scale import after


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """All messages together.

    Attributes:
        scheduled: messages that were scheduled, whatever became of them.
        delivered: of them, those that were delivered, or processed.
        pending: those that are not delivered yet, or wait to be tried again; with the overdue ones.
        overdue: of the pending ones, those that were due.
        lost: of the overdue ones, those that were due longer than *grace* before *until*.
        early: delivered before they were due.
        grace: how long a message may be overdue before it counts as lost.
        since: when the first was scheduled or delivered.
        until: when the last was: the time that the report is of.
        p50: lateness in ms that half of the delivered messages did not exceed; None where none was delivered.
        p95: and of 95 in 100.
        p99: and of 99 in 100.
        max: the highest lateness in ms.
    """

    scheduled: int
    delivered: int
    pending: int
    overdue: int
    lost: int
    early: int
    grace: timedelta
    since: datetime | None
    until: datetime | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFigures:
    """Messages that came and went in each of equal spans of time.

    Attributes:
        first: the beginning of the first span.
        width: of a span.
        scheduled: for each span, messages scheduled.
        delivered: for each span, messages delivered.
        p50: for each span, lateness in ms of what was delivered in it, None where that is nothing.
        p99: the same.
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
        return after(self.first, self.width, len(self.scheduled))

    def waiting(self) -> list[int]:
        """How many were scheduled and not delivered at the end of each span."""
        total, found = 0, []
        for came, went in zip(self.scheduled, self.delivered, strict=True):
            total += came - went
            found.append(total)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStep:
    """Delivered messages whose lateness is in a range.

    Attributes:
        low: from here on, in ms; 0 for what is less than the first range.
        high: up to here.
    """

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The messages of one target.

    Attributes:
        name: ``q:<queue>`` or ``x:<exchange>``.
        p50: of their lateness, in ms, None where none was delivered.
        p95: the same.
        p99: the same.
        max: the same.
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
class Building:
    """What waits for one target, in spans of the time that it is due at.

    Attributes:
        counts: for each span; with the overdue ones.
        overdue: for each span.
        pending: in all, also what is due before or after the spans.
    """

    name: str
    counts: Sequence[int]
    overdue: Sequence[int]
    pending: int
    pending_overdue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skyline:
    """What waits, by target and the time it is due at.

    Attributes:
        first: the beginning of the first span.
        width: of a span.
        buildings: the targets with most, and after them one for all others, if there are more.
        others: how many targets that one is.
        earlier: messages due before the first span.
        later: messages due after the last one.
    """

    first: datetime
    width: timedelta
    spans: int
    buildings: Sequence[Building]
    others: int
    earlier: int
    later: int

    @property
    def last(self) -> datetime:
        """The end of the last span."""
        return after(self.first, self.width, self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures that are alike.

    Attributes:
        count: attempts that failed.
        messages: that failed so.
        recent: of the last hour.
        before: of the hour before that.
        text: what the newest one said, cut off.
        counts: for each span of the groups' time; empty where it is unknown.
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
class Failures:
    """The groups with most failures.

    Attributes:
        first: the beginning of the first span.
        width: of a span.
        spans: how many there are.
        groups: most failures first.
        others: groups that are left out.
        total: attempts that failed, those of all groups.
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
        return after(self.first, self.width, self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecodableFigures:
    """Messages of a stream that cannot be decoded, for one reason.

    Attributes:
        first_offset: of the first one in the stream.
    """

    stream: str
    reason: str
    count: int
    first_offset: int
    first_seen: datetime
    last_seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that a report shows. What is None has no table in the folder; what is empty has an empty one.

    Attributes:
        folder: of the tables.
        missing: tables that are not there.
        undecodable: most messages first; those of the reasons after the first ones are left out.
        undecodable_total: all of them.
    """

    folder: str
    missing: Sequence[str]
    headline: Headline | None = None
    flow: FlowFigures | None = None
    lateness: Sequence[ReportStep] | None = None
    targets: Sequence[Target] = ()
    more_targets: int = 0
    skyline: Skyline | None = None
    failures: Failures | None = None
    undecodable: Sequence[UndecodableFigures] = ()
    undecodable_total: int = 0
