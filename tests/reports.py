"""Example figures of reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

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
)
from bide.pipelines.report.filters import FilterChoice, Filters
from bide.pipelines.report.pending_figures import OverdueMessage, PendingFigures, PendingTarget

NOON: Final = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)


def headline() -> Headline:
    return Headline(
        scheduled=1_000_000,
        delivered=999_000,
        pending=1000,
        overdue=13,
        lost=2,
        early=0,
        lost_after=timedelta(minutes=10),
        since=NOON,
        until=NOON + 30 * MINUTE,
        p50=7.5,
        p95=21.0,
        p99=33.24,
        max=1500.0,
        cancelled=30,
        superseded=4,
        undeliverable=1,
    )


def schedules(queue: str) -> ScheduleFigures:
    orders = {"delivered": 60, "cancelled": 30, "superseded": 4, "skipped": 0, "undeliverable": 1, "unknown": 0}
    shop = {**dict.fromkeys(orders, 0), "delivered": 5}
    whole = {name: orders[name] + shop[name] for name in orders}
    first = {**dict.fromkeys(orders, 0), "delivered": 40, "cancelled": 10}
    return ScheduleFigures(
        total=ScheduleCounts(outcomes=whole, pending=12, overdue=1, max=240.0),
        targets=[
            ScheduleCounts(name=queue, outcomes=orders, pending=12, overdue=1, max=240.0),
            ScheduleCounts(name="x:shop", outcomes=shop, max=35.0),
        ],
        others=0,
        first=NOON.replace(hour=0),
        width=timedelta(days=1),
        spans=[
            ScheduleCounts(outcomes=first),
            ScheduleCounts(outcomes=dict.fromkeys(orders, 0)),
            ScheduleCounts(outcomes={name: whole[name] - first[name] for name in whole}),
        ],
        beyond=0,
    )


SHORT: Final = timedelta(seconds=10)


def choice(share: float, *, target: int = 0, type: int = 0, oldest: list[OverdueMessage] | None = None) -> FilterChoice:
    """A part of the messages of :func:`figures`, each span of them in the first of its short spans."""
    rest = [0] * (MINUTE // SHORT - 1)
    return FilterChoice(
        target=target,
        type=type,
        scheduled=[one for count in _SCHEDULED for one in (round(share * count), *rest)],
        delivered=[one for count in _DELIVERED for one in (round(share * count), *rest)],
        p50=list(_P50),
        p99=list(_P99),
        bins=[round(share * one) for one in _BINS],
        late=[7.5, 21.0, 33.24, 1500.0],
        pending=[round(share * 13), round(share * 986), *[0] * 22],
        overdue=[round(share * 13), *[0] * 23],
        oldest=oldest or [],
    )


def filters(queue: str, oldest: list[OverdueMessage]) -> Filters:
    """Filters by the two targets, and by two types: only messages for the queue have the second one."""
    mail, call = ([one for one in oldest if one.type == kind] for kind in ("SendMail", "Call"))
    return Filters(
        targets=[queue, "x:shop"],
        types=["SendMail", "Call"],
        short=SHORT,
        choices=[
            choice(1.0, oldest=oldest),
            choice(0.75, type=1, oldest=mail),
            choice(0.25, type=2, oldest=call),
            choice(0.75, target=1, oldest=oldest),
            choice(0.5, target=1, type=1, oldest=mail),
            choice(0.25, target=1, type=2, oldest=call),
            choice(0.25, target=2),
            choice(0.25, target=2, type=1),
        ],
    )


def overdue(queue: str, *, message_id: str = "order-", type: str = "Call") -> list[OverdueMessage]:
    """Thirteen overdue messages, of which the first two may be lost."""
    return [
        OverdueMessage(
            message_id=f"{message_id}{number}",
            target=queue,
            type=type if number % 3 == 0 else "SendMail",
            due=NOON + (10 + 6 * number if number < 2 else 22) * MINUTE,
        )
        for number in range(13)
    ]


_SCHEDULED: Final = [40_000] * 25 + [0] * 6
_DELIVERED: Final = [0] * 5 + [39_960] * 25 + [0]
_P50: Final = [None] * 5 + [7.5] * 25 + [None]
_P99: Final = [None] * 5 + [33.0] * 25 + [None]
_BINS: Final = [10, 800_000, 198_990]


def figures(
    *,
    queue: str = "q:orders",
    text: str = "no answer",
    exception: str = "Timeout",
    message_id: str = "order-",
    type: str = "Call",
) -> Figures:
    """A report with all its parts."""
    oldest = overdue(queue, message_id=message_id, type=type)
    return Figures(
        folder="/data/audit",
        missing=[],
        headline=headline(),
        flow=FlowFigures(
            first=NOON,
            width=MINUTE,
            scheduled=_SCHEDULED,
            delivered=_DELIVERED,
            p50=_P50,
            p99=_P99,
        ),
        lateness=[
            LatenessBin(low=0.0, high=1.0, count=_BINS[0]),
            LatenessBin(low=1.0, high=10.0, count=_BINS[1]),
            LatenessBin(low=10.0, high=100.0, count=_BINS[2]),
        ],
        targets=[
            TargetFigures(
                name=queue, scheduled=900_000, delivered=899_500, overdue=13, p50=7.5, p95=21.0, p99=33.0, max=1500.0
            ),
            TargetFigures(
                name="x:shop", scheduled=100_000, delivered=99_500, overdue=0, p50=8.0, p95=30.0, p99=40.0, max=90.0
            ),
        ],
        more_targets=0,
        pending=PendingFigures(
            first=NOON,
            width=HOUR,
            spans=24,
            targets=[
                PendingTarget(
                    name=queue, counts=[13, 487, *[0] * 22], overdue=[13, *[0] * 23], pending=500, pending_overdue=13
                ),
                PendingTarget(
                    name="x:shop", counts=[0, 499, *[0] * 22], overdue=[0] * 24, pending=500, pending_overdue=0
                ),
            ],
            others=0,
            earlier=0,
            later=1,
        ),
        failures=FailureFigures(
            first=NOON,
            width=MINUTE,
            spans=3,
            groups=[
                FailureGroup(
                    name="g1",
                    exception=exception,
                    endpoint="payments",
                    count=12,
                    messages=4,
                    first_seen=NOON,
                    last_seen=NOON + 2 * MINUTE,
                    recent=12,
                    before=0,
                    text=text,
                    counts=[1, 0, 11],
                )
            ],
            others=0,
            total=12,
        ),
        schedules=schedules(queue),
        oldest=oldest,
        overdue=13,
        query="select message_id\nfrom parquet.`file:///data/audit/messages`\nwhere outcome = 'overdue'",
        filters=filters(queue, oldest),
    )


def _pending_target(name: str, *, counts: list[int], overdue: list[int], pending: int) -> PendingTarget:
    rest = [0] * 22
    return PendingTarget(
        name=name, counts=counts + rest, overdue=overdue + rest, pending=pending, pending_overdue=sum(overdue)
    )
