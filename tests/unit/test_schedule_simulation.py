"""Gates and clients in virtual time, killed and cut off at random, do what the log says."""

from __future__ import annotations

import logging

import pytest

from tests.schedule_simulation.faults import FAULTS
from tests.schedule_simulation.simulation import run

SEEDS = {
    "claim-by-key": 1,
    "claim-paused": 4,
    "drop-fifth": 2,
    "forget-undone": 3,
    "forged": 2,
    "late-claim": 2,
    "message-by-key": 3,
    "no-read-back": 1,
    "repeats": 3,
    "repeats-answered-anew": 3,
    "second-claim": 9,
    "wall-clock": 8,
}
"""A history that shows each fault. After a change of the simulation another seed may be the first: try them in turn."""

QUICK = ("drop-fifth", "message-by-key", "no-read-back")

SMALL_LOG = 25
"""A history in which retention takes the beginning of the log, and gates begin with snapshots."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def check_fault(fault: str) -> None:
    assert run(SEEDS[fault]).problems == []
    assert run(SEEDS[fault], fault=fault).problems, FAULTS[fault]


@pytest.mark.parametrize("seed", [2, 7])
def test_a_history_is_judged_right(seed: int) -> None:
    result = run(seed)
    assert result.problems == []
    assert result.received > 0


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_found(fault: str) -> None:
    check_fault(fault)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", sorted(SEEDS.keys() - set(QUICK)))
def test_another_planted_fault_is_found(fault: str) -> None:
    check_fault(fault)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_seed_is_one_history() -> None:
    assert run(7).digest == run(7).digest


@pytest.mark.long
@pytest.mark.timeout(600)
def test_retention_takes_nothing_that_is_needed() -> None:
    assert run(SMALL_LOG).problems == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_histories_are_judged_right() -> None:
    results = [run(seed) for seed in range(20_000, 20_020)]
    assert [line for one in results for line in one.problems] == []
    assert sum(one.starts for one in results) > 60
