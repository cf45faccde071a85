"""The command line of the benchmark: ``python -m benchmarks``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from bide.cli.output import print_json
from bide.cli.running import ended_by_signals
from bide.cli.settings import json_option, verbose_option

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.suite.results import Row

_WIDTH: Final = 240


@click.command()
@click.argument("measurements", nargs=-1, metavar="[MEASUREMENT]...")
@click.option(
    "--scale", default=1.0, show_default=True, metavar="PART", help="Part or multiple (up to 10) of the full size."
)
@click.option("--rounds", default=3, show_default=True, metavar="N", help="Measure every case so often, in turns.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Of the cases, only such as 'bide*' or '200 B'.")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Run the RabbitMQ of the system in this folder (Linux, as root).",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the results in this folder, as <date>-<release>.json, beside other measurements of that day.",
)
@click.option(
    "--from",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure nothing: show the results that were kept in this file. More than one for --page.",
)
@click.option(
    "--page",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the results into this folder as a page with plots.",
)
@json_option("the results")
@verbose_option
def bench(
    *,
    measurements: tuple[str, ...],
    scale: float,
    rounds: int,
    only: tuple[str, ...],
    root: Path | None,
    keep: Path | None,
    files: tuple[Path, ...],
    page: Path | None,
    as_json: bool,
) -> int:
    """Measure bide, other clients, and the limits of the broker, in turns, on a private RabbitMQ.

    All measurements, or some: publish consume lateness sustained burst million store startup memory, and of schedules
    with keys: schedules cancel keyed takeover pending. Clients that are not installed are left out. At full size it
    takes hours, and the machine should have nothing else to do.

    Exits with 1 if something could not be measured.
    """
    from rich.console import Console

    from benchmarks.suite.catalogue import NAMES, chosen
    from benchmarks.suite.measurement import Plan
    from benchmarks.suite.page import write
    from benchmarks.suite.results import Results
    from benchmarks.suite.runner import run
    from benchmarks.suite.table import bars_table, tables

    if unknown := [name for name in measurements if name not in NAMES]:
        raise click.UsageError(f"no measurement is called {unknown[0]!r}: choose from {', '.join(NAMES)}")
    wanted, plan = chosen(measurements), Plan(scale=scale, rounds=rounds)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if files:
        _refuse_what_measures()
    shown = [Results.load(file) for file in files]
    for folder in filter(None, (keep, page)):
        _make(folder)
    if not files:
        with ended_by_signals():
            done = run(
                wanted,
                plan,
                root=root,
                only=only,
                listener=lambda row, note: _say(console, row, note),
                keeper=lambda results: results.keep(keep, partial=bool(only)) if keep is not None else None,
            )
        if keep is not None:
            console.print(f"kept in {done.keep(keep, partial=bool(only))}", markup=False)
        shown = [done]
    if page is not None:
        console.print(f"written to {write(page, shown, wanted)}", markup=False)
    if as_json:
        print_json(shown[0].to_dict() if len(shown) == 1 else [one.to_dict() for one in shown])
    else:
        output = Console(highlight=False)
        if not output.is_terminal:
            # Wide enough for every column.
            output = Console(highlight=False, width=_WIDTH)
        for one in shown:
            output.print(tables(one, wanted))
            output.print(bars_table(one))
    return 1 if any(one.failures for one in shown) else 0


def _refuse_what_measures() -> None:
    context = click.get_current_context()
    for name in ("scale", "rounds", "only", "root", "keep"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} is for measuring, and --from measures nothing: leave one of them out")


def _make(folder: Path) -> None:
    """Before hours are spent on what goes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"the folder {folder} cannot be made ({error.strerror}): name another") from error
    if not os.access(folder, os.W_OK):
        raise click.UsageError(f"the folder {folder} cannot be written to: name another")


def _say(console: Console, row: Row, note: str) -> None:
    name = " ".join(part for part in (row.measurement, row.setting, row.case) if part)
    console.print(f"{name}: {note}", markup=False)
