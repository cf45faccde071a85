"""Messages that pass the levels of a layout, one by one, to compare plans with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from bide.delay.clock_digits import digits_of


@dataclass(frozen=True)
class Pulse:
    """``n`` messages in a queue: they enter evenly from ``enter`` on, for ``width``, and stay as long each."""

    level: str
    digit: int
    enter: float
    stay: float
    n: float
    size: float
    width: float = 0.0

    def entered(self, after: float, time: float) -> float:
        """How many have entered (or left, with ``after`` = the stay) before a time."""
        begun = time - self.enter - after
        if not self.width:
            return self.n * (begun > 0)
        return self.n * min(max(begun / self.width, 0.0), 1.0)

    def area(self, after: float, time: float) -> float:
        """The integral of the same."""
        begun = max(time - self.enter - after, 0.0)
        if not self.width:
            return self.n * begun
        over = max(begun - self.width, 0.0)
        return self.n / self.width * (begun * begun - over * over) / 2

    def held(self, start: float, end: float) -> float:
        """The mean from one time to another."""
        areas = [self.area(after, end) - self.area(after, start) for after in (0.0, self.stay)]
        return (areas[0] - areas[1]) / (end - start)


def simulated(layout: str, sent: int, delay: int) -> Iterator[tuple[str, int, int, int]]:
    """Level, digit, entry and exit of one message, from what defines the layouts."""
    at = sent
    if layout == "clock":
        for level, digit in digits_of(timedelta(milliseconds=-(-delay // 10) * 10)):
            wait = digit * level.unit // timedelta(milliseconds=1)
            if digit:
                yield level.letter, digit, at, at + wait
            at += wait
    else:
        for place, bit in enumerate(f"{-(-delay // 1000):028b}"):
            wait = int(bit) * 1000 << (27 - place)
            if wait:
                yield f"{27 - place:02}", 1, at, at + wait
            at += wait


def pulses(layout: str, messages: Iterable[tuple[float, int, float, float, float]]) -> list[Pulse]:
    return [
        Pulse(level, digit, enter, leave - enter, n, size, width)
        for sent, delay, n, size, width in messages
        for level, digit, enter, leave in simulated(layout, int(sent), delay)
    ]


def check_figures(
    levels: Iterable[Mapping[str, Any]],
    queues: Iterable[Mapping[str, Any]],
    *,
    every: timedelta,
    tick: timedelta,
    expected: list[Pulse],
) -> None:
    """Compare every figure of every level, queue and span. Times are in milliseconds since the Unix epoch."""
    _check(levels, queues, every // timedelta(milliseconds=1), tick // timedelta(milliseconds=1), expected)


def _check(
    levels: Iterable[Mapping[str, Any]],
    queues: Iterable[Mapping[str, Any]],
    every: int,
    tick: int,
    expected: list[Pulse],
) -> None:
    by_level: defaultdict[str, list[Pulse]] = defaultdict(list)
    by_queue: defaultdict[tuple[str, int], list[Pulse]] = defaultdict(list)
    for one in expected:
        by_level[one.level].append(one)
        by_level["all"].append(one)
        by_queue[one.level, one.digit].append(one)
    seen: defaultdict[str, float] = defaultdict(float)
    waited: defaultdict[str, float] = defaultdict(float)
    for row in levels:
        start = row["at"]
        here = _near(by_level[row["level"]], start, start + every)
        ticks = _ticks_of_change(here, start, start + every, tick)
        held = [sum(one.held(at, at + tick) for one in here) for at in ticks]
        load = [sum(one.held(at, at + tick) * one.size for one in here) for at in ticks]
        left = [_left(here, at, at + tick) for at in ticks]
        for name, value in {
            "held": sum(one.held(start, start + every) for one in here),
            "held_peak": max(held),
            "bytes": sum(one.held(start, start + every) * one.size for one in here),
            "bytes_peak": max(load),
            "hops": _left(here, start, start + every),
            "hops_peak": max(left) / tick * 1000,
        }.items():
            assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-4), (name, row)
        seen[row["level"]] += row["hops"]
        waited[row["level"]] += row["held"] * every
    assert waited == pytest.approx({level: sum(one.n * one.stay for one in here) for level, here in by_level.items()})
    assert seen == pytest.approx({level: sum(one.n for one in here) for level, here in by_level.items()}, abs=1e-3)
    for row in queues:
        start = row["at"]
        here = _near(by_queue[row["level"], row["digit"]], start, start + every)
        left = [_left(here, at, at + tick) for at in _ticks_of_change(here, start, start + every, tick)]
        assert row["released"] == pytest.approx(_left(here, start, start + every), rel=1e-6, abs=1e-4)
        assert row["peak"] == pytest.approx(max(left) / tick * 1000, rel=1e-6, abs=1e-4)
        at_peak = _left(here, row["peak_at"], row["peak_at"] + tick) / tick * 1000
        assert at_peak == pytest.approx(row["peak"], rel=1e-6, abs=1e-4)


def _near(pulses: list[Pulse], start: int, end: int) -> list[Pulse]:
    return [one for one in pulses if one.enter < end and start <= one.enter + one.stay + one.width]


def _left(pulses: list[Pulse], start: float, end: float) -> float:
    # A message that leaves at the very beginning of a span leaves in it.
    return sum(one.entered(one.stay, end - 1e-6) - one.entered(one.stay, start - 1e-6) for one in pulses)


def _ticks_of_change(pulses: list[Pulse], start: int, end: int, tick: int) -> list[int]:
    """The ticks of a span in which something happens, those beside them, and the first and the last."""
    times = {time + width for one in pulses for time in (one.enter, one.enter + one.stay) for width in (0, one.width)}
    near = {int(time // tick) * tick + beside for time in times for beside in (-tick, 0, tick)}
    return sorted({at for at in near if start <= at < end} | {start, end - tick})
