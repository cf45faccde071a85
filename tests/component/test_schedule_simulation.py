"""Gates and clients in virtual time, killed and cut off at random, do what the log says."""

from __future__ import annotations

import logging

import pytest

from tests.schedule_simulation.directed import DIRECTED
from tests.schedule_simulation.faults import FAULTS
from tests.schedule_simulation.simulation import Simulation, run

SEEDS = {
    "before-due": 1,
    "blocking": 2,
    "claim-by-key": 1,
    "claim-by-version": 41,
    "claim-paused": 9,
    "drop-fifth": 1,
    "filter-ignores-due": 5,
    "forged": 2,
    "forget-undone": 1,
    "late-claim": 1,
    "message-by-key": 1,
    "no-read-back": 1,
    "own-calendar": 2,
    "repeats": 1,
    "repeats-answered-anew": 1,
    "repeats-by-maximum": 4,
    "repeats-forgotten": 4,
    "second-claim": 9,
    "stray-keys": 1,
    "ticks-race": 18,
    "wall-clock": 19,
}
"""A history that shows each fault. Any change of the gate or the simulation plays other histories under these seeds,
so the tests go on to the next ones."""

SEEDS_OF_SMALL_LOGS = {"no-room": 4, "sessions-not-carried": 43, "trim-early": 26}
"""The same for faults that only show when retention takes the beginning of the log."""

NEXT_SEEDS = 50

QUICK = ("before-due", "drop-fifth", "no-read-back")

QUICK_DIRECTED = ("occurrence-by-key",)

SMALL_LOGS = (0, 347)
"""Histories in which retention takes the beginning of the log, and gates begin with snapshots. In the first one, it
overtakes a gate that builds its index anew."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class SmallLog(Simulation):
    """A history with a small log."""

    small_logs = 1.0


def check_fault(fault: str, first: int, kind: type[Simulation] = Simulation) -> None:
    showing = (seed for seed in range(first, first + NEXT_SEEDS) if run(seed, fault=fault, kind=kind).problems)
    seed = next(showing, None)
    assert seed is not None, FAULTS[fault]
    assert run(seed, kind=kind).problems == []


@pytest.mark.parametrize("seed", [2, pytest.param(7, marks=pytest.mark.long)])
def test_a_history_is_judged_right(seed: int) -> None:
    result = run(seed)
    assert result.problems == []
    assert result.received > 0


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_found(fault: str) -> None:
    check_fault(fault, SEEDS[fault])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", sorted(SEEDS.keys() - set(QUICK)))
def test_another_planted_fault_is_found(fault: str) -> None:
    check_fault(fault, SEEDS[fault])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", SEEDS_OF_SMALL_LOGS)
def test_a_planted_fault_is_found_in_a_small_log(fault: str) -> None:
    check_fault(fault, SEEDS_OF_SMALL_LOGS[fault], SmallLog)


def check_directed(fault: str) -> None:
    assert run(1, kind=DIRECTED[fault]).problems == []
    assert run(1, fault=fault, kind=DIRECTED[fault]).problems, FAULTS[fault]


@pytest.mark.parametrize("fault", QUICK_DIRECTED)
def test_a_planted_fault_is_found_in_its_own_history(fault: str) -> None:
    check_directed(fault)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", sorted(DIRECTED.keys() - set(QUICK_DIRECTED)))
def test_another_planted_fault_is_found_in_its_own_history(fault: str) -> None:
    check_directed(fault)


def test_a_history_is_known_for_each_planted_fault() -> None:
    assert sorted([*SEEDS, *SEEDS_OF_SMALL_LOGS, *DIRECTED]) == sorted(FAULTS)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_seed_is_one_history() -> None:
    assert run(7).digest == run(7).digest


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SMALL_LOGS)
def test_retention_takes_nothing_that_is_needed(seed: int) -> None:
    assert run(seed).problems == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_histories_are_judged_right() -> None:
    results = [run(seed) for seed in range(20_000, 20_020)]
    assert [line for one in results for line in one.problems] == []
    assert sum(one.starts for one in results) > 60
