"""Gates that are killed while clients schedule and cancel."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import bide
from bide import ScheduleOutcome
from tests.broker.receiving import ready_at, receive
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@asynccontextmanager
async def gate_process(url: str, state: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """``bide gate`` as a process, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bide", "gate", "--state", str(state), "--allow", "*"),
        env={**os.environ, "BIDE_URL": url},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_no_message_is_both_cancelled_and_delivered_or_neither(vhost: Vhost, tmp_path: Path) -> None:
    """The gate is killed again and again while messages are cancelled at the moment that they are due."""
    async with bide.connect(vhost.url, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        slots = asyncio.Semaphore(50)

        async def one(number: int) -> tuple[str, ScheduleOutcome]:
            key = f"k{number}"
            async with slots:
                made = await client.schedule(key.encode(), key=key, to="reminders", delay="500ms")
                assert made.due_time is not None
                aim = made.due_time + timedelta(milliseconds=number % 60 - 30)
                await asyncio.sleep((aim - datetime.now(UTC)).total_seconds())
                return key, (await client.cancel(key)).outcome

        running = asyncio.gather(*(one(number) for number in range(600)))
        kills = 0
        while not running.done():
            async with gate_process(vhost.url, tmp_path / "gate"):
                # Long enough to take over, and to answer for a while.
                await asyncio.wait({running}, timeout=6)
            kills += not running.done()
        results = await running
        outcomes = Counter(outcome for _, outcome in results)
        assert kills >= 1
        assert set(outcomes) <= {ScheduleOutcome.CANCELLED, ScheduleOutcome.TOO_LATE}
        expected = {key for key, outcome in results if outcome is ScheduleOutcome.TOO_LATE}
        await client.schedule(b"last", key="last", to="reminders", delay="0s")
        async with gate_process(vhost.url, tmp_path / "gate"):
            found = set[str]()
            # By one consumer: a quorum queue of 4.0 drops a message that was returned 20 times.
            async with asyncio.timeout(TIMEOUT), client.consume("reminders") as messages:
                while found != {*expected, "last"}:
                    message = await anext(messages)
                    await message.ack()
                    found.add(message.body.decode())
        rest = await receive(client, "reminders", left) if (left := await ready_at(vhost.url, "reminders")) else []
        assert {one.body.decode() for one in rest} <= expected
