"""An endpoint that hosts a gate."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import bide
from bide.errors import FolderInUseError, InvalidInputError
from bide.observability.metrics import Metrics
from bide.schedules.names import PARTITIONS
from tests.broker.receiving import eventually, ready_at
from tests.broker.schedule_log import NAMES, gating
from tests.leaks import no_leaks
from tests.support import Vhost
from tests.timeouts import TIMEOUT


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """An endpoint may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


async def test_an_endpoint_delivers_and_handles_its_schedules(vhost: Vhost, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics, handled = Metrics(registry), asyncio.Queue[tuple[str | None, bytes]]()
    app = bide.Endpoint("reminders", gate=True, gate_allow=["reminders"], gate_state=tmp_path, observers=[metrics])
    metrics.watch(app)

    @app.handler
    async def remind(message: bide.Message) -> None:
        await handled.put((message.key, message.body))

    # A cancel waits for the gate to start.
    patient = bide.connect(vhost.url, timeout=timedelta(seconds=TIMEOUT))
    async with patient as client, asyncio.timeout(TIMEOUT):
        running = asyncio.create_task(app.run(client))
        await client.schedule(b"x", key="invoice:42", to="reminders", delay="1s")
        await client.schedule(b"paid", key="invoice:43", to="reminders", delay="1h")
        assert (await client.cancel("invoice:43")).outcome is bide.ScheduleOutcome.CANCELLED
        await client.schedule(b"y", key="secret", to="mails", delay="0s")
        assert await handled.get() == ("invoice:42", b"x")

        async def is_set_aside() -> bool:
            return await ready_at(vhost.url, NAMES.undeliverable) == 1

        await eventually(is_set_aside)

        async def leads_all() -> bool:
            return app.gate is not None and len(app.gate.leads) == PARTITIONS

        await eventually(leads_all)

        async def is_counted() -> bool:
            # The handler can get the message before the gate gets its confirm.
            page = generate_latest(registry).decode()
            return 'bide_gate_messages_total{result="delivered",target="q:reminders"} 1.0' in page

        await eventually(is_counted)
        assert "bide_gate_partition_leading{" in generate_latest(registry).decode()
        app.stop()
        await running
        assert app.gate is None
    assert handled.empty()


async def test_another_gate_takes_the_partitions_of_an_endpoint_that_stops(vhost: Vhost, tmp_path: Path) -> None:
    app = bide.Endpoint("reminders", gate=True, gate_allow=["*"])
    app.handler(lambda message: None)
    async with bide.connect(vhost.url) as client, asyncio.timeout(TIMEOUT):
        running = asyncio.create_task(app.run(client))

        async def leads_all() -> bool:
            return app.gate is not None and len(app.gate.leads) == PARTITIONS

        await eventually(leads_all)
        async with gating(vhost.url, tmp_path) as other:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

            async def is_taken() -> bool:
                return len(other.leads) == PARTITIONS

            await eventually(is_taken)


async def test_an_endpoint_ends_with_the_error_of_its_gate(vhost: Vhost, tmp_path: Path) -> None:
    app = bide.Endpoint("reminders", gate=True, gate_allow=["*"], gate_state=tmp_path)
    app.handler(lambda message: None)
    async with gating(vhost.url, tmp_path), bide.connect(vhost.url) as client, asyncio.timeout(TIMEOUT):
        with pytest.raises(FolderInUseError):
            await app.run(client)


async def test_sigterm_stops_the_endpoint_and_its_gate(vhost: Vhost, tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(
        "import bide\n"
        "app = bide.Endpoint('reminders', gate=True, gate_allow=['*'])\n"
        "@app.handler\n"
        "def remind(message):\n"
        "    print(message.key, flush=True)\n"
        "app.serve()\n"
    )
    async with bide.connect(vhost.url) as client, asyncio.timeout(TIMEOUT):
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        await client.schedule(key="invoice:42", to="reminders", delay="0s")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), stdout=subprocess.PIPE, env={**os.environ, "BIDE_URL": vhost.url}
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"invoice:42\n"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_the_allow_list_is_required() -> None:
    with pytest.raises(InvalidInputError, match="gate_allow"):
        bide.Endpoint("reminders", gate=True)
    with pytest.raises(InvalidInputError, match="need gate=True"):
        bide.Endpoint("reminders", gate_allow=["*"])
    number: Any = 5
    with pytest.raises(InvalidInputError, match="allow=5 is of type int"):
        bide.Endpoint("reminders", gate=True, gate_allow=number)
