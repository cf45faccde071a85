"""``bide check`` on one broker: nothing is found without faults; a meddler is found."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

import bide.check.run
from bide.check.faults.disk import FULL
from bide.check.faults.fault import FaultSite
from bide.check.judgement import Verdict, judge
from bide.check.plan import ALL_WORKLOADS, CheckPlan
from bide.check.recorder import Draft, Recorder
from bide.check.run import run_check
from bide.check.site import VHOST, OneNode
from bide.check.workloads.base import CheckWorkload
from bide.check.workloads.queues import QueuesWorkload
from bide.errors import InvalidInputError
from bide.local_broker import LocalBroker
from tests.check_cases import found
from tests.timeouts import TIMEOUT

SHORT = timedelta(seconds=1)
ANY_LATENESS = timedelta(seconds=TIMEOUT)
"""These tests do not measure time."""

LEAST = 10
"""Messages that a workload sends, even if the machine stands still for the duration of the plan."""


@pytest.fixture(autouse=True)
def enough_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads send :data:`LEAST` messages each, or more."""
    pace = CheckWorkload.pace

    async def at_least(workload: CheckWorkload) -> AsyncIterator[int]:
        sent = 0
        async for number in pace(workload):
            yield number
            sent += 1
        for number in range(sent, LEAST):
            yield number

    monkeypatch.setattr(CheckWorkload, "pace", at_least)


async def check(broker: LocalBroker, folder: Path, plan: CheckPlan) -> Verdict:
    """Run a plan, and judge it."""
    working = folder / "working"
    working.mkdir()
    try:
        await run_check(plan, OneNode(broker), folder / "history", working)
    finally:
        broker.delete_vhost(VHOST)
    return judge(folder / "history", max_lateness=ANY_LATENESS)


async def test_each_workload_is_delivered_as_promised(broker: LocalBroker, tmp_path: Path) -> None:
    # The workload that is left out waits 20 s for its full queue; a long test has it.
    workloads = tuple(name for name in ALL_WORKLOADS if name != "isolated")
    plan = CheckPlan(seed=1, workloads=workloads, duration=2 * SHORT, rate=60, longest=SHORT)
    verdict = await check(broker, tmp_path, plan)
    assert [one for one in verdict.findings if one.violations] == []  # with examples
    assert {one.workload for one in verdict.workloads} == set(workloads)
    assert all(one.delivered > 0 for one in verdict.workloads)
    assert (verdict.seeds, verdict.undeliverable, verdict.early_by_clock) == ((1,), 0, 0)


def test_the_disk_of_this_machine_is_not_filled(broker: LocalBroker) -> None:
    site = FaultSite(cluster=OneNode(broker), vhost="/", rng=random.Random(1))
    with pytest.raises(InvalidInputError, match="has no disk of its own"), FULL.inject(site, broker):
        pass
    assert not (broker.folder / "data" / "filler").exists()


class Meddler(QueuesWorkload):
    """Does to some messages what a broker should not do, and records what it should have done.

    Attributes:
        lost: the ids of messages that were not sent.
        copies: how many messages and copies were sent.
    """

    lost: ClassVar[set[str]] = set()
    copies: ClassVar = 0

    async def publish(self, draft: Draft, places: Any, **options: Any) -> None:
        """Lose, hasten, double or change every tenth message each."""
        what = int(draft.id.rpartition("-")[2]) % 10
        copies = (0, 1, 2, 1)[what] if what < 4 else 1
        Meddler.copies += copies
        if what > 3:
            await super().publish(draft, places, **options)
            return
        if what == 0:
            self.lost.add(draft.id)
        client, delay = self.stage.client, self.stage.longest
        due = client.now() + (timedelta(hours=1) if what == 1 else delay)
        body = draft.body + b"!" if what == 3 else draft.body
        for _ in range(copies):
            await client.publish(body, to=places[0], headers=draft.headers, message_id=draft.id, delay=delay)
        self.stage.recorder.add_sent(draft, places, outcome="confirmed", expected="delivered", due=due)


async def until_all_but_the_lost_have_arrived(recorder: Recorder) -> None:
    """What a run waits for at its end, without the time that it gives messages that never come."""
    while {name for name, _ in recorder._missing} - Meddler.lost or recorder.delivered < Meddler.copies:
        recorder._changed.clear()
        await recorder._changed.wait()


async def test_what_a_meddler_does_is_found(
    broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bide.check.run, "WORKLOADS", {"queues": Meddler})
    monkeypatch.setattr(Recorder, "until_complete", until_all_but_the_lost_have_arrived)
    plan = CheckPlan(seed=2, workloads=("queues",), duration=2 * SHORT, rate=50, longest=SHORT)
    verdict = await check(broker, tmp_path, plan)
    assert set(found(verdict)) == {"lost", "early", "twice", "changed"}
    ends = {one.rule: {example.id[-1] for example in one.examples} for one in verdict.findings if one.violations}
    assert ends == {"lost": {"0"}, "early": {"1"}, "twice": {"2"}, "changed": {"3"}}
