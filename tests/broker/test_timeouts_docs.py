"""The commands of docs/from-nservicebus-timeouts.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import bide
from bide.topology import Binding, Exchange, Queue, Topology
from tests.databases import DatabaseServer, postgresql_server
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = Path(__file__).parents[2] / "docs" / "from-nservicebus-timeouts.md"

_CHANGING = re.compile(
    r"\d+:\d\d:\d\d|\b[0-9a-f]{8}\b|\d{4}-\d\d-\d\dT[\d:+]+|(?:virtual host|vhost) '[^']*'",
)


@pytest.fixture(scope="module")
def server() -> Iterator[DatabaseServer]:
    """A private database server."""
    with postgresql_server() as running:
        yield running


def fill(store: Store) -> None:
    """Store the timeouts of the page."""
    for endpoint in ("Billing", "Sales_Orders", "Shipping"):
        store.create(endpoint)
    first = later(hours=3, seconds=10)
    for endpoint, destination, number in (
        ("Billing", "Billing", 300),
        ("Sales_Orders", "Sales.Orders", 700),
        ("Sales_Orders", "Shipping", 40),
    ):
        rows = [
            (destination, first + timedelta(days=place % 30), {"NServiceBus.MessageId": f"{endpoint}-{place}"}, b"{}")
            for place in range(number)
        ]
        store.add(endpoint, *rows)
    store.add("Sales_Orders", *[("Archive", first, {}, b"{}") for _ in range(2)])
    store.add("Billing", ("Billing", first, "no JSON", b"{}"))
    store.add("Billing", *[("Billing", later(minutes=-5), {}, b"{}") for _ in range(3)])


def run(vhost: Vhost, store: Store, command: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "bide", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "BIDE_URL": vhost.url, "BIDE_DATABASE": store.url},
        timeout=TIMEOUT,
        check=False,
    )
    return done.stdout


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of the page and their output."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fences if not language]
    shown = [one.partition("\n") for block in blocks for one in re.split(r"^ *\$ bide ", block, flags=re.MULTILINE)[1:]]
    return [(command, output) for command, _, output in shown]


async def test_the_page_shows_the_output_of_its_commands_from_top_to_bottom(
    vhost: Vhost, server: DatabaseServer
) -> None:
    store = Store(server, server.new_database())
    fill(store)
    shown = commands(PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 7
    async with endpoints(vhost, bide.NServiceBus(), "Sales.Orders", "Billing", "Shipping") as client:
        for name in ("Shipping.Timeouts", "Shipping.TimeoutsDispatcher"):
            await client.declare(Topology([Exchange(name, "fanout")], [Queue(name)], [Binding(name, name)]))
        for command, output in shown:
            printed = run(vhost, store, command)
            assert _lines(printed) == _lines(output), command


def _lines(text: str) -> list[list[str]]:
    return [_CHANGING.sub("…", line).split() for line in text.splitlines() if line.strip()]
