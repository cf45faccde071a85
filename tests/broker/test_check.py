"""``bide check`` on one broker: nothing is found without faults; a meddler is found."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import bide.check.run
from bide.check.judgement import Verdict, judge
from bide.check.plan import WORKLOADS, CheckPlan
from bide.check.recorder import Draft
from bide.check.run import run_check
from bide.check.site import VHOST, OneNode
from bide.check.workloads.queues import QueuesWorkload
from bide.local_broker import LocalBroker
from tests.check_cases import found
from tests.timeouts import TIMEOUT

SHORT = timedelta(seconds=1)
ANY_LATENESS = timedelta(seconds=TIMEOUT)
"""These tests do not measure time."""


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
    workloads = tuple(name for name in WORKLOADS if name != "isolated")
    plan = CheckPlan(seed=1, workloads=workloads, duration=2 * SHORT, rate=60, longest=SHORT)
    verdict = await check(broker, tmp_path, plan)
    assert found(verdict) == {}
    assert {one.workload for one in verdict.workloads} == set(workloads)
    assert all(one.delivered > 0 for one in verdict.workloads)
    assert (verdict.seeds, verdict.undeliverable, verdict.early_by_clock) == ((1,), 0, 0)


class Meddler(QueuesWorkload):
    """Does to some messages what a broker should not do, and records what it should have done."""

    async def publish(self, draft: Draft, places: Any, **options: Any) -> None:
        """Lose, hasten, double or change every tenth message each."""
        client, recorder = self.stage.client, self.stage.recorder
        what = int(draft.id.rpartition("-")[2]) % 10
        if what > 3:
            await super().publish(draft, places, **options)
            return
        due = client.now() + self.stage.longest
        body = draft.body + b"!" if what == 3 else draft.body
        delay = timedelta(0) if what == 1 else self.stage.longest
        for _ in range((0, 1, 2, 1)[what]):
            await client.publish(body, to=places[0], headers=draft.headers, message_id=draft.id, delay=delay)
        recorder.add_sent(draft, places, outcome="confirmed", expected="delivered", due=due)


async def test_what_a_meddler_does_is_found(
    broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bide.check.run, "WORKLOADS", {"queues": Meddler})
    plan = CheckPlan(
        seed=2, workloads=("queues",), duration=2 * SHORT, rate=50, longest=timedelta(seconds=6), patience=10 * SHORT
    )
    verdict = await check(broker, tmp_path, plan)
    assert set(found(verdict)) == {"lost", "early", "twice", "changed"}
    ends = {
        finding.rule: {one.id[-1] for one in finding.examples} for finding in verdict.findings if finding.violations
    }
    assert ends == {"lost": {"0"}, "early": {"1"}, "twice": {"2"}, "changed": {"3"}}
