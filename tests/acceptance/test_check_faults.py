"""``bide check`` on clusters: its faults break no promise, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

import bide.check.plan
import bide.check.run
from bide.check.faults.clock import DRIFT, faketime, step_of
from bide.check.faults.disk import DISK_SIZE, FULL
from bide.check.faults.fault import FaultSite
from bide.check.judgement import Verdict, judge
from bide.check.plan import FAULTS, CheckPlan
from bide.check.repair import make_whole
from bide.check.run import run_check
from bide.check.site import OneNode, clean_up, own_cluster, working_folder
from bide.local_broker import LocalBroker, LocalCluster
from bide.local_broker.installation import numbers
from bide.local_broker.processes import marked
from tests.check_cases import found
from tests.check_histories import SECOND
from tests.polling import wait_until
from tests.support import Rabbitmq
from tests.timeouts import TIMEOUT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ANY_LATENESS = timedelta(seconds=TIMEOUT)
"""These tests do not measure time."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for working folders."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "bide" / "check"


def check(
    folder: Path,
    rabbitmq: Rabbitmq,
    faults: Sequence[str],
    *,
    workloads: Sequence[str] = ("queues",),
    seed: int = 1,
    at_once: int = 1,
) -> Verdict:
    """Run a plan of half a minute on a cluster of its own, and judge it."""
    plan = CheckPlan(
        seed=seed,
        workloads=tuple(workloads),
        faults=tuple(faults),
        duration=timedelta(seconds=25),
        rate=30,
        longest=timedelta(seconds=5),
        every=timedelta(seconds=5),
        length=timedelta(seconds=4),
        at_once=at_once,
    )
    with (
        working_folder() as working,
        own_cluster(
            working,
            nodes=3,
            namespaces=plan.needs("namespaces"),
            clocks=plan.needs("faketime"),
            disks=plan.needs("disks"),
            partition_handling=None,
            home=rabbitmq.home,
            chroot=rabbitmq.chroot,
        ) as cluster,
    ):
        asyncio.run(run_check(plan, cluster, folder, working))
    return judge(folder, max_lateness=ANY_LATENESS)


@pytest.mark.parametrize(
    ("faults", "workloads", "seed", "at_once"),
    [
        # With this seed a relay is killed, and then a node is killed and another one paused at once.
        (["kill-process", "kill", "pause"], ["queues", "isolated", "gate", "relay"], 877, 2),
        (["leaders", "policy", "memory", "disk"], ["queues", "topic", "retries"], 1, 1),
        (["partition", "one-way"], ["queues", "bulk"], 1, 1),
        (["replace"], ["queues"], 1, 1),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, list) else str(one),
)
def test_faults_of_a_cluster_break_no_promise(
    faults: list[str], workloads: list[str], seed: int, at_once: int, rabbitmq: Rabbitmq, tmp_path: Path, state: Path
) -> None:
    verdict = check(tmp_path / "history", rabbitmq, faults, workloads=workloads, seed=seed, at_once=at_once)
    assert found(verdict) == {}
    check_faults_happened(verdict, faults)
    if "kill-process" in faults:
        assert set(verdict.faults) == set(faults)
    assert not list(state.iterdir())


def check_faults_happened(verdict: Verdict, faults: Sequence[str]) -> None:
    assert verdict.faults
    assert set(verdict.faults) <= set(faults)
    assert all(one.delivered > 0 for one in verdict.workloads)


def test_a_full_disk_breaks_no_promise_that_the_broker_keeps(rabbitmq: Rabbitmq, tmp_path: Path, state: Path) -> None:
    verdict = check(tmp_path / "history", rabbitmq, ["disk-full"], workloads=["queues", "retries"])
    broken = found(verdict)
    if numbers(verdict.releases[0]) < (4, 0):
        broken.pop("lost", None)  # by the broker: docs/clusters.md, "After a full disk"
    assert broken == {}
    check_faults_happened(verdict, ["disk-full"])
    assert not list(state.iterdir())


def test_a_wrong_clock_of_a_node_makes_messages_early_by_its_step_at_most(
    rabbitmq: Rabbitmq, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Messages may be late by the step, and the test waits for them: ten minutes would take that long.
    monkeypatch.setattr(bide.check.plan, "FAULTS", {**FAULTS, "clock-step": step_of(20.0)})
    monkeypatch.setattr(bide.check.run, "FAULTS", {**FAULTS, "clock-step": step_of(20.0)})
    verdict = check(tmp_path / "history", rabbitmq, ["clock-step"])
    assert found(verdict) == {}
    assert verdict.faults == {"clock-step": verdict.faults["clock-step"]}
    assert verdict.earliest_by_clock <= 20 * SECOND


def test_a_drifting_clock_makes_the_clock_of_the_node_wrong_by_one_percent_of_the_time_at_most(
    rabbitmq: Rabbitmq, tmp_path: Path
) -> None:
    with LocalBroker.start(
        tmp_path / "node",
        ephemeral=True,
        home=rabbitmq.home,
        chroot=rabbitmq.chroot,
        environment=faketime(tmp_path / "faketime"),
    ) as node:

        def clock() -> int:
            return int(node.rabbitmqctl("eval", "erlang:system_time(microsecond) - os:perf_counter(microsecond)."))

        right = clock()
        began = time.monotonic()
        with DRIFT.inject(FaultSite(cluster=OneNode(node), vhost="/", rng=random.Random(1)), node):
            wait_until(lambda: abs(clock() - right) > SECOND // 20, what="the clock is wrong by 50 ms")
            error = abs(clock() - right)
            assert error < (time.monotonic() - began) * DRIFT.clock_rate * SECOND
        wait_until(lambda: abs(clock() - right) < SECOND // 40, what="the clock is nearly right again")


def cluster_with_disks(rabbitmq: Rabbitmq, folder: Path, *, nodes: int) -> LocalCluster:
    """Start a cluster whose nodes have a disk each. It is a context manager, which ends it."""
    return LocalCluster.start(
        folder, nodes=nodes, disk_size=DISK_SIZE, ephemeral=True, home=rabbitmq.home, chroot=rabbitmq.chroot
    )


def is_full(folder: Path) -> bool:
    """Try to write a file, and remove what there is of it."""
    path = folder / "more"
    try:
        path.write_bytes(b"more")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return True
    finally:
        path.unlink(missing_ok=True)
    return False


def test_a_full_disk_has_no_space_until_its_repair(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    with cluster_with_disks(rabbitmq, tmp_path / "cluster", nodes=2) as cluster:
        node = cluster.nodes[1]
        pid, data = node.pid, node.folder / "data"
        with FULL.inject(FaultSite(cluster=cluster, vhost="/", rng=random.Random(1)), node) as what:
            assert what == node.name
            # The node may free space at any time. The fault fills it again a moment later.
            wait_until(lambda: is_full(data), what="the disk has no space")
        assert [one.name for one in data.iterdir() if one.name in {"filler", "more"}] == []
        assert shutil.disk_usage(data).free > DISK_SIZE // 2
        assert node.running
        assert node.pid != pid
        make_whole(cluster)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_a_member_that_a_full_disk_ended_for_good_is_replaced(rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    with cluster_with_disks(rabbitmq, tmp_path / "cluster", nodes=3) as cluster:
        node = cluster.nodes[1]
        arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 3}
        for queue in ("orders", "mails"):
            cluster.management.call("PUT", "queues", "/", queue, body={"durable": True, "arguments": arguments})
        # Find the file before the fault: RabbitMQ may empty it while the disk is full.
        [damaged] = [
            one for one in (node.folder / "data").rglob("quorum/*/*/config") if '<<"orders">>' in one.read_text()
        ]
        with FULL.inject(FaultSite(cluster=cluster, vhost="/", rng=random.Random(1), busy={2}), node):
            damaged.write_bytes(b"")  # as Ra before 2.6.2 leaves it, if the member starts in this moment
        members = json.loads(cluster.rabbitmqctl("list_queues", "--formatter", "json", "name", "online"))
        names = sorted(one.name for one in cluster.nodes)
        assert {one["name"]: sorted(one["online"]) for one in members} == {"orders": names, "mails": names}


def test_what_a_killed_run_leaves_behind_is_cleaned_up(rabbitmq: Rabbitmq, tmp_path: Path, state: Path) -> None:
    options = [*(["--home", str(rabbitmq.home)] if rabbitmq.home else [])]
    options += ["--root", str(rabbitmq.chroot)] if rabbitmq.chroot else []
    with subprocess.Popen(
        [sys.executable, "-m", "bide", "check", "run", str(tmp_path / "history"), "--fault", "disk-full", *options],
        env={name: value for name, value in os.environ.items() if not name.startswith("BIDE_")},
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert b"seed" in process.stderr.readline()
        [folder] = state.iterdir()
        process.send_signal(signal.SIGKILL)
    nodes = [folder / "cluster" / f"n{number}" for number in (1, 2, 3)]
    wait_until(lambda: not any(marked(node) for node in nodes), what="the nodes end with the run")
    assert clean_up() == [folder]
    assert not list(state.iterdir())
    assert str(folder) not in Path("/proc/mounts").read_text()
