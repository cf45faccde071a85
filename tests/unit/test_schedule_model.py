"""Random histories of the schedule log are judged right, and planted faults are found."""

from __future__ import annotations

import pytest

from tests.schedule_model.faults import FAULTS
from tests.schedule_model.simulation import run

RARE = frozenset({"snapshot-gap", "begin-anew", "index-unchecked", "no-count", "repeats-by-maximum", "beats-unread"})
"""Faults that take up to hundreds of histories to show: a minute of processor time each at most."""


FIRST = {"beats-unread": 20_100}
"""First seeds for faults that take thousands of histories to show."""


def first_found(fault: str, histories: int) -> list[str]:
    first = FIRST.get(fault, 0)
    for seed in range(first, first + histories):
        if lines := run(seed, fault):
            return lines
    return []


@pytest.mark.parametrize("part", range(4))
def test_no_history_is_judged_wrong(part: int) -> None:
    for seed in range(part * 1000, part * 1000 + 15):
        assert run(seed) == []


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - RARE))
def test_a_planted_fault_is_found(fault: str) -> None:
    assert first_found(fault, 60), FAULTS[fault]


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted(RARE & set(FAULTS)))
def test_a_rare_planted_fault_is_found(fault: str) -> None:
    assert first_found(fault, 3000), FAULTS[fault]


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_histories_are_judged_right(part: int) -> None:
    for seed in range(10_000 + part * 1250, 10_000 + (part + 1) * 1250):
        assert run(seed) == []
