"""The commands and the program of docs/from-nservicebus-timeouts.md."""

from __future__ import annotations

import asyncio
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
from tests.broker.receiving import receive
from tests.broker.schedule_log import gating
from tests.databases import DatabaseServer, postgresql_server
from tests.polling import killed_at_the_end
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


def start(vhost: Vhost, store: Store, *arguments: str) -> subprocess.Popen[str]:
    """Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "BIDE_URL": vhost.url, "BIDE_DATABASE": store.url},
    )


def run(vhost: Vhost, store: Store, *arguments: str) -> str:
    """What Python prints with these arguments."""
    return output_of(start(vhost, store, *arguments))


def output_of(process: subprocess.Popen[str]) -> str:
    """What a process prints until it ends. It is killed if it does not end in time."""
    with killed_at_the_end(process):
        return process.communicate(timeout=TIMEOUT)[0]


def blocks(language: str) -> list[str]:
    """The blocks of the page in a language; without one, in which commands have their output below them."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands_of(title: str) -> list[list[str]]:
    """The arguments of Python for the commands of a section that shows no output."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [["-m", *line.removeprefix("$ ").split()] for line in block.splitlines()]


async def test_the_page_shows_the_output_of_its_commands_from_top_to_bottom(
    vhost: Vhost, server: DatabaseServer
) -> None:
    store = Store(server, server.new_database())
    fill(store)
    *shown, _ = blocks("")
    commands = [one.partition("\n") for block in shown for one in re.split(r"^ *\$ bide ", block, flags=re.M)[1:]]
    assert len(commands) == 7
    async with endpoints(vhost, bide.NServiceBus(), "Sales.Orders", "Billing", "Shipping") as client:
        for name in ("Shipping.Timeouts", "Shipping.TimeoutsDispatcher"):
            await client.declare(Topology([Exchange(name, "fanout")], [Queue(name)], [Binding(name, name)]))
        for command, _, output in commands:
            printed = run(vhost, store, "-m", "bide", *command.split())
            assert _lines(printed) == _lines(output), command


async def test_the_program_prints_what_the_page_shows(vhost: Vhost, server: DatabaseServer) -> None:
    store = Store(server, server.new_database())
    fill(store)
    (program,) = blocks("python")
    async with endpoints(vhost, bide.NServiceBus(), "Billing"):
        assert run(vhost, store, "-c", program) == blocks("")[-1]


async def test_the_dispatcher_of_the_page_sends_what_is_due(vhost: Vhost, server: DatabaseServer) -> None:
    store = Store(server, server.new_database())
    store.create("Sales_Orders")
    store.add("Sales_Orders", ("Sales.Orders", later(minutes=-1), {}, b"due"))
    (command,) = commands_of("Without a timeout manager")
    async with endpoints(vhost, bide.NServiceBus(), "Sales.Orders") as client:
        process = start(vhost, store, *command)
        try:
            (message,) = await receive(client, "Sales.Orders", 1)
        finally:
            process.terminate()
            await asyncio.to_thread(output_of, process)
        assert (message.body, process.returncode, store.count("Sales_Orders")) == (b"due", 0, 0)


async def test_the_page_cancels_the_timeouts_of_a_saga(vhost: Vhost, server: DatabaseServer, tmp_path: Path) -> None:
    store = Store(server, server.new_database())
    store.create("Sales")
    migrate, cancel = commands_of("With keys")
    saga = cancel[-1].split(":")[-2]
    store.add("Sales", ("Sales", later(hours=1), {"NServiceBus.SagaId": saga}, b"x"))
    (kept,) = store.add("Sales", ("Sales", later(hours=1), {}, b"x"))
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await client.declare(Topology(queues=[Queue.quorum("Sales")]))
        # The gate needs this thread.
        printed = [await asyncio.to_thread(run, vhost, store, *command) for command in (migrate, cancel)]
        assert [one.key async for one in client.list_scheduled()] == [f"timeout:Sales:-:{kept}"], printed


async def test_the_page_moves_any_other_table(vhost: Vhost, server: DatabaseServer) -> None:
    store = Store(server, server.new_database())
    server.execute(
        store.url, "CREATE TABLE reminder (number int PRIMARY KEY, queue varchar(50), content text, at timestamp)"
    )
    row = (1, "mail", "{}", later(hours=1).replace(tzinfo=None))
    server.execute(store.url, "INSERT INTO reminder VALUES (%s, %s, %s, %s)", [row])
    (command,) = commands_of("Any other table")
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue.quorum("mail")]))
        assert _lines(run(vhost, store, *command)) == [["1", "of", "reminder", "sent"], ["1", "sent"]]
    assert server.execute(store.url, "SELECT * FROM reminder") == []


def _lines(text: str) -> list[list[str]]:
    return [_CHANGING.sub("…", line).split() for line in text.splitlines() if line.strip()]
