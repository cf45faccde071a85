"""``bide pipeline report``: write a page with plots and figures of an audit."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bide.cli.output import echo, print_json
from bide.cli.pipeline.options import engine_options, refuse_missing_audit_packages, refuse_without_spark
from bide.cli.pipeline.view import engine_facts, progress
from bide.cli.settings import Settings, duration_of, json_option, pass_settings
from bide.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bide.cli.pipeline.engine_choice import EngineChoice
    from bide.pipelines.engine import Engine
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
@json_option("the figures of the headline")
@engine_options
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
    choice: EngineChoice,
) -> None:
    """Draw a report of the audit in DIR: scheduled and delivered messages, lateness, pending messages, and failures.

    The page is a single file without external resources, which you can send or publish as it is. The page names the
    tables that are missing in DIR. Tables up to 100 MB are counted in this process, larger ones with Spark.
    """
    from bide.pipelines.report.writing import headline, write

    threshold = duration_of("--lost-after", lost_after)
    refuse_missing_audit_packages(choice)
    _check_paths(folder, out, svg)
    with progress("counting"):
        engine, figures = _count_in_process(folder, choice, threshold)
    if figures is None:
        refuse_without_spark(engine)
        with choice.open_session(f"bide pipeline report {folder}", engine, quiet=not settings.verbosity) as spark:
            figures = _count_with_spark(spark, folder, threshold)
    with progress("drawing"):
        write(figures, out=out, svg=svg, title=title)
    seconds = time.monotonic() - settings.started
    if as_json:
        written = {"report": str(out), "svg": svg and str(svg), "seconds": round(seconds, 3)}
        print_json(headline(figures) | written | engine_facts(engine))
    else:
        _print_figures(figures, out=out, svg=svg, seconds=seconds)
        echo(f"engine: {engine}")


def _count_in_process(folder: str, choice: EngineChoice, lost_after: timedelta) -> tuple[Engine, Figures | None]:
    """The engine of a report, and the figures if the engine is this process."""

    def work(largest: int | None) -> tuple[str, Figures]:
        from bide.pipelines.engine import NeedsSparkError

        if find_spec("duckdb") is None:
            raise NeedsSparkError("DuckDB is missing")
        from bide.pipelines.report.collecting import collect
        from bide.pipelines.report.duckdb_tables import small_tables

        with small_tables(folder, largest=largest) as tables:
            return tables.size, collect(tables, lost_after=lost_after)

    return choice.in_process(work)


def _count_with_spark(spark: SparkSession, folder: str, lost_after: timedelta) -> Figures:
    from bide.pipelines.report.collecting import collect
    from bide.pipelines.report.spark_tables import spark_tables
    from bide.pipelines.session import spark_errors

    with spark_errors(), progress("counting"), spark_tables(spark, folder) as tables:
        return collect(tables, lost_after=lost_after)


def _check_paths(folder: str, out: Path, svg: Path | None) -> None:
    """Check the folder and the files before Spark starts.

    Raises:
        InvalidInputError: the folder does not exist or has no audit, a file cannot be written, or the name of the
            picture does not end in .svg.
    """
    from bide.pipelines.report.tables import check_folder

    for path in (out, svg):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            parent = path.absolute().parent
            raise InvalidInputError(
                f"{path} cannot be written: create the folder {parent}, or name a folder that you may write to"
            )
    if svg is not None and svg.suffix.lower() != ".svg":
        raise InvalidInputError(f"the picture is an SVG, but its name {svg} does not end in .svg: name it *.svg")
    check_folder(folder)


def _print_figures(figures: Figures, *, out: Path, svg: Path | None, seconds: float) -> None:
    from bide.pipelines.report import schedule_sections
    from bide.pipelines.report.content import failed, summary, undecodable

    echo(summary(figures))
    for line in (schedule_sections.summary(figures), failed(figures), undecodable(figures)):
        if line:
            echo(line)
    if figures.missing:
        echo(f"tables without rows: {', '.join(figures.missing)}")
    echo(f"report: {out}{f' and {svg}' if svg is not None else ''}; written in {seconds:.1f} s")
