"""Output of the demonstration: live on a terminal, else a line per phase; and the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bide.demo.figures import DemoFigures, FigureBar, Histogram
from bide.demo.progress import Phase, PhaseName, Progress
from bide.foreign_text import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bide.demo.report import DemoReport

_TITLES: Final[Mapping[PhaseName, str]] = {
    "start": "start a private RabbitMQ",
    "apply": "apply the clock levels",
    "publish": "publish",
    "wait": "wait for the last due time",
    "shop": "run an endpoint that retries",
    "audit": "audit the taps and events",
    "report": "draw the report",
    "clean": "clean up",
}
_BARS: Final = 10
_WIDTH: Final = 44


class _Display:
    """The live display, rendered again at each refresh."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich__(self) -> RenderableType:
        progress = self._progress
        parts: list[RenderableType] = [_phase_line(phase) for phase in progress.phases]
        if progress.published:
            table = Table.grid(padding=(0, 1))
            total = len(progress.plan.messages)
            for name, done, goal in (
                ("published", progress.published, total),
                ("delivered", progress.delivered, progress.plan.expected),
            ):
                bar = ProgressBar(total=goal, completed=done, width=_WIDTH)
                table.add_row(f"  {name}", bar, f"{done:,} of {goal:,}")
            parts += [Text(), table]
        if progress.delivered:
            parts += [Text(), histogram(progress.lateness)]
        return Group(*parts)


@contextmanager
def showing(progress: Progress, console: Console) -> Iterator[None]:
    """Display the progress of a run: live on a terminal, a line per phase elsewhere."""
    if not console.is_terminal:
        progress.on_end = lambda phase: console.print(_phase_line(phase), soft_wrap=True)
        yield
        return
    with Live(_Display(progress), console=console, refresh_per_second=8):
        yield
    # With --console, the display ends before the web page is served. Later phases are printed as lines.
    progress.on_end = lambda phase: console.print(_phase_line(phase))


def _phase_line(phase: Phase) -> Text:
    done = phase.seconds is not None
    line = Text(f"{'✓' if done else '·'} ", style="green" if done else "yellow")
    line.append(f"{_TITLES[phase.name]:<28}", style="bold" if not done else "")
    line.append(f"{phase.elapsed:6.1f} s", style="dim")
    if phase.note:
        line.append(f"  {visible(phase.note)}", style="dim")
    return line


def histogram(lateness: Histogram) -> RenderableType:
    """A histogram of the lateness, measured from the due time to the receipt."""
    bars = lateness.bars(_BARS)
    most = max((bar.count for bar in bars), default=1)
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    for bar in bars:
        # At least one block, so that a single message is visible beside thousands.
        length = max(round(bar.count / most * _WIDTH), 1) if bar.count else 0
        table.add_row(f"  {_range(bar)}", Text("█" * length, style="cyan"), f"{bar.count:,}" if bar.count else "")
    return Group(Text("  lateness in ms (due time to receipt)", style="dim"), table)


def _range(bar: FigureBar) -> str:
    return f"{bar.low} and more" if bar.high is None else f"{bar.low} to {bar.high}"


def result(
    figures: DemoFigures, lateness: Histogram, *, live: bool, report: DemoReport | None = None, no_report: str = ""
) -> RenderableType:
    """The figures at the end of the demonstration.

    Args:
        figures: the figures.
        lateness: the data of the histogram.
        live: whether a live display has shown the histogram already.
        report: the report, if there is one.
        no_report: why there is no report, if one was requested.
    """
    parts: list[RenderableType] = [] if live else [Text(), histogram(lateness)]
    late = figures.lateness
    rows = [
        ("published", f"{figures.published:,} messages, each confirmed"),
        ("delivered", f"{figures.delivered:,} of {figures.expected:,} (a topic exchange copies some)"),
        ("lost", f"{figures.lost:,}"),
        ("early", f"{figures.early:,}"),
        ("duplicates", f"{figures.duplicates:,}"),
        (
            "hops",
            f"{figures.hops_per_message:.2f} queues per message on average, {max(figures.hops, default=0)} at most",
        ),
    ]
    if late is not None:
        rows.insert(
            2,
            ("lateness", f"p50 {late.p50:.1f} ms, p90 {late.p90:.1f} ms, p99 {late.p99:.1f} ms, max {late.max:.1f} ms"),
        )
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(f"  {name}", text)
    parts += [Text(), table]
    if report is not None:
        parts += [Text(), _report(report)]
    elif no_report:
        parts += [Text(), Text(f"  no report: {visible(no_report)}", style="yellow", no_wrap=True, overflow="ignore")]
    verdict = (
        Text("  all well: nothing lost, nothing early", style="bold green")
        if not figures.problems
        else Text(f"  not well: {', '.join(figures.problems)}", style="bold red")
    )
    return Group(*parts, Text(), verdict)


def _report(report: DemoReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    lines = [visible(one) for one in (report.summary, report.failed) if one]
    table.add_row("  audit    ", Text("\n".join(lines)))
    # Not in a table cell, which would cut or wrap the paths.
    paths = visible(f"{report.page} and {report.picture}")
    return Group(table, Text(f"  report     {paths}", no_wrap=True, overflow="ignore"))
