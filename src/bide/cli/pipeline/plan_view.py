"""Output of ``bide pipeline plan``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from bide.durations import format_delay
from bide.runtime.wording import in_bytes, quantity

if TYPE_CHECKING:
    from bide.pipelines.plan.arrays import ArrayWorkload
    from bide.pipelines.plan.capacity import Judgement
    from bide.pipelines.plan.figures import PlanReport
    from bide.pipelines.plan.workload import Workload

_MAX_SPANS: Final = 24


def plan_lines(
    workload: Workload | ArrayWorkload, reports: Sequence[PlanReport], every: timedelta, seconds: float
) -> Iterator[str]:
    """The lines of a plan, one layout after the other."""
    messages = quantity(round(workload.messages), "message")
    yield f"{messages}, {in_bytes(workload.bytes)} of bodies; planned in {seconds:.1f} s"
    if workload.undelayed:
        yield f"{workload.undelayed:,.0f} of them are not delayed: they go directly to their targets"
    for report in reports:
        yield ""
        yield from _layout_lines(report)
    if any(report.spans for report in reports):
        yield ""
        yield from _span_lines(reports, every)


def _layout_lines(report: PlanReport) -> Iterator[str]:
    if not report.levels:
        yield f"{report.layout}: no message waits"
        return
    heads = f"{'most held':>14} {'bodies':>9} {'hops':>16} {'most hops/s':>12} {'most released/s':>16}"
    yield f"{report.layout:<11} {heads}"
    for one in report.levels:
        released = "" if one.release_peak is None else f"{one.release_peak:,.0f}"
        where = "" if one.release_at is None else f"  {one.release_queue} at {one.release_at:%m-%d %H:%M:%S}"
        yield (
            f"  {one.level:<9} {one.held_peak:>14,.0f} {in_bytes(one.bytes_peak):>9} {one.hops:>16,.0f} "
            f"{one.hops_peak:>12,.0f} {released:>16}{where}"
        ).rstrip()
    for judgement in report.judgements:
        yield f"  {_judgement_text(judgement)}"


def _judgement_text(one: Judgement) -> str:
    is_size = one.what in {"disk", "memory"}
    wanted, *rest = (in_bytes(value) if is_size else f"{value:,.0f}" for value in (one.wanted, one.capacity or 0.0))
    if one.load is None:
        return f"{one.what}: {wanted}"
    text = f"{one.what}: {wanted} of {rest[0]}, {one.load:.0%}: {one.verdict}"
    if one.verdict != "fits" and one.lanes is not None:
        text += f"; {one.lanes} lanes are enough" if one.lanes <= 64 else "; more than 64 lanes would be needed"
    return text


def _span_lines(reports: Sequence[PlanReport], every: timedelta) -> Iterator[str]:
    """A table with a row for each span. It has the layouts side by side, and sums up the levels of each."""
    heads = "".join(f"  {report.layout + ': held':>18} {'hops/s':>9}" for report in reports)
    yield f"{'from (UTC)':<16}{heads}"
    times = sorted({span.at for report in reports for span in report.spans})
    by_time = [{span.at: span for span in report.spans} for report in reports]
    for at in times[:_MAX_SPANS]:
        cells = ""
        for spans in by_time:
            span = spans.get(at)
            cells += f"  {span.held:>18,.0f} {span.hops_per_second:>9,.0f}" if span else " " * 30
        yield f"{at:%Y-%m-%d %H:%M}{cells}".rstrip()
    if len(times) > _MAX_SPANS:
        yield f"... and {len(times) - _MAX_SPANS:,} more spans of {format_delay(every)}: see --json, or --out"
