"""Signals to a process that serves an endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import bide
from tests.broker.receiving import receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PROGRAM = """
import sys, time
from datetime import timedelta
import bide

app = bide.Endpoint("orders", retry=bide.Retry(delays=["1s"]), concurrency=2, drain="20s")

@app.handler
def block(message):
    print("inside\\n", end="", flush=True)  # one write: two threads print
    time.sleep(float(message.body))  # the time that a message says
    print("handled\\n", end="", flush=True)

app.serve(sys.argv[1], infrastructure=bide.Clock(max_delay=timedelta(seconds=20), resolution=timedelta(seconds=1)))
print("drained", flush=True)
"""


@asynccontextmanager
async def serving(vhost: Vhost) -> AsyncIterator[Process]:
    """The program, killed at the end."""
    environment = {**os.environ, "BIDE_MANAGEMENT_URL": vhost.broker.management_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, vhost.url, stdout=PIPE, env=environment
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


async def test_the_first_signal_drains_the_endpoint(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        async with serving(vhost) as process:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            for _ in range(20):
                await client.publish(b"1", to="orders")
            assert [await next_line(process), await next_line(process)] == ["inside", "inside"]
            process.send_signal(signal.SIGTERM)
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
    vhost: Vhost, signals: tuple[signal.Signals, signal.Signals]
) -> None:
    first, second = signals
    async with bide.connect(vhost.url) as client:
        async with serving(vhost) as process:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            await client.publish(b"3600", to="orders", message_id="one")
            assert await next_line(process) == "inside"
            process.send_signal(first)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.wait(), 1)
            process.send_signal(second)
            assert await asyncio.wait_for(process.wait(), TIMEOUT) == -second
        (message,) = await receive(client, "orders", 1)
        assert message.message_id == "one"
