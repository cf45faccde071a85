"""Helpers for tests of endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import bide
from bide.endpoint import Event, Observer
from tests.broker.receiving import eventually
from tests.timeouts import TIMEOUT


class Recorder(Observer):
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ready = asyncio.Event()

    async def started(self, client: bide.Client) -> None:
        """The endpoint has declared everything, and is about to consume."""
        self.ready.set()

    async def happened(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def kinds(self, message_id: str | None = None) -> list[str]:
        """What happened, in order."""
        return [one.kind for one in self.events if message_id is None or one.message_id == message_id]

    async def until(self, *kinds: str, count: int = 1, seconds: float = TIMEOUT) -> None:
        """Wait until ``count`` events of these kinds have happened."""

        async def has_happened() -> bool:
            return sum(one.kind in kinds for one in self.events) >= count

        await eventually(has_happened, seconds=seconds, step=0.01)


@asynccontextmanager
async def running(app: bide.Endpoint, client: bide.Client, recorder: Recorder) -> AsyncIterator[None]:
    """Run an endpoint, which has declared everything when the block begins, and stop it in good order."""
    work = asyncio.create_task(app.run(client))
    started = asyncio.create_task(recorder.ready.wait())
    try:
        await asyncio.wait({work, started}, timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        yield
    finally:
        started.cancel()
        app.stop()
        await asyncio.wait_for(work, TIMEOUT)
