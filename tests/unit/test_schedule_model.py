"""Random histories of the schedule log are judged right, and planted faults are found."""

from __future__ import annotations

import pytest

from tests.schedule_model.faults import FAULTS
from tests.schedule_model.simulation import run

SEEDS = {
    **dict.fromkeys(("begin-anew", "no-count", "snapshot-gap"), 845),
    "beats-awaited": 30_299,
    "beats-unread": 20_152,
    "claim-paused": 41,
    "greedy-gate": 14,
    "index-unchecked": 713,
    "no-room": 7,
    "not-current": 26,
    "occurrence-by-key": 7,
    "own-calendar": 23,
    "partial-snapshot": 14,
    "repeats-by-maximum": 56,
    "stale-carry": 20,
    "ticks-race": 43,
    "trim-early": 21,
}
"""Seeds of short histories that show faults, so that the search is short. After a change of the model another seed may
be the first. The long test finds the rare ones without."""

RARE = frozenset(
    {
        *("beats-awaited", "beats-unread", "begin-anew", "index-unchecked", "no-count", "repeats-by-maximum"),
        "snapshot-gap",
    }
)
"""Faults that take up to hundreds of histories to show, and one that takes thousands."""


def first_found(fault: str, first: int, histories: int) -> int | None:
    return next((seed for seed in range(first, first + histories) if run(seed, fault)), None)


def test_no_history_is_judged_wrong() -> None:
    for seed in range(1000, 1008):
        assert run(seed) == []


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_found(fault: str) -> None:
    assert first_found(fault, SEEDS.get(fault, 0), 20) is not None, FAULTS[fault]


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted(RARE))
def test_a_rare_planted_fault_is_found_without_a_known_seed(fault: str) -> None:
    first = {"beats-awaited": 30_000, "beats-unread": 20_000}.get(fault, 0)
    assert first_found(fault, first, 3000) is not None, FAULTS[fault]


@pytest.mark.long
def test_a_thousand_histories_are_judged_right() -> None:
    for seed in range(10_000, 11_000):
        assert run(seed) == []
