"""Every measurement of the benchmark, tiny: it works with whatever is installed, and its numbers make sense."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby

import pytest

from bide.bench.catalogue import chosen
from bide.bench.job import Answer, Job, Values
from bide.bench.measurement import Case, Plan
from bide.bench.quantities import QUANTITIES
from tests.support import Vhost

PLAN = Plan(scale=0.002)


def cases(*measurements: str) -> list[Case]:
    """One case of each kind of work: with a cascade, where there is a choice, because that is declared sooner."""
    found = [case for measurement in chosen(measurements) for case in measurement.cases(PLAN)]
    return [
        min(same, key=lambda case: "cascade" not in case.name) for _, same in groupby(sorted(found, key=kind), key=kind)
    ]


def kind(case: Case) -> str:
    return case.work


def run(case: Case, vhost: Vhost) -> Values:
    pid = vhost.broker.pid
    assert pid is not None
    job = Job(work=case.work, options=case.options, url=vhost.url, pid=pid)
    done = subprocess.run(
        [sys.executable, "-m", "bide.bench"],
        input=job.to_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = Answer.from_json(done.stdout).values
    assert values.keys() <= QUANTITIES.keys()
    return values


@pytest.mark.parametrize("case", cases("publish", "consume", "memory"), ids=kind)
def test_clients_publish_and_receive(vhost: Vhost, case: Case) -> None:
    values = run(case, vhost)
    assert values["rate"] > 10
    assert values["client_cpu"] > 0
    assert values["broker_cpu"] >= 0


@pytest.mark.parametrize("case", cases("lateness"), ids=kind)
def test_every_message_arrives_and_none_early(vhost: Vhost, case: Case) -> None:
    values = run(case, vhost)
    assert values["lost"] == values["early"] == 0
    assert values["min"] <= values["p50"] <= values["p99"] <= values["max"]


@pytest.mark.parametrize("case", cases("sustained", "burst"), ids=kind)
def test_many_messages_go_through(vhost: Vhost, case: Case) -> None:
    assert run(case, vhost)["rate"] > 10


@pytest.mark.parametrize("case", cases("startup"), ids=kind)
def test_the_start_takes_time(vhost: Vhost, case: Case) -> None:
    (value,) = run(case, vhost).values()
    assert value > 0
