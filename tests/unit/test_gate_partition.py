"""The gate of one partition, beside its work on a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bide.gate.observer import GateObservers
from bide.gate.partition import Gated, PartitionGate
from bide.gate.spread import GateTime
from bide.schedules.names import ScheduleNames


@pytest.fixture
async def partition(tmp_path: Path) -> AsyncIterator[PartitionGate]:
    gate = PartitionGate(
        0,
        gate="g",
        names=ScheduleNames(),
        folder=tmp_path,
        retention=1_000_000,
        time=GateTime("g"),
        counts=Gated(),
        observers=GateObservers(()),
        now=0.0,
        executor=None,
    )
    yield gate
    await gate.index.close()


async def test_an_index_that_is_built_anew_again_and_again_is_built_less_often(partition: PartitionGate) -> None:
    assert [partition.rebuild_pause(10.0) for _ in range(10)] == [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert partition.rebuild_pause(10.0 + 601.0) == 0
