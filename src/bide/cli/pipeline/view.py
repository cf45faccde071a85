"""Output of ``bide pipeline``: summaries, histograms and progress."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from bide.pipelines.engine import Engine
    from bide.pipelines.schedule.plan import SchedulePlan
    from bide.pipelines.schedule.progress import Survey
    from bide.pipelines.schedule.targets import TargetCount

from bide.runtime.logs import logger
from bide.runtime.wording import quantity

log = logger(__name__)

_SPANS: Final = (
    *(timedelta(seconds=number) for number in (1, 5, 15, 30)),
    *(timedelta(minutes=number) for number in (1, 5, 15, 30)),
    *(timedelta(hours=number) for number in (1, 3, 6, 12)),
    *(timedelta(days=number) for number in (1, 7, 30, 90, 365)),
)
_MAX_LINES: Final = 32
_BAR_WIDTH: Final = 40
_BAR_CHARACTERS: Final = " ▏▎▍▌▋▊▉"
_UPDATE_INTERVAL: Final = 1.0
"""Seconds between updates of progress."""


def engine_facts(engine: Engine) -> dict[str, str]:
    """The engine that ran a command, and the reason for it, for ``--json``."""
    return {"engine": "spark" if engine.is_spark else "local", "engine_reason": engine.reason}


def span_for(first: datetime | None, last: datetime | None) -> timedelta:
    """The shortest of :data:`_SPANS` that gives a histogram of at most :data:`_MAX_LINES` lines, or the longest one."""
    if first is None or last is None:
        return _SPANS[0]
    return next((span for span in _SPANS if (last - first) / span < _MAX_LINES - 1), _SPANS[-1])


def summary(found: Survey, plan: SchedulePlan, targets: list[TargetCount]) -> dict[str, Any]:
    """The counts of a survey, for ``--json``."""
    counts = {one.queue or "": one.rows for one in targets}
    return {
        **({"destinations": counts} if plan.to_column is not None else {}),
        "rows": found.rows,
        "target": _target_text(plan),
        "broker": plan.broker,
        "first_due": None if found.first is None else found.first.isoformat(),
        "last_due": None if found.last is None else found.last.isoformat(),
        "past": found.already_due,
        "overdue": found.overdue,
        "without_time": found.without_time,
        "without_body": found.without_body,
        "too_late": found.too_late,
        "bad_headers": found.bad_headers,
    }


def survey_lines(
    found: Survey,
    plan: SchedulePlan,
    targets: list[TargetCount],
    times: list[tuple[datetime, int]],
    every: timedelta,
) -> list[str]:
    """The lines of a dry run: the counts of a survey, and a histogram."""
    first, *more = summary_lines(found, plan, targets)
    return [f"{first}; nothing was sent", *more, *histogram(times, every)]


def summary_lines(found: Survey, plan: SchedulePlan, targets: list[TargetCount]) -> list[str]:
    """Lines with the number of messages (for each target if rows name targets) and their first and last due time."""
    lines = [f"{quantity(found.rows, 'message')} to {_target_text(plan)} on {plan.broker}"]
    lines += [f"{one.rows:>9,}  to {one.queue or 'no queue'}" for one in targets[:_MAX_LINES]]
    if len(targets) > _MAX_LINES:
        others = targets[_MAX_LINES:]
        lines.append(f"{sum(one.rows for one in others):>9,}  to {quantity(len(others), 'other queue')}")
    if found.first is not None and found.last is not None:
        lines.append(f"due from {found.first:%Y-%m-%d %H:%M:%S} to {found.last:%Y-%m-%d %H:%M:%S} UTC")
    if found.already_due:
        overdue = f", {found.overdue:,} for more than 5 min" if found.overdue else ""
        option = f" (--past {plan.settings.past})" if found.overdue and plan.settings.past else ""
        lines.append(f"due already: {quantity(found.already_due, 'message')}{overdue}{option}")
    return lines


def histogram(times: list[tuple[datetime, int]], every: timedelta) -> list[str]:
    """Lines of a histogram: one for each span of time, and one for several empty spans in a row."""
    if not times:
        return []
    counts = dict(times)
    highest = max(counts.values())
    form = "%Y-%m-%d" if every >= timedelta(days=1) else "%Y-%m-%d %H:%M:%S" if every.seconds < 60 else "%Y-%m-%d %H:%M"
    lines = []
    due, last, empty = times[0][0], times[-1][0], 0
    while True:
        count = counts.get(due, 0)
        if count:
            if empty > 1:
                lines.append(f"{'':>{len(due.strftime(form))}}  ({empty} spans with none)")
            elif empty:
                lines.append(f"{(due - every).strftime(form)}  {0:>11,}")
            empty = 0
            lines.append(f"{due.strftime(form)}  {count:>11,}  {_bar(count / highest)}")
        else:
            empty += 1
        # The next span may begin after the last time that Python can represent.
        if last - due < every:
            return lines
        due += every


def _bar(share: float) -> str:
    eighths = max(round(share * _BAR_WIDTH * 8), 1)
    return "█" * (eighths // 8) + _BAR_CHARACTERS[eighths % 8].strip()


def _target_text(plan: SchedulePlan) -> str:
    constants = plan.settings.constants
    if plan.to_column is not None:
        return f"the queues in the column {plan.to_column}"
    if "to" in constants:
        return f"the queue {constants['to']}"
    return f"the exchange {constants['exchange']} ({constants.get('routing_key', '')!r})"


@contextmanager
def progress(what: str, *, total: int | None = None, done: Callable[[], int] | None = None) -> Iterator[None]:
    """Show progress on a terminal; do nothing elsewhere.

    Args:
        what: a description of the work.
        total: the amount of work; None if unknown.
        done: returns the amount of work that is done. It is called once per second, also after it raised an error.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    if done is not None:
        columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        if done is None:
            yield
            return
        ended = threading.Event()

        def update() -> None:
            while not ended.wait(_UPDATE_INTERVAL):
                try:
                    completed = done()
                except Exception as error:  # noqa: BLE001 (a lasting error is raised by the work itself)
                    log.debug("cannot determine the progress: %s", error)
                else:
                    bar.update(task, completed=completed)

        updater = threading.Thread(target=update, name="progress", daemon=True)
        updater.start()
        try:
            yield
        finally:
            ended.set()
            updater.join()
