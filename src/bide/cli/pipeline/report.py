"""``bide pipeline report``: a page with plots of what the audit found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bide.cli.output import print_json
from bide.cli.pipeline.group import spark_options
from bide.cli.pipeline.view import progress
from bide.cli.settings import Settings, duration_of, json_option, pass_settings
from bide.errors import InvalidInputError
from bide.foreign_text import visible

if TYPE_CHECKING:
    from bide.pipelines.report.figures import Figures


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("report.html"), show_default=True,
              metavar="FILE", help="The page.")  # fmt: skip
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the plots as a picture too, in SVG.")  # fmt: skip
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
    svg: Path | None,
    title: str,
    lost_after: str,
    as_json: bool,
    open_session: Callable[..., Any],
    is_here: bool,
    reads_here: bool,
) -> None:
    """Draw what the audit wrote into DIR: messages that came and went, how late, what waits, and what failed.

    The page is one file that fetches nothing: send it on, or put it anywhere. Tables that are not in DIR are named in
    it. All tables are read and counted by Spark; what comes back is small, however many messages there were.
    """
    from bide.pipelines.report.writing import headline, write
    from bide.pipelines.session import spark_errors

    grace = duration_of("--lost-after", lost_after)
    _check(folder, out, svg)
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
        _say(figures, out=out, svg=svg)


def _check(folder: str, out: Path, svg: Path | None) -> None:
    """Refuse before Spark has worked for nothing.

    Raises:
        InvalidInputError: there is no such folder, or no audit in it, a file cannot be written, or the picture's name
            is not that of an SVG.
    """
    from bide.pipelines.report.tables import check

    for path in (out, svg):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            where = path.absolute().parent
            raise InvalidInputError(f"{path} cannot be written: make the folder {where}, or name one that is yours")
    if svg is not None and svg.suffix.lower() != ".svg":
        raise InvalidInputError(f"the picture is an SVG, and {svg} is named as something else: name it *.svg")
    check(folder)


def _say(figures: Figures, *, out: Path, svg: Path | None) -> None:
    from bide.pipelines.report.content import failed, summary, undecodable

    click.echo(visible(summary(figures)))
    if said := failed(figures):
        click.echo(said)
    if said := undecodable(figures):
        click.echo(said)
    if figures.missing:
        click.echo(f"not in {figures.folder}: {', '.join(figures.missing)}")
    click.echo(f"report: {out}" + (f" and {svg}" if svg is not None else ""))
