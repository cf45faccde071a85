"""The charts of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.suite import lateness
from benchmarks.suite.chart import Chart, Group
from benchmarks.suite.quantities import QUANTITIES
from benchmarks.suite.results import Results, Row

_AT: Final = "1,500/s"
_RIVALS: Final = (lateness.CELERY, lateness.DRAMATIQ)


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
            heading, note = "Late, in ms (logarithmic)", highest_rates(rows)
            yield from _plain("lateness", heading, chosen, ["p50", "p99"], note=note, logarithmic=True)
            yield from _plain("broker-cpu", "Broker CPU, µs per message", chosen, ["broker_cpu"])
        case "sustained":
            yield from _plain("sustained", "Delayed messages that go through, messages/s", rows, ["rate"])
        case "burst":
            yield from _by_setting("burst", "A burst: seconds until the last is delivered", rows, "seconds")
        case "million":
            yield from _by_setting("million", "A million at once: seconds until the last is delivered", rows, "seconds")
        case "schedules":
            yield from _by_setting("schedules", "Messages with a key and without, messages/s", rows, "rate")
        case "keyed":
            yield from _by_setting("keyed", "Late with a key and without: p99, in ms", rows, "p99")
        case _:
            return


def highest_rates(rows: Sequence[Row]) -> str:
    """A sentence: up to which rate each of the others keeps up, and bide with the layout that does so least."""
    rates: dict[str, int] = {}
    for row in rows:
        if row.spread("sustained") is not None and row.setting in lateness.RATES:
            rates[row.case] = max(rates.get(row.case, 0), lateness.RATES[row.setting] if _keeps_up(row) else 0)
    sustained = [f"{case} sustains {_shown(rates[case])}" for case in _RIVALS if case in rates]
    if not sustained:
        return ""
    if ours := [rate for case, rate in rates.items() if case not in _RIVALS]:
        sustained.append(f"bide {_shown(min(ours))} with every layout")
    return f"Of the rates tried, {', '.join(sustained)}."


def _shown(rate: int) -> str:
    return f"{rate:,}/s" if rate else "none"


def _keeps_up(row: Row) -> bool:
    """Whether a rate was sustained, in half of the rounds at least."""
    sustained = row.spread("sustained")
    return sustained is not None and sustained.median > 0


def _at_one_rate(rows: Sequence[Row]) -> list[Row]:
    """Ours at the rate of the bars; of the others, each at the highest rate that it sustained, or at the lowest."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row.case in _RIVALS:
            if row.spread("sustained") is not None and (_keeps_up(row) or row.case not in chosen):
                chosen[row.case] = row
        elif row.setting == _AT:
            chosen[row.case] = row
    return [chosen[case] for case in dict.fromkeys(row.case for row in rows) if case in chosen]


def _label(row: Row) -> str:
    lagging = "not sustained" if row.spread("sustained") is not None and not _keeps_up(row) else ""
    return ", ".join(part for part in (row.case, row.setting, lagging) if part)


def _plain(
    name: str,
    heading: str,
    rows: Sequence[Row],
    quantities: Sequence[str],
    *,
    note: str = "",
    logarithmic: bool = False,
) -> Iterator[tuple[str, Chart]]:
    """A group for each row, a series for each quantity."""
    groups = [Group(_label(row), [row.spread(one) for one in quantities]) for row in rows if row.values]
    if _can_be_drawn(groups):
        first = QUANTITIES[quantities[0]]
        series = [QUANTITIES[one].title.partition(",")[0] for one in quantities]
        yield (
            name,
            Chart(
                heading=heading,
                note=note,
                series=series,
                groups=groups,
                digits=first.digits,
                logarithmic=logarithmic,
            ),
        )


def _by_setting(name: str, heading: str, rows: Sequence[Row], quantity: str) -> Iterator[tuple[str, Chart]]:
    """A group for each case, a series for each setting."""
    settings = list(dict.fromkeys(row.setting for row in rows))
    by_place = {(row.case, row.setting): row.spread(quantity) for row in rows}
    groups = [
        Group(case, [by_place.get((case, setting)) for setting in settings])
        for case in dict.fromkeys(row.case for row in rows if row.values)
    ]
    if _can_be_drawn(groups):
        yield name, Chart(heading=heading, series=settings, groups=groups, digits=QUANTITIES[quantity].digits)


def _can_be_drawn(groups: Sequence[Group]) -> bool:
    return any(spread is not None and spread.high > 0 for group in groups for spread in group.spreads)
