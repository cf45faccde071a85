"""Sections of a report about schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bide.pipelines.charts import texts
from bide.pipelines.report import plots
from bide.pipelines.report.figures import Figures, ScheduleCounts, ScheduleFigures
from bide.pipelines.report.section import Section, SectionTable
from bide.runtime.wording import quantity


def summary(figures: Figures) -> str:
    """A short text about schedules; empty without schedules."""
    if figures.schedules is None:
        return ""
    total = figures.schedules.total
    ended = listed(total.outcomes)
    overdue = f" ({total.overdue:,} overdue)" if total.overdue else ""
    return f"schedules: {ended + ', ' if ended else ''}{total.pending:,} pending{overdue}"


def listed(outcomes: Mapping[str, int]) -> str:
    """Outcomes with their counts, separated by commas; outcomes with the count 0 are left out."""
    return ", ".join(f"{count:,} {name}" for name, count in outcomes.items() if count)


def by_target(found: ScheduleFigures) -> Section:
    """Occurrences of schedules by target and outcome."""
    names = [name for name, count in found.total.outcomes.items() if count]
    rows = [
        (name, *map(texts.count, _schedule_row(one, names)), texts.milliseconds(one.max))
        for one, name in (
            *((one, plots.target_name(found, one)) for one in found.targets),
            *([(found.total, "all targets")] if len(found.targets) > 1 else []),
        )
    ]
    late = " Lateness includes up to 100 ms until the gate reports a delivery." if found.total.max is not None else ""
    return Section(
        name="schedules",
        title="Schedules",
        note=f"Occurrences in the schedule log, by target and outcome.{late}",
        table=SectionTable(
            head=("target", *names, "pending", "overdue", "all", "latest"),
            rows=rows,
            number_columns=len(names) + 4,
            is_collapsed=False,
        ),
    )


def _schedule_row(one: ScheduleCounts, names: Sequence[str]) -> tuple[int, ...]:
    return (*(one.outcomes[name] for name in names), one.pending, one.overdue, one.total)


def over_time(found: ScheduleFigures) -> Section:
    """Ended occurrences of schedules by due time."""
    names = [name for name, count in found.total.outcomes.items() if count]
    rows = [
        (
            texts.moment(found.first + found.width * number),
            *(texts.count(one.outcomes[name]) for name in names),
            texts.count(one.total),
        )
        for number, one in enumerate(found.spans)
        if one.total
    ]
    left_out = f" Not shown: {quantity(found.beyond, 'occurrence')} due long before or after." if found.beyond else ""
    return Section(
        name="schedules-over-time",
        title="Ended schedules, by due time",
        note=f"Delivered occurrences; cancelled, superseded or skipped ones; undeliverable or unknown ones.{left_out}",
        draw=lambda width: plots.schedules(found, width=width),
        table=SectionTable(head=("due from (UTC)", *names, "all"), rows=rows, number_columns=len(names) + 1),
    )
