"""The documentation page of the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.suite.chart import Chart
from benchmarks.suite.measurement import Measurement
from benchmarks.suite.plots import plots
from benchmarks.suite.results import Results, Row, newest
from benchmarks.suite.table import cell, columns
from benchmarks.suite.targets import verdicts

PAGE: Final = "benchmarks.md"
PLOTS: Final = "benchmarks"

_INTRODUCTION: Final = """\
# How fast

`make bench` starts a private RabbitMQ and compares bide with other clients and with the limits of the broker. Each case
runs in its own process and virtual host, and the cases take turns (A B C, A B C).
`make bench BENCH="publish --scale 0.1"` measures one part in a tenth of the size; `make bench BENCH=--help` lists the
other options.

All figures are from one machine that runs both clients and broker, so compare figures within a table. A figure is the
median of all rounds, with the lowest and the highest in brackets. A ratio is that of two medians, with the lowest and
the highest ratio of single rounds in brackets. Each measurement is the newest run on that release of RabbitMQ.

Two figures show how quiet the machine was; each is the highest of all cases. *Cores in use before* counts the cores
that any processes used just before a case. *CPU steal* is the mean number of cores that the host withheld from this
virtual machine while a case ran. Since 2026-11-22, a case with CPU steal of more than a tenth of the machine is
measured again, up to twice, and the run with the least counts. An empty cell means that the run did not record the
figure. `make bench-docs` writes this page from the files in `benchmarks/results`.
"""


def write(folder: Path, results: Sequence[Results], measurements: Sequence[Measurement]) -> Path:
    """Write the page and its plots into a folder.

    Args:
        results: of any number of runs. The newest of each release of RabbitMQ is shown for each measurement; plots are
            drawn of the newest release that has it.

    Returns:
        The page.
    """
    page = folder / PAGE
    # All of it first: half a page is worse than none.
    written = {page: text(results, measurements)}
    shown = newest(results)
    for measurement in measurements:
        for name, chart in _plots(shown, measurement):
            written[folder / PLOTS / f"{name}.svg"] = chart.svg()
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    for file, content in written.items():
        file.write_text(content, encoding="utf-8")
    return page


def text(results: Sequence[Results], measurements: Sequence[Measurement]) -> str:
    """The page in Markdown."""
    return "\n".join(_lines(newest(results), measurements))


def _lines(results: Sequence[Results], measurements: Sequence[Measurement]) -> Iterator[str]:
    yield _INTRODUCTION
    for one in results:
        yield from _run(one)
    for measurement in measurements:
        shown = [one for one in results if one.of(measurement.name)]
        if not shown:
            continue
        yield f"## {measurement.title}\n"
        yield f"{measurement.about}\n"
        for name, chart in _plots(results, measurement):
            yield f"![{chart.title}]({PLOTS}/{name}.svg)\n"
        for one in shown:
            if len(results) > 1:
                yield f"{_name(one)}:\n"
            yield from _table(one.of(measurement.name))


def _plots(results: Sequence[Results], measurement: Measurement) -> Iterator[tuple[str, Chart]]:
    """Of the first that has numbers of the measurement."""
    for one in results:
        if any(row.values for row in one.of(measurement.name)):
            yield from plots(one, measurement.name)
            return


def _name(results: Results) -> str:
    size = f", {results.scale:g} times the messages" if results.scale > 1 else ""
    return f"RabbitMQ {results.releases['RabbitMQ']}, {results.date[:10]}{size}"


def _run(results: Results) -> Iterator[str]:
    yield f"## {_name(results)}\n"
    if results.scale < 1:
        yield f"**Preliminary: {results.scale:g} of the full size.** Good for a look, not for conclusions.\n"
    machine = results.machine
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, {machine['kernel']}, "
        f"{machine['python']}; " + ", ".join(f"{name} {release}" for name, release in results.releases.items()) + ".\n"
    )
    yield from _markdown(
        ["measured", "rounds", "begun", "bide at commit", "cores in use before", "CPU steal, cores"],
        [_origin(name, results.of(name)) for name in results.measurements()],
    )
    if found := verdicts(results):
        yield from _markdown(
            ["target", "limit", "measured", ""],
            [[one.bar.title, one.bar.wanted, one.reached, one.word] for one in found],
        )
        if not all(one.is_met for one in found):
            yield "[limits.md](limits.md) shows why some targets are not met.\n"


def _origin(name: str, rows: Sequence[Row]) -> list[str]:
    """When, of what, and on how quiet a machine a measurement was made."""
    counts = sorted({row.rounds for row in rows if row.rounds} or {0})
    runs = [run for row in rows for run in row.runs]
    return [
        name,
        str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}",
        f"{min(run.begun for run in runs)[:16].replace('T', ' ')} UTC" if runs else "",
        ", ".join(sorted({run.source for run in runs})),
        _most(run.busy for run in runs),
        _most(run.stolen for run in runs),
    ]


def _most(cores: Iterable[float | None]) -> str:
    known = [one for one in cores if one is not None]
    return f"{max(known):.2f}" if known else ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    quantities = columns(rows)
    settings = any(row.setting for row in rows)
    head = ["", ""] if settings else [""]
    yield from _markdown(
        [*head, *(one.title for one in quantities)],
        [
            [*([row.setting] if settings else []), row.case, *(cell(one, row.spread(one.name)) for one in quantities)]
            for row in rows
        ],
    )
    noted = [(row, note) for row in rows for note in row.notes]
    for row, note in noted:
        yield f"- {' '.join(part for part in (row.setting, row.case) if part)}: {note}"
    if noted:
        yield ""


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
