"""The commands and the programs of docs/migrating.md."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import bide
from bide.topology import Queue, Topology
from tests.broker import celery_app
from tests.broker.celery_app import TASK
from tests.broker.schedule_log import gating, wait_for_leaders
from tests.broker.test_celery_interop import declare_as_worker, worker_queue
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
NEW_URL = "amqp://new.example.org"

_CHANGING = re.compile(r"virtual host \S+|127\.0\.0\.1:\d+")


def run_section(heading: str, vhost: Vhost, other_url: str = "") -> None:
    """Run the commands of a section, and compare what they print with what the page shows."""
    section = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    commands = [one.partition("\n") for block in blocks for one in re.split(r"^\$ bide ", block, flags=re.M)[1:]]
    assert commands
    for command, _, output in commands:
        done = subprocess.run(
            [sys.executable, "-m", "bide", *shlex.split(command.replace(NEW_URL, other_url))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "BIDE_URL": vhost.url, "BIDE_MANAGEMENT_URL": vhost.broker.management_url},
            timeout=TIMEOUT,
            check=False,
        )
        assert _CHANGING.sub("...", done.stdout) == _CHANGING.sub("...", output), command


async def fill(client: bide.Client) -> None:
    """Send the messages of NServiceBus that the page moves."""
    for to, delay, number in (("Sales", "20m", 700), ("Billing", "3h", 300)):
        await client.publish_many(bide.OutgoingMessage("{}", to=to, delay=delay) for _ in range(number))


async def test_the_section_about_the_v1_infrastructure_shows_the_output_of_its_commands(vhost: Vhost) -> None:
    endpoints = bide.NServiceBus()
    topology = Topology(queues=[Queue.quorum("Sales"), Queue.quorum("Billing")])
    for name in ("Sales", "Billing"):
        topology |= endpoints.address_topology(name)
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(version=1)) as client:
        await client.declare(topology)
        await fill(client)
    run_section("From the v1 infrastructure of NServiceBus", vhost)


def test_the_section_about_celery_shows_the_output_of_its_commands(vhost: Vhost) -> None:
    queue = worker_queue("tasks", "shop", "orders")
    declare_as_worker(vhost.url, queue)
    app = celery_app.create(vhost.url)
    app.conf.update(task_queues=[queue], task_default_queue=queue.name)
    for hours, number in ((2, 400), (0.5, 1)):
        for _ in range(number):
            app.tasks[TASK].apply_async(("order",), countdown=hours * 3600)
    app.close()
    run_section("From Celery", vhost)


async def test_the_section_about_two_brokers_shows_the_output_of_its_commands(vhost: Vhost, other_vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=bide.NServiceBus(routing="direct")) as client:
        await client.declare(Topology(queues=[Queue.quorum("Sales"), Queue.quorum("Billing")]))
        await fill(client)
    async with bide.connect(other_vhost.url) as client:
        await client.declare(Topology(queues=[Queue.quorum("Sales")]))
    run_section("Between two brokers", vhost, other_vhost.url)


async def test_the_section_about_schedules_shows_the_output_of_its_commands(
    vhost: Vhost, other_vhost: Vhost, tmp_path: Path
) -> None:
    due = datetime(2040, 1, 2, tzinfo=UTC)
    async with (
        bide.connect(vhost.url) as first,
        bide.connect(other_vhost.url) as second,
        gating(vhost.url, tmp_path / "first"),
        gating(other_vhost.url, tmp_path / "second"),
    ):
        # Otherwise a command that has waited for an answer may print a warning.
        for one in (vhost, other_vhost):
            await wait_for_leaders(one.url)
        await second.declare(Topology(queues=[Queue.quorum("reminders")]))
        targets = ["reminders"] * 499 + ["mail"]
        await first.publish_many(
            bide.OutgoingSchedule("{}", key=f"invoice:{place}", to=to, deliver_at=due)
            for place, to in enumerate(targets)
        )
        await asyncio.to_thread(run_section, "Schedules, between two brokers", vhost, other_vhost.url)


def test_the_program_prints_what_the_page_shows() -> None:
    (program, shown), _ = programs()
    assert run_program(program) == shown


async def test_the_migration_in_python_prints_what_the_page_shows(vhost: Vhost) -> None:
    async with bide.connect(vhost.url, infrastructure=bide.WaitingHall(prefix="eu")) as client:
        await client.declare(Topology(queues=[Queue.quorum("Sales")]))
        await client.publish_many(bide.OutgoingMessage("{}", to="Sales", delay="3h") for _ in range(500))
    _, (program, shown) = programs()
    assert run_program(program, BIDE_URL=vhost.url) == shown


def programs() -> list[tuple[str, str]]:
    """The Python programs of the page, and the output below each."""
    return re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run_program(program: str, **environment: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT,
        check=True,
    )
    return done.stdout
