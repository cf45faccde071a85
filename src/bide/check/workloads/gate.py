"""Schedules with keys, some cancelled or replaced, and the gates that deliver them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import count
from typing import ClassVar, Final

from bide.check.processes import CommandProcess
from bide.check.workloads.base import SingleMessageWorkload, expected_after
from bide.client.schedule_result import ScheduleOutcome
from bide.errors import BideError
from bide.schedules.names import PARTITIONS, partition_of

_GATES: Final = 2
_AFTER: Final = timedelta(milliseconds=200)
"""Schedules are changed up to this long after their due time, so that some changes are too late."""


class GateWorkload(SingleMessageWorkload):
    """Schedules to three queues, and two gates.

    Of five schedules, two are kept, one is cancelled, one is replaced, and one is replaced if it is unchanged, on
    average.
    """

    name: ClassVar = "gate"

    async def prepare(self) -> None:
        """Prepare the gates."""
        for number in range(1, _GATES + 1):
            state = self.stage.folder / f"gate-{number}"
            self.processes.append(
                CommandProcess(
                    f"gate-{number}",
                    ["gate", "--state", str(state), "--allow", "check.gate.*"],
                    self.stage.url,
                    self.stage.folder,
                )
            )

    async def warm_up(self) -> None:
        """Wait until gates deliver in each partition.

        Meanwhile the gates divide the partitions between them, and a message that the previous leader of a partition
        has in flight may arrive twice.
        """
        for partition in range(PARTITIONS):
            key = next(key for key in map(str, count()) if partition_of(key) == partition)
            queue = self.queues[0]
            draft = self.draft(partition, routing_key=queue, suffix="/warm-up")
            made = await self.stage.client.schedule(
                draft.body, key=key, to=queue, delay=timedelta(0), headers=draft.headers, message_id=draft.id
            )
            self.stage.recorder.add_sent(
                draft, [queue], outcome="scheduled", expected="delivered", due=made.due_time, role="blocked"
            )
        await self.stage.recorder.until_complete()

    async def send_one(self, number: int) -> None:
        """Schedule a message, and change it."""
        client, rng, recorder = self.stage.client, self.stage.rng, self.stage.recorder
        queue, key = rng.choice(self.queues), f"{recorder.run}-{number}"
        delay, change_at = self.random_delay(), rng.random()
        what = rng.choice(("keep", "keep", "cancel", "replace", "replace-if"))
        first = self.draft(number, routing_key=queue, suffix="/1")
        try:
            made = await client.schedule(
                first.body, key=key, to=queue, delay=delay, headers=first.headers, message_id=first.id
            )
        except BideError as error:
            recorder.add_sent(first, [queue], outcome=type(error).__name__, expected=expected_after(error))
            return
        if what == "keep":
            recorder.add_sent(first, [queue], outcome="scheduled", expected="delivered", due=made.due_time)
            return
        await asyncio.sleep(change_at * (delay + _AFTER).total_seconds())  # until the change
        if what == "cancel":
            try:
                outcome = (await client.cancel(key)).outcome
            except BideError as error:
                recorder.add_sent(first, [queue], outcome=type(error).__name__, expected="unknown", due=made.due_time)
                return
            recorder.add_sent(
                first, [queue], outcome=outcome.value, expected=_CANCELS.get(outcome, "impossible"), due=made.due_time
            )
            return
        second = self.draft(number, routing_key=queue, suffix="/2")
        version = made.version if what == "replace-if" else None
        try:
            replaced = await client.schedule(
                second.body,
                key=key,
                to=queue,
                delay=self.random_delay(),
                headers=second.headers,
                message_id=second.id,
                if_version=version,
            )
        except BideError as error:
            name = type(error).__name__
            recorder.add_sent(first, [queue], outcome=name, expected="unknown", due=made.due_time)
            recorder.add_sent(second, [queue], outcome=name, expected="unknown")
            return
        answer = replaced.outcome
        before, after = _REPLACES.get((what, answer), ("impossible", "impossible"))
        recorder.add_sent(first, [queue], outcome=f"{what}: {answer.value}", expected=before, due=made.due_time)
        recorder.add_sent(second, [queue], outcome=answer.value, expected=after, due=replaced.due_time)


_CANCELS: Final = {ScheduleOutcome.CANCELLED: "nothing", ScheduleOutcome.TOO_LATE: "delivered"}

_REPLACES: Final = {
    ("replace", ScheduleOutcome.SCHEDULED): ("unknown", "delivered"),
    ("replace-if", ScheduleOutcome.SCHEDULED): ("nothing", "delivered"),
    ("replace-if", ScheduleOutcome.CHANGED): ("delivered", "nothing"),
}
"""What is expected of the first and of the second message after an answer. Other answers are impossible."""
