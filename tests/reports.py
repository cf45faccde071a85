"""Example figures of reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

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
)

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
        grace=timedelta(minutes=10),
        since=NOON,
        until=NOON + 30 * MINUTE,
        p50=7.5,
        p95=21.0,
        p99=33.25,
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


def figures(*, queue: str = "q:orders", text: str = "no answer", exception: str = "Timeout") -> Figures:
    """A report with all its parts."""
    scheduled = [40_000] * 25 + [0] * 6
    delivered = [0] * 5 + [39_960] * 25 + [0]
    return Figures(
        folder="/data/audit",
        missing=[],
        headline=headline(),
        flow=FlowFigures(
            first=NOON,
            width=MINUTE,
            scheduled=scheduled,
            delivered=delivered,
            p50=[None] * 5 + [7.5] * 25 + [None],
            p99=[None] * 5 + [33.0] * 25 + [None],
        ),
        lateness=[
            ReportStep(low=0.0, high=1.0, count=10),
            ReportStep(low=1.0, high=10.0, count=800_000),
            ReportStep(low=10.0, high=100.0, count=198_990),
        ],
        targets=[
            Target(
                name=queue, scheduled=900_000, delivered=899_500, overdue=13, p50=7.5, p95=21.0, p99=33.0, max=1500.0
            ),
            Target(
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
        failures=Failures(
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
    )


def _pending_target(name: str, *, counts: list[int], overdue: list[int], pending: int) -> PendingTarget:
    rest = [0] * 22
    return PendingTarget(
        name=name, counts=counts + rest, overdue=overdue + rest, pending=pending, pending_overdue=sum(overdue)
    )
