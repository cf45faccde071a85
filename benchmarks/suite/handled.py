"""Messages that handlers have received, counted and measured from the first to the last."""

from __future__ import annotations

import asyncio

from benchmarks.suite.processor import Meter
from benchmarks.suite.task import Answer, Job


class Handled:
    """Counts calls of a handler. What happens before the first call, such as declarations, is not measured.

    Args:
        job: says how many messages there are.
    """

    def __init__(self, job: Job) -> None:
        self._pid = job.pid
        self._wanted: int = job.options["messages"]
        self._count = 0
        self._meter: Meter | None = None
        self._answer: Answer | None = None
        self._all_handled = asyncio.Event()

    def add(self) -> None:
        """Count one call."""
        self._count += 1
        if self._meter is None:
            self._meter = Meter(self._pid)
        elif self._count == self._wanted:
            self._answer = Answer(values=self._meter.read(self._count - 1))
            self._all_handled.set()

    async def answer(self) -> Answer:
        """Wait for the last message, and return what was measured."""
        await self._all_handled.wait()
        assert self._answer is not None
        return self._answer
