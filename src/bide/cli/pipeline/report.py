"""``bide pipeline report``: write a page with plots of an audit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.output import echo, print_json
from bide.cli.pipeline.options import spark_options
from bide.cli.pipeline.view import progress
from bide.cli.settings import Settings, duration_of, json_option, pass_settings
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from bide.pipelines.report.figures import Figures


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("report.html"), show_default=True,
              metavar="FILE", help="File of the HTML page.")  # fmt: skip
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="File for the plots as an SVG picture. [default: none]")  # fmt: skip
@click.option("--title", default="Delayed delivery", show_default=True, metavar="TEXT", help="Heading of the page.")
@click.option("--lost-after", default="10m", show_default=True, metavar="DURATION",
              help="Overdue time after which a message counts as lost.")  # fmt: skip
@spark_options
@json_option("the figures of the headline")
@pass_settings
def report(
    settings: Settings,
    /,
    *,
    folder: str,
    out: Path,
    svg: Path | None,
    title: str,
    lost_after: str,
    as_json: bool,
    open_session: Callable[..., Any],
    is_here: bool,
    reads_here: bool,
) -> None:
    """Draw a report of the audit in DIR: scheduled and delivered messages, lateness, pending messages, and failures.

    The page is a single file without external resources, which you can send or publish as it is. It names the tables
    that are missing in DIR. Spark reads and aggregates the tables, so the report works for any number of messages.
    """
    from bide.pipelines.report.writing import headline, write
    from bide.pipelines.session import spark_errors

    grace = duration_of("--lost-after", lost_after)
    _check_paths(folder, out, svg)
    started = time.monotonic()
    with open_session(f"bide pipeline report {folder}", quiet=not settings.verbosity) as spark, spark_errors():
        from bide.pipelines.report.collecting import collect

        with progress("counting"):
            figures = collect(spark, folder, grace=grace)
    with progress("drawing"):
        write(figures, out=out, svg=svg, title=title)
    seconds = time.monotonic() - started
    if as_json:
        print_json(headline(figures) | {"report": str(out), "svg": svg and str(svg), "seconds": round(seconds, 3)})
    else:
        _print_figures(figures, out=out, svg=svg)


def _check_paths(folder: str, out: Path, svg: Path | None) -> None:
    """Check the folder and the files before Spark starts.

    Raises:
        InvalidInputError: the folder does not exist or has no audit, a file cannot be written, or the name of the
            picture does not end in .svg.
    """
    from bide.pipelines.report.tables import check

    for path in (out, svg):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            parent = path.absolute().parent
            raise InvalidInputError(
                f"{path} cannot be written: create the folder {parent}, or name a folder that you may write to"
            )
    if svg is not None and svg.suffix.lower() != ".svg":
        raise InvalidInputError(f"the picture is an SVG, but its name {svg} does not end in .svg: name it *.svg")
    check(folder)


def _print_figures(figures: Figures, *, out: Path, svg: Path | None) -> None:
    from bide.pipelines.report import schedule_sections
    from bide.pipelines.report.content import failed, summary, undecodable

    echo(summary(figures))
    for line in (schedule_sections.summary(figures), failed(figures), undecodable(figures)):
        if line:
            echo(line)
    if figures.missing:
        echo(f"not in {figures.folder}: {', '.join(figures.missing)}")
    echo(f"report: {out}" + (f" and {svg}" if svg is not None else ""))
