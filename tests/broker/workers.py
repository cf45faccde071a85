"""Gates, relays and processes that work during a test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from bide.amqp.connection import Connection
from tests.timeouts import TIMEOUT


class Worker(Protocol):
    """A gate or a relay."""

    async def run(self, *, on_start: Callable[[Connection], None] | None = None) -> object:
        """Work until :meth:`stop`."""

    def stop(self) -> None:
        """End the work."""


@asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[None]:
    """Wait until it works, and stop it at the end. That it fails is an error."""
    started = asyncio.Event()
    running = asyncio.create_task(worker.run(on_start=lambda _: started.set()))
    starting = asyncio.create_task(started.wait())
    try:
        await asyncio.wait({running, starting}, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            running.result()
        yield
    finally:
        starting.cancel()
        worker.stop()
        async with asyncio.timeout(TIMEOUT):
            await running


@asynccontextmanager
async def killed_at_the_end(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Kill a process at the end, and its children; it was started in a session of its own."""
    try:
        yield
    finally:
        # It may have ended already.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
