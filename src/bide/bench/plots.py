"""Which charts are drawn of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bide.bench import lateness
from bide.bench.chart import Chart, Group
from bide.bench.quantities import QUANTITIES
from bide.bench.results import Results, Row

_AT = "1,500/s"


def plots(results: Results, measurement: str) -> Iterator[tuple[str, Chart]]:
    """The charts of one measurement, each with the name of its file."""
    rows = results.of(measurement)
    match measurement:
        case "publish":
            yield from _by_setting("publish", "Publish, messages/s", rows, "rate")
        case "consume":
            yield from _plain("consume", "Receive and acknowledge, messages/s", rows, ["rate"])
        case "lateness":
            chosen = _at_one_rate(rows)
            title = "Late, in ms (logarithmic)"
            yield from _plain("lateness", title, chosen, ["p50", "p99"], logarithmic=True)
            yield from _plain("broker-cpu", "Broker CPU, µs per message", chosen, ["broker_cpu"])
        case "sustained":
            yield from _plain("sustained", "Delayed messages that go through, messages/s", rows, ["rate"])
        case "burst":
            yield from _by_setting("burst", "A burst: seconds until the last is delivered", rows, "seconds")
        case _:
            return


def _at_one_rate(rows: Sequence[Row]) -> list[Row]:
    """Ours at the rate of the bars; of the others, each at the highest rate that it sustained, or at the lowest."""
    chosen: dict[str, Row] = {}
    for row in rows:
        sustained = row.spread("sustained")
        if row.case in (lateness.CELERY, lateness.DRAMATIQ):
            if sustained is not None and (sustained.median or row.case not in chosen):
                chosen[row.case] = row
        elif row.setting == _AT:
            chosen[row.case] = row
    return [chosen[case] for case in dict.fromkeys(row.case for row in rows) if case in chosen]


def _label(row: Row) -> str:
    sustained = row.spread("sustained")
    lagging = "not sustained" if sustained is not None and not sustained.median else ""
    return ", ".join(part for part in (row.case, row.setting, lagging) if part)


def _plain(
    name: str, title: str, rows: Sequence[Row], quantities: Sequence[str], *, logarithmic: bool = False
) -> Iterator[tuple[str, Chart]]:
    """A group for each row, a series for each quantity."""
    groups = [Group(_label(row), [row.spread(one) for one in quantities]) for row in rows if row.values]
    if groups:
        first = QUANTITIES[quantities[0]]
        series = [QUANTITIES[one].title.partition(",")[0] for one in quantities]
        yield name, Chart(title=title, series=series, groups=groups, digits=first.digits, logarithmic=logarithmic)


def _by_setting(name: str, title: str, rows: Sequence[Row], quantity: str) -> Iterator[tuple[str, Chart]]:
    """A group for each case, a series for each setting."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    by_place = {(row.case, row.setting): row.spread(quantity) for row in rows}
    groups = [
        Group(case, [by_place.get((case, setting)) for setting in settings])
        for case in dict.fromkeys(row.case for row in rows if row.values)
    ]
    if groups:
        yield name, Chart(title=title, series=settings, groups=groups, digits=QUANTITIES[quantity].digits)
