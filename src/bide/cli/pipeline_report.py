"""``bide pipeline report``: a page with plots of what the audit found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from bide.cli.output import on_one_line, print_json
from bide.cli.pipeline import spark_options
from bide.cli.pipeline_view import progress
from bide.cli.settings import Settings, json_option, pass_settings
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.pipelines.report.figures import Figures


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("report.html"), show_default=True,
              metavar="FILE", help="The page.")  # fmt: skip
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The same plots as a picture too; needs bide[report].")  # fmt: skip
@click.option("--title", default="Delayed delivery", show_default=True, metavar="TEXT", help="Its heading.")
@click.option("--lost-after", default="10m", show_default=True, metavar="DURATION",
              help="How long a message is overdue before it counts as lost.")  # fmt: skip
@spark_options
@json_option("the figures of the headline")
@pass_settings
def report(
    settings: Settings,
    /,
    *,
    folder: str,
    out: Path,
    png: Path | None,
    title: str,
    lost_after: str,
    as_json: bool,
    open_session: Callable[..., Any],
    is_here: bool,
) -> None:
    """Draw what the audit wrote into DIR: messages that came and went, how late, what waits, and what failed.

    The page is one file that fetches nothing: send it on, or put it anywhere. Tables that are not in DIR are named in
    it. All tables are read and counted by Spark; what comes back is small, however many messages there were.
    """
    from bide.duration import parse_delay
    from bide.pipelines.session import spark_errors

    grace = parse_delay(lost_after)
    _check(out, png)
    started = time.monotonic()
    with open_session(f"bide pipeline report {folder}", quiet=not settings.verbosity) as spark, spark_errors():
        from bide.pipelines.report.collecting import collect

        with progress("counting"):
            figures = collect(spark, folder, grace=grace)
    with progress("drawing"):
        _write(figures, out=out, png=png, title=title)
    seconds = time.monotonic() - started
    if as_json:
        print_json(_summary(figures) | {"report": str(out), "png": png and str(png), "seconds": round(seconds, 3)})
    else:
        _say(figures, out=out, png=png)


def _check(out: Path, png: Path | None) -> None:
    """Refuse before Spark has worked for nothing.

    Raises:
        InvalidInputError: a file cannot be written, or Pillow is not there.
    """
    for path in (out, png):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            where = path.absolute().parent
            raise InvalidInputError(f"{path} cannot be written: make the folder {where}, or name one that is yours")
    if png is not None:
        try:
            import bide.pipelines.report.png  # noqa: F401 (whether it can be)
        except ImportError as error:
            raise InvalidInputError("--png needs Pillow: install bide[report]") from error


def _write(figures: Figures, *, out: Path, png: Path | None, title: str) -> None:
    from bide.pipelines.report.page import page

    with _replacing(out) as beside:
        beside.write_text(page(figures, title=title), encoding="utf-8")
    if png is not None:
        from bide.pipelines.report import picture
        from bide.pipelines.report.png import write

        with _replacing(png) as beside:
            write(list(picture.drawings(figures, title=title)), beside)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of another: whoever reads that meanwhile sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _say(figures: Figures, *, out: Path, png: Path | None) -> None:
    from bide.pipelines.report.content import summary
    from bide.pipelines.report.texts import counted

    click.echo(on_one_line(summary(figures)))
    if figures.failures is not None and figures.failures.total:
        found = figures.failures
        groups = counted(len(found.groups) + found.others, "group")
        click.echo(f"{counted(found.total, 'attempt')} failed, in {groups}")
    if figures.missing:
        click.echo(f"not in {figures.folder}: {', '.join(figures.missing)}")
    click.echo(f"report: {out}" + (f" and {png}" if png is not None else ""))


def _summary(figures: Figures) -> dict[str, Any]:
    found: dict[str, Any] = {"folder": figures.folder, "missing": list(figures.missing)}
    if (head := figures.headline) is not None:
        found |= {
            "since": head.since and head.since.isoformat(),
            "until": head.until and head.until.isoformat(),
            **{name: getattr(head, name) for name in ("scheduled", "delivered", "pending", "overdue", "lost", "early")},
            **{f"{name}_ms": getattr(head, name) for name in ("p50", "p95", "p99", "max")},
        }
    if figures.failures is not None:
        found["failures"] = figures.failures.total
        found["failure_groups"] = len(figures.failures.groups) + figures.failures.others
    return found
