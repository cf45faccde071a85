"""The due times of a partition in memory, compared with a sorted list."""

from __future__ import annotations

import random
from bisect import insort

import pytest

from bide.schedules.due_times import DueTimes
from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import TimeGrid

TARGETS = ("q:few", "q:many", "q:more")


def check(times: DueTimes, expected: list[tuple[int, str]], rng: random.Random, latest: int) -> None:
    """Compare counts of random spans and intervals."""
    assert len(times) == len(expected)
    target = rng.choice([None, None, *TARGETS, "q:none"])
    first, before = (rng.choice([None, rng.randrange(latest)]) for _ in range(2))
    wanted = ScheduleFilter(target=target, due_from=first, due_before=before)
    grid = TimeGrid(start=rng.randrange(latest), width=rng.choice([1, 7, latest // 9]), number=rng.randint(1, 120))
    matching = [(due, name) for due, name in expected if wanted.matches("k", name, due)]
    cells: dict[tuple[str, int], list[int]] = {}
    for due, name in matching:
        cells.setdefault((name, min(max((due - grid.start) // grid.width, -1), grid.number)), []).append(due)
    counted = list(times.timeline(wanted, grid))
    assert len({(one.target, one.interval) for one in counted}) == len(counted)
    assert {(one.target, one.interval): (one.count, one.first, one.last) for one in counted} == {
        cell: (len(dues), dues[0], dues[-1]) for cell, dues in cells.items()
    }
    span = [(one.count, one.first, one.last) for one in times.span(wanted)]
    assert span == ([(len(matching), matching[0][0], matching[-1][0])] if matching else [])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latest", [90, 100_000])
def test_counts_are_exact_while_schedules_come_and_go(seed: int, latest: int) -> None:
    """More schedules than parts hold, so that parts are split and vanish, and many due at the same time."""
    rng = random.Random(seed)

    def some() -> tuple[int, str]:
        return rng.randrange(latest), rng.choices(TARGETS, (1, 500, 500))[0]

    expected = sorted(some() for _ in range(rng.choice([0, 3_000])))
    times = DueTimes((target, due) for due, target in expected)
    for growing in (True, False, True, False):
        for number in range(3_000):
            if expected and (not growing or rng.random() < 0.2):
                # Deliveries come in the order of due times, cancellations in any.
                due, target = expected.pop(0 if rng.random() < 0.7 else rng.randrange(len(expected)))
                times.remove(target, due)
            else:
                due, target = some()
                insort(expected, (due, target))
                times.add(target, due)
            if number % 150 == 0:
                check(times, expected, rng, latest)
    while expected:
        due, target = expected.pop()
        times.remove(target, due)
    check(times, [], rng, latest)
