"""The tables of the pipeline's benchmark as Markdown, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from benchmarks.pipeline.figures import BEFORE, LIMIT, NOW, Entry, Figures

RATES: Final = ("source", "sink")
"""Parts that are compared by rows per second; the others are whole commands, from start to exit."""

LEGENDS: Final = {
    "source": "rows/s (µs of processor time for each row); messages of 200 bytes, read into a sink that writes nothing",
    "sink": "rows/s (µs of processor time for each row); bodies of 200 bytes from Parquet, delays of 10 to 59 minutes",
    "schedule": "time from start to exit (processor time)",
    "audit": "time from start to exit (processor time)",
    "plan": "time from start to exit (processor time)",
}


def about(facts: Mapping[str, Any]) -> str:
    """What the figures were measured with."""
    machine, releases = facts["machine"], facts["releases"]
    with_releases = ", ".join(f"{name} {release}" for name, release in releases.items())
    before = f", before: {facts['before']}" if facts.get("before") else ""
    return (
        f"Measured on {facts['date'][:10]} on {machine['cores']} cores ({machine['processor']}) with {with_releases}. "
        f"Load average {facts['load_average'][0]:g} at the beginning and {facts['load_average'][1]:g} at the end. "
        f"bide at commit {facts['source']}{before}. Medians of {facts['rounds']} rounds, in which the sides take turns."
    )


def table(figures: Figures, part: str) -> str:
    """The table of one part: its cases on each side, and their limits below."""
    has_before = bool(figures.of(part, BEFORE))
    titles = [part, NOW, *([BEFORE, "speed, before = 1"] if has_before else []), "speed, limit = 1"]
    rows: list[list[str]] = []
    for entry in figures.of(part, NOW):
        speeds = figures.speeds(entry)
        cells = [entry.name, _times(entry)]
        if has_before:
            other = figures.find(part, entry.name, BEFORE)
            cells += ["" if other is None else _times(other), _speed(speeds.get(BEFORE))]
        limits = [f"{_speed(speeds[name])} of *{name}*" for name in entry.limits if name in speeds]
        rows.append([*cells, "; ".join(limits)])
    rows += [[f"*{one.name}*", _times(one), *[""] * (len(titles) - 2)] for one in figures.of(part, LIMIT)]
    lines = [f"| {' | '.join(row)} |" for row in (titles, *rows)]
    lines.insert(1, f"|{'---|' * len(titles)}")
    return "\n".join([f"{LEGENDS[part]}:\n", *lines, ""])


def tables(facts: Mapping[str, Any], figures: Figures, parts: Container[str] | None = None) -> str:
    """The tables of these parts, or of all, with what they were measured with."""
    wanted = [part for part in figures.parts() if parts is None or part in parts]
    return "\n".join([f"{about(facts)}\n", *(table(figures, part) for part in wanted)])


def _times(entry: Entry) -> str:
    if not entry.runs:
        return "not there" if entry.missing else ""
    seconds, used = entry.median("seconds"), entry.median("processor_seconds")
    if entry.part in RATES and entry.rows > 1:
        return f"{_significant(entry.rows / seconds)}/s ({_significant(used / entry.rows * 1e6)} µs)"
    return f"{_significant(seconds)} s ({_significant(used)} s)"


def _speed(speed: Mapping[str, float] | None) -> str:
    return "" if speed is None else f"{_significant(speed['seconds'])} ({_significant(speed['processor_seconds'])})"


def _significant(number: float) -> str:
    """Three digits, or all of a larger whole number's thousands."""
    if number >= 100:
        digits = max(len(str(int(number))) - 3, 0)
        return f"{round(number, -digits):,.0f}"
    return f"{number:.{1 if number >= 10 else 2}f}"
