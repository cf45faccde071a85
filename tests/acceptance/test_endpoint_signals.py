"""Signals to a process that serves an endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import bide
from tests.broker.receiving import receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PROGRAM = """
import sys, time
from datetime import timedelta
from pathlib import Path
import bide

app = bide.Endpoint("orders", retry=bide.Retry(delays=["1s"]), concurrency=2, drain="1h")

@app.handler
def block(message):
    print("inside\\n", end="", flush=True)  # one write: two threads print
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)  # a file gives no event
    print("handled\\n", end="", flush=True)

stop = app.stop

def stop_and_print():
    stop()
    print("draining\\n", end="", flush=True)  # the next signal ends the process from now on

app.stop = stop_and_print

app.serve(sys.argv[1], infrastructure=bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(seconds=1)))
print("drained", flush=True)
"""


@asynccontextmanager
async def serving(vhost: Vhost, end: Path) -> AsyncIterator[Process]:
    """The program, whose handlers end when there is this file; killed at the end."""
    environment = {**os.environ, "BIDE_MANAGEMENT_URL": vhost.broker.management_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, vhost.url, str(end), stdout=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def next_line(process: Process) -> str:
    """The next line that the program prints."""
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), TIMEOUT)).decode().strip()


async def test_the_first_signal_drains_the_endpoint(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client:
        async with serving(vhost, tmp_path / "end") as process:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            for _ in range(20):
                await client.publish(b"", to="orders")
            assert [await next_line(process), await next_line(process)] == ["inside", "inside"]
            process.send_signal(signal.SIGTERM)
            assert await next_line(process) == "draining"
            (tmp_path / "end").touch()
            assert [await next_line(process), await next_line(process), await next_line(process)] == [
                "handled",
                "handled",
                "drained",
            ]
            assert await asyncio.wait_for(process.wait(), TIMEOUT) == 0
        # What was fetched ahead is back at once, and what was handled is not.
        assert len(await receive(client, "orders", 18)) == 18


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)])
async def test_the_second_signal_ends_the_process_while_a_handler_blocks(
    vhost: Vhost, tmp_path: Path, signals: tuple[signal.Signals, signal.Signals]
) -> None:
    first, second = signals
    async with bide.connect(vhost.url) as client:
        async with serving(vhost, tmp_path / "end") as process:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            await client.publish(b"", to="orders", message_id="one")
            assert await next_line(process) == "inside"
            process.send_signal(first)
            assert await next_line(process) == "draining"
            assert process.returncode is None
            process.send_signal(second)
            assert await asyncio.wait_for(process.wait(), TIMEOUT) == -second
        (message,) = await receive(client, "orders", 1)
        assert message.message_id == "one"
