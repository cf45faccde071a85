"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.suite.measurement import Measurement
from benchmarks.suite.quantities import QUANTITIES, Quantity
from benchmarks.suite.results import Results, Row, Spread
from benchmarks.suite.targets import verdicts


def columns(rows: Iterable[Row]) -> list[Quantity]:
    """The quantities that were measured in these rows."""
    measured = {name for row in rows for name in row.values}
    return [one for name, one in QUANTITIES.items() if name in measured]


def cell(quantity: Quantity, spread: Spread | None) -> str:
    """The median, with the limits where they differ from it."""
    if spread is None:
        return ""
    median, low, high = (quantity.shown(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low}–{high})"


def bars_table(results: Results) -> RenderableType:
    """What was to be reached, and whether it was."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("limit")
    table.add_column("reached", justify="right")
    table.add_column("")
    for one in verdicts(results):
        style = "green" if one.is_met else "red"
        table.add_row(one.bar.title, one.bar.wanted, one.reached, Text(one.word, style=style))
    return Group(Text("\nWhat is to be reached", style="bold"), table)


def tables(results: Results, measurements: Iterable[Measurement]) -> RenderableType:
    """One table per measurement."""
    return Group(*_parts(results, measurements))


def _parts(results: Results, measurements: Iterable[Measurement]) -> Iterator[RenderableType]:
    for measurement in measurements:
        rows = results.of(measurement.name)
        if rows:
            yield Text(f"\n{measurement.title}", style="bold")
            yield _table(rows)
            yield from (Text(f"{_label(row)}: {note}", style="dim") for row in rows for note in row.notes)


def _label(row: Row) -> str:
    return " ".join(part for part in (row.setting, row.case) if part)


def _table(rows: list[Row]) -> Table:
    quantities = columns(rows)
    settings = any(row.setting for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if settings:
        table.add_column("")
    table.add_column("")
    for quantity in quantities:
        table.add_column(quantity.title, justify="right")
    for row in rows:
        cells = [row.setting] if settings else []
        table.add_row(*cells, row.case, *(cell(one, row.spread(one.name)) for one in quantities))
    return table
