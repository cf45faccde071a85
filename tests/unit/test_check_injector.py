"""The injector of ``bide check``: records of faults, and the wait for a whole cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bide.check.faults.broker import LEADERS
from bide.check.faults.clock import DRIFT, STEP
from bide.check.faults.fault import Cluster, Fault, FaultSite
from bide.check.faults.nodes import KILL
from bide.check.history import HistoryWriter, InjectedFault
from bide.check.injector import SETTLE_SECONDS, Injector
from bide.check.plan import CheckPlan, PlannedFault
from bide.check.reference_clock import ReferenceClock
from bide.check.repair import make_whole
from bide.errors import ManagementApiError
from tests.check_histories import SECOND


class Silent:
    """A node whose management API does not answer, and which must not be restarted."""

    @property
    def management(self) -> Silent:
        return self

    def call(self, *_: str) -> Any:
        raise ManagementApiError("no answer")


CLUSTER = cast(Cluster, SimpleNamespace(nodes=[Silent()]))


class Clock(ReferenceClock):
    """A clock that advances by 100 s at each reading."""

    def now(self) -> int:
        self.read = getattr(self, "read", 0) + 100 * SECOND
        return self.read


def site() -> FaultSite:
    return FaultSite(cluster=CLUSTER, vhost="/", rng=random.Random(1))


@contextmanager
def nothing(site: FaultSite, node: object) -> Iterator[str]:
    yield "a clock"


def inject(fault: Fault, site: FaultSite) -> InjectedFault:
    """Inject a fault and repair it at once; return its record."""
    rows: list[InjectedFault] = []
    writer = cast(HistoryWriter, SimpleNamespace(add=rows.append))
    plan = CheckPlan(seed=1, workloads=("queues",))
    injector = Injector(plan, site, "run-0001", Clock(), writer, lambda _: None)
    asyncio.run(injector._inject(1, PlannedFault(fault=fault, pause=0, length=0, choice=0)))
    [row] = rows
    return row


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (KILL, 0),
        (STEP, 600),
        # The clock gains one second in 100, and needs 100 more to lose it.
        (DRIFT, 1 + 100),
    ],
)
def test_the_effect_of_a_fault_lasts_until_its_clock_is_right_again(fault: Fault, error: int) -> None:
    row = inject(replace(fault, inject=nothing, hits_node=False), site())
    assert row.settled - row.ended == (SETTLE_SECONDS + error) * SECOND


def test_a_fault_without_a_node_leaves_the_node_of_another_fault_busy() -> None:
    here = site()

    @contextmanager
    def meanwhile(site: FaultSite, node: object) -> Iterator[str]:
        site.busy.add(1)  # another fault begins
        yield "leaders"

    inject(replace(LEADERS, inject=meanwhile), here)
    assert here.busy == {1}


def test_a_repair_does_not_restart_nodes_while_another_one_has_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.check.repair._RESTART_AFTER", 0.0)
    answers = iter([False, True])
    with pytest.raises(AttributeError, match="restart"):
        make_whole(CLUSTER, give_up=lambda: next(answers))
    make_whole(CLUSTER, give_up=lambda: True)
