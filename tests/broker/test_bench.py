"""Every case of the benchmark in a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.suite.catalogue import chosen
from benchmarks.suite.measurement import Case, Plan
from benchmarks.suite.quantities import QUANTITIES
from benchmarks.suite.raw import FRAME_MAX, RawConnection
from benchmarks.suite.task import Answer, Job, Values
from bide.amqp import codec
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker
from bide.local_broker.installation import HOME_VARIABLE
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

PLAN = Plan(scale=0.002)


def cases(*measurements: str) -> list[Case]:
    """Every contestant with every layout, each in its first setting: the others differ in numbers alone."""
    found: dict[str, Case] = {}
    for measurement in chosen(measurements):
        for case in measurement.cases(PLAN):
            found.setdefault(f"{measurement.name}, {case.name}", case)
    return list(found.values())


def parameters(*measurements: str) -> list[Any]:
    """Those cases; of other clients than bide only pika is part of every run."""
    long = ("aio_pika", "kombu", "celery", "dramatiq", "faststream", "taskiq")
    return [
        pytest.param(case, marks=pytest.mark.long) if case.work.rpartition(".")[2].startswith(long) else case
        for case in cases(*measurements)
    ]


def name(case: Case) -> str:
    return f"{case.work.rpartition('.')[2]}, {case.name}"


def run(case: Case, vhost: Vhost) -> Values:
    pid = vhost.broker.pid
    assert pid is not None
    return answered(Job(work=case.work, options=case.options, url=vhost.url, pid=pid))


def answered(job: Job, **environment: str) -> Values:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite"],
        input=job.to_json(),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = Answer.from_json(done.stdout).values
    assert values.keys() <= QUANTITIES.keys()
    return values


@pytest.mark.timeout(TIMEOUT)
def test_publishing_ends_when_the_broker_confirms_before_it_is_asked_for_more(vhost: Vhost) -> None:
    """With a window as large as one write, all that was sent is confirmed each time."""
    message = b"".join(
        codec.publish(
            1,
            exchange="",
            routing_key="no queue",
            mandatory=False,
            encoded_properties=codec.properties({}),
            body=b"",
            frame_max=FRAME_MAX,
        )
    )
    connection = RawConnection.open(BrokerUrl.parse(vhost.url))
    try:
        assert connection.publish([message], window=50, until=lambda sent: sent >= 100) == 100
    finally:
        connection.close()


@pytest.fixture(scope="module")
def clock_vhost(broker: LocalBroker) -> Iterator[Vhost]:
    """Shared by the tests of the whole ``Clock``, since declaring it takes longer than they do."""
    yield Vhost(name="whole-clock", url=broker.add_vhost("whole-clock"), broker=broker)
    broker.delete_vhost("whole-clock")


@pytest.mark.parametrize("case", parameters("publish", "consume", "memory"), ids=name)
def test_every_client_publishes_and_receives(vhost: Vhost, case: Case) -> None:
    values = run(case, vhost)
    assert values["rate"] > 0
    assert values["client_cpu"] > 0
    assert values["broker_cpu"] >= 0


@pytest.mark.long
@pytest.mark.parametrize("case", cases("lateness"), ids=name)
def test_every_message_arrives_and_none_early(request: pytest.FixtureRequest, case: Case) -> None:
    shared = case.options.get("layout") == "clock"
    values = run(case, request.getfixturevalue("clock_vhost" if shared else "vhost"))
    assert values["lost"] == values["early"] == 0
    assert values["min"] <= values["p50"] <= values["p99"] <= values["max"]


@pytest.mark.long
@pytest.mark.parametrize("case", cases("sustained"), ids=name)
def test_sustained_cases_deliver_messages(vhost: Vhost, case: Case) -> None:
    assert run(case, vhost)["rate"] > 0


@pytest.mark.long
def test_burst_cases_deliver_messages(broker: LocalBroker) -> None:
    """All at once: most of the time they wait for the moment, by which a slow machine has to have published."""
    bursts = [replace(case, options={**case.options, "margin": 30}) for case in cases("burst")]
    assert len({(case.options["layout"], case.options["lanes"]) for case in bursts}) == len(bursts) == 5
    names = [f"burst-{number}" for number in range(len(bursts))]
    vhosts = [Vhost(name=name, url=broker.add_vhost(name), broker=broker) for name in names]
    try:
        with ThreadPoolExecutor() as pool:
            values = list(pool.map(run, bursts, vhosts))
    finally:
        for name in names:
            broker.delete_vhost(name)
    assert all(one["rate"] > 0 for one in values)


@pytest.mark.parametrize("case", [case for case in cases("startup") if "Clock" not in case.name], ids=name)
def test_startup_cases_measure_a_time(vhost: Vhost, case: Case) -> None:
    (value,) = run(case, vhost).values()
    assert value > 0


@pytest.mark.long
def test_an_existing_clock_can_be_applied_again(clock_vhost: Vhost) -> None:
    (case,) = [case for case in cases("startup") if case.name == "apply Clock that is there"]
    assert run(case, clock_vhost)["seconds"] > 0


@pytest.mark.long
@pytest.mark.parametrize("case", cases("schedules"), ids=name)
def test_schedules_are_made_with_and_without_a_gate(vhost: Vhost, case: Case) -> None:
    values = run(case, vhost)
    assert values["rate"] > 0
    assert ("gate_cpu" in values) == case.options["is_keyed"]


@pytest.mark.long
@pytest.mark.parametrize("case", chosen(["cancel"])[0].cases(PLAN), ids=lambda case: case.setting)
def test_cancels_are_compared_with_publishes(vhost: Vhost, case: Case) -> None:
    values = run(case, vhost)
    assert 0 < values["cancel_p50"] <= values["cancel_p99"]
    assert values["times_p50"] == pytest.approx(values["cancel_p50"] / values["publish_p50"])


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases("keyed") if case.options["is_keyed"]], ids=name)
def test_every_message_with_a_key_arrives_and_none_early(clock_vhost: Vhost, case: Case) -> None:
    values = run(case, clock_vhost)
    assert values["lost"] == values["early"] == 0
    assert values["gate_cpu"] > 0


@pytest.mark.long
def test_a_killed_gate_is_replaced(vhost: Vhost) -> None:
    (case,) = cases("takeover")
    values = run(case, vhost)
    assert 0 < values["takeover_p50"] <= values["takeover_max"]


@pytest.mark.long
def test_schedules_that_wait_are_listed_rebuilt_moved_and_cancelled(vhost: Vhost) -> None:
    (case,) = cases("pending")
    values = run(case, vhost)
    measured = ("gate_memory", "gate_index", "page_p50", "rebuild", "move_tenth", "tenth")
    assert min(values[name] for name in measured) > 0


@pytest.mark.long
def test_waiting_messages_survive_a_restart(rabbitmq: Rabbitmq) -> None:
    """In the cascade, which is declared sooner; most of it is due while the broker starts again."""
    (case,) = [case for case in cases("store") if case.options["layout"] == "cascade"]
    root = None if rabbitmq.chroot is None else str(rabbitmq.chroot)
    home = {} if rabbitmq.home is None else {HOME_VARIABLE: str(rabbitmq.home)}
    values = answered(Job(work=case.work, options={**case.options, "hold": 5}, root=root), **home)
    assert values["lost"] == values["early"] == 0
    assert 0 <= values["min"] <= values["p50"] <= values["p99"] <= values["max"]
    assert min(values[name] for name in ("stop", "restart", "memory", "disk")) > 0
