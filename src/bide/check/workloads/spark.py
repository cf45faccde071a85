"""Delayed messages written by the Spark sink, in a Spark session of the run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar, Final

from bide.check.recorder import Draft
from bide.check.workloads.base import CheckWorkload, Stage
from bide.errors import BideError
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MASTER: Final = "local[4, 3]"
"""Four tasks at the same time, each of which Spark tries up to three times."""

log = logger(__name__)

_TASKS: Final = 2
"""Tasks of a write."""

_WRITES: Final = 2
"""Writes at the same time."""

_REPORT_SECONDS: Final = 30.0
"""Seconds to wait until Spark reports the end of a job that has ended: it reports in the background."""

_POLL_SECONDS: Final = 0.05
"""Seconds between two questions to Spark."""

_COLUMNS: Final = "value binary, queue string, deliver_at timestamp, message_id string, headers_json string"

Message = tuple[Draft, str, datetime]
"""A message, its queue and its due time."""


class SparkWorkload(CheckWorkload):
    """Rows with due times to three queues, in a write for each second."""

    name: ClassVar = "spark"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._opening: AbstractContextManager[SparkSession] | None = None
        self._writes = 0

    @classmethod
    def missing(cls) -> str | None:
        """PySpark or Java, if this machine lacks it."""
        from bide.pipelines.requirements import missing

        return missing()

    async def warm_up(self) -> None:
        """Start Spark, and wait until it has written a message."""
        from bide.pipelines.session import session
        from bide.spark import register

        self._opening = session(_MASTER, name="bide check", configuration={}, time_zone="UTC")
        self._session = await asyncio.to_thread(self._opening.__enter__)
        register(self._session)
        await self._write([0], suffix="/warm-up", role="blocked")
        await self.stage.recorder.until_complete()

    async def send(self) -> None:
        """Write the messages of each second in one job. While two writes are under way, wait."""
        numbers: list[int] = []
        slots = asyncio.Semaphore(_WRITES)
        async with asyncio.TaskGroup() as tasks:
            async for number in self.pace():
                numbers.append(number)
                if len(numbers) >= self.stage.rate:
                    await slots.acquire()
                    tasks.create_task(self._write(numbers)).add_done_callback(lambda _: slots.release())
                    numbers = []

    async def close(self) -> None:
        """Stop Spark."""
        if self._opening is not None:
            await asyncio.to_thread(self._opening.__exit__, None, None, None)

    async def _write(self, numbers: Sequence[int], *, suffix: str = "", role: str = "message") -> None:
        messages: list[Message] = []
        for number in numbers:
            queue = self.stage.rng.choice(self.queues)
            draft = self.draft(number, routing_key=queue, suffix=suffix)
            messages.append((draft, queue, self.stage.client.now() + self.random_delay()))
        self._writes += 1
        group = f"{self.stage.recorder.run}-{self._writes}"
        outcome, expected = "confirmed", "delivered"
        try:
            await asyncio.to_thread(self._save, group, messages)
        except BideError as error:
            # Tasks that did not fail, or attempts before the last one, may have sent messages.
            outcome, expected = type(error).__name__, "unknown"
        written, attempts = self.stage.client.now(), 1 + await asyncio.to_thread(self._failed_tasks, group, outcome)
        add_sent = self.stage.recorder.add_sent
        for draft, queue, due in messages:
            add_sent(draft, [queue], outcome=outcome, expected=expected, due=due, attempts=attempts, role=role)
            if due < written:
                # The write may have taken longer than the delay: the message is late from the end of the write on.
                add_sent(draft, [queue], outcome=outcome, expected="unknown", due=written, attempts=attempts, role=role)

    def _save(self, group: str, messages: Sequence[Message]) -> None:
        from bide.pipelines.session import spark_errors

        with spark_errors(sending=True):
            self._session.sparkContext.setJobGroup(group, "bide check")
            table = self.table(messages).repartition(_TASKS)
            table.write.format("rabbitmq").mode("append").options(**self._options()).save()

    def _options(self) -> dict[str, str]:
        """The options of the sink: the delay queues of the run, which it has declared in advance."""
        clock, millisecond = self.stage.infrastructure, timedelta(milliseconds=1)
        return {
            "url": self.stage.url,
            "maxDelay": f"{clock.max_delay // millisecond}ms",
            "resolution": f"{clock.resolution // millisecond}ms",
            "declare": "false",
        }

    def table(self, messages: Sequence[Message]) -> DataFrame:
        """The rows of a write."""
        rows = [(draft.body, queue, due, draft.id, json.dumps(draft.headers)) for draft, queue, due in messages]
        # This also makes the session the active one of this thread, so that Spark finds the data source.
        return self._session.createDataFrame(rows, _COLUMNS)

    def _failed_tasks(self, group: str, outcome: str) -> int:
        """How many tasks of a write failed. Spark repeats them, and the sink then sends their rows again.

        Args:
            outcome: of the write. One that is confirmed had jobs.
        """
        tracker = self._session.sparkContext.statusTracker()
        deadline = time.monotonic() + _REPORT_SECONDS
        while True:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            # The end of a job is reported after the failures of its tasks.
            has_ended = all(job is not None and job.status != "RUNNING" for job in jobs)
            if has_ended and (jobs or outcome != "confirmed"):
                break
            if time.monotonic() > deadline:
                log.warning("Spark has not reported the end of the jobs of %s within %g s", group, _REPORT_SECONDS)
                break
            time.sleep(_POLL_SECONDS)  # the tracker announces nothing
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numFailedTasks for stage in stages if stage is not None)
