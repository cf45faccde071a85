"""Gates and clients in virtual time, killed and cut off at random, do what the log says."""

from __future__ import annotations

import logging

import pytest

from tests.schedule_simulation.faults import FAULTS
from tests.schedule_simulation.simulation import run

SEEDS = {
    "no-read-back": 1,
}
"""A seed that shows each fault."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_a_history_is_judged_right(seed: int) -> None:
    result = run(seed)
    assert result.problems == []
    assert result.received > 0


def test_a_seed_is_one_history() -> None:
    assert run(3).digest == run(3).digest


@pytest.mark.parametrize("fault", sorted(SEEDS))
def test_a_planted_fault_is_found(fault: str) -> None:
    assert run(SEEDS[fault], fault=fault).problems, FAULTS[fault]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_histories_are_judged_right() -> None:
    results = [run(seed) for seed in range(20_000, 20_060)]
    assert [line for one in results for line in one.problems] == []
    assert sum(one.starts for one in results) > 100
