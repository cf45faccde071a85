"""The commands and the program of docs/migrating.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import bide
from bide.topology import Queue, Topology
from tests.broker.test_delays_docs import run
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


async def test_the_page_shows_the_output_of_the_commands(vhost: Vhost) -> None:
    old, endpoints = bide.NServiceBus(version=1), bide.NServiceBus()
    topology = Topology(queues=[Queue.quorum("Sales"), Queue.quorum("Billing")])
    for name in ("Sales", "Billing"):
        topology |= endpoints.address_topology(name)
    async with bide.connect(vhost.url, infrastructure=old) as client:
        await client.declare(topology)
        for to, delay, number in (("Sales", "20m", 700), ("Billing", "3h", 300)):
            await client.publish_many(bide.OutgoingMessage("{}", to=to, delay=delay) for _ in range(number))
    shown = re.findall(r"^\$ bide (delay .*nservicebus-v1.*)\n((?:(?![$`]).+\n)+)", PAGE, re.MULTILINE)
    assert len(shown) == 3
    for command, output in shown:
        assert run(vhost, *command.split()) == output.splitlines()


def test_the_program_prints_what_the_page_shows() -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    done = subprocess.run([sys.executable, "-c", found[1]], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == found[2]
