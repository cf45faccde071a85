"""Changes at the moment of delivery, as the race and its client processes make them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import bide
from bide.errors import BideError
from tests.schedule_race.history import Change, What, to_line

QUEUE: Final = "reminders"
ANSWER_TIMEOUT: Final = timedelta(minutes=3)
"""Longer than the broker takes to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A schedule, and its change at the moment of delivery.

    Attributes:
        delay: seconds.
        replacement_delay: seconds.
        offset: seconds between the due time and the change.
    """

    what: What
    key: str
    delay: float
    replacement_delay: float
    offset: float


async def perform(client: bide.Client, task: Task, report: Callable[[Change], None] = lambda known: None) -> Change:
    """Schedule a message, and cancel or replace it.

    Args:
        report: called before each request and after each answer, with what is known then.

    Returns:
        What is known at the end.
    """
    known = Change(what="schedule", key=task.key)
    try:
        report(known)
        made = await client.schedule(f"{task.key}/1", key=task.key, to=QUEUE, delay=f"{task.delay:.3f}s")
        report(replace(known, first=made.id, outcome=made.outcome.value))
        assert made.due_time is not None
        rest = made.due_time - datetime.now(UTC)
        await asyncio.sleep(rest.total_seconds() + task.offset)  # the moment to change it
        known = Change(what=task.what, key=task.key, first=made.id)
        report(known)
        begun = asyncio.get_running_loop().time()
        second: str | None = None
        if task.what == "cancel":
            outcome = (await client.cancel(task.key)).outcome
        else:
            replaced = await client.schedule(
                f"{task.key}/2",
                key=task.key,
                to=QUEUE,
                delay=f"{task.replacement_delay:.3f}s",
                if_version=made.version if task.what == "replace-if" else None,
            )
            outcome, second = replaced.outcome, replaced.id
        seconds = round(asyncio.get_running_loop().time() - begun, 4)
        known = replace(known, second=second, outcome=outcome.value, seconds=seconds)
    except BideError as error:
        known = replace(known, error=repr(error))
    report(known)
    return known


async def main() -> None:
    """Perform the tasks on standard input, and report what is known of them on standard output, a line each."""

    def report(known: Change) -> None:
        print(to_line(known), flush=True)  # before the request that it announces, so that a kill does not lose it

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with bide.connect(timeout=ANSWER_TIMEOUT, wait=ANSWER_TIMEOUT) as client, asyncio.TaskGroup() as tasks:
        async for line in reader:
            tasks.create_task(perform(client, Task(**json.loads(line)), report))


if __name__ == "__main__":
    asyncio.run(main())
