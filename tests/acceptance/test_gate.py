"""``bide gate`` as processes that are stopped, killed and started wrongly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import pytest

import bide
from bide.topology import Queue, Topology
from tests.broker.receiving import eventually, ready_at, receive
from tests.broker.schedule_log import NAMES, LogClient, log_client
from tests.relay_process import Process, gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@pytest.fixture
async def client(vhost: Vhost) -> AsyncIterator[bide.Client]:
    """A client, with a target and the schedule log."""
    # Without heartbeats: the start of a gate blocks this event loop.
    async with bide.connect(vhost.idle_url) as client:
        await client.declare(NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))
        yield client


@pytest.fixture
async def log(vhost: Vhost, client: bide.Client) -> AsyncIterator[LogClient]:
    """A client of the log."""
    async with log_client(vhost.idle_url) as log:
        yield log


async def test_sigterm_in_the_middle_of_the_work_delivers_everything_once(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    """A gate that ends by SIGTERM has reported what it has delivered, so the next one delivers the rest alone."""
    count = 3000
    await asyncio.gather(*(log.add(f"{number}", "q:mails", body=b"%d" % number) for number in range(count)))
    delivered = 0
    with gate(vhost, tmp_path / "a") as first:

        async def has_begun() -> bool:
            return await ready_at(vhost.url, "mails") > 0

        await eventually(has_begun, step=0.001)
        delivered += (await asyncio.to_thread(first.stop))["delivered"]
    with gate(vhost, tmp_path / "b") as second:
        bodies = [one.body for one in await receive(client, "mails", count)]
        delivered += (await asyncio.to_thread(second.stop))["delivered"]
    assert {int(one) for one in bodies} == set(range(count))
    assert delivered == count


async def test_a_killed_gate_loses_nothing(client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path) -> None:
    count = 3000
    missing = {b"%d" % number for number in range(count)}
    await asyncio.gather(*(log.add(f"{number}", "q:mails", number, body=b"%d" % number) for number in range(count)))
    async with asyncio.timeout(TIMEOUT), client.consume("mails", prefetch=1000) as messages:
        while missing:
            with gate(vhost, tmp_path) as process:
                enough = max(len(missing) - 700, 0)
                while len(missing) > enough:
                    message = await anext(messages)
                    await message.ack()
                    # A message may come twice, as after any kill.
                    missing.discard(message.body)
                process.kill()


def test_a_gate_that_cannot_start_gives_the_reason(vhost: Vhost, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cases = [
        (["--no-declare", "--state", str(tmp_path / "a")], 1, b"the schedule log 'bide.v1.schedule' is not on"),
        (["--state", str(file / "b")], 2, b"cannot be created"),
        (["--state", str(file)], 2, b"is a file"),
        (["--state", str(tmp_path / "d"), "--retention", "5"], 2, b"retention 5"),
        (["--state", ""], 2, b"is not a path"),
        ([], 2, b"--state"),
    ]
    for options, code, text in cases:
        process = Process(vhost, *options, command="gate")
        _, err = process.process.communicate(timeout=TIMEOUT)
        assert (process.process.returncode, text in err, err.count(b"\n")) == (code, True, 1), err.decode()


def test_a_gate_serves_its_metrics(vhost: Vhost, tmp_path: Path) -> None:
    process = Process(vhost, "--state", str(tmp_path), "--metrics", "0", command="gate")
    try:
        output = process.wait_until_it_says(b"following bide.v1.schedule").decode()
        url = output.partition("metrics on ")[2].split()[0]
        with urlopen(url, timeout=TIMEOUT) as page:
            assert 'bide_gate_partition_leading{gate="' in page.read().decode()
    finally:
        process.kill()


async def test_sigint_ends_an_idle_gate(client: bide.Client, vhost: Vhost, tmp_path: Path) -> None:
    with gate(vhost, tmp_path) as process:
        process.signal(signal.SIGINT)
        _, err = process.process.communicate(timeout=TIMEOUT)
        assert process.process.returncode == 0, err.decode()
