"""The time until another gate delivers what a killed one led."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.suite.gates import GateProcess
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.setup import TARGET
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.consumer import Consumer
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.topology import Queue, Topology

TAKEOVER: Final = "kill -9"

_KILLS: Final = 10
_EVERY: Final = 0.01
_DELAY: Final = timedelta(seconds=1)
_TIMEOUT: Final = 60.0


def _cases(plan: Plan) -> Sequence[Case]:
    options = {"kills": plan.count(_KILLS, least=2)}
    return [Case(name=TAKEOVER, work="benchmarks.suite.takeover:takeover", options=options)]


TAKEOVERS: Final = Measurement(
    name="takeover",
    title="A gate is killed",
    about=(
        "Two gates lead four partitions each, and up to 100 messages/s are scheduled under changing keys, due after "
        "1 s. One gate is killed (SIGKILL), and the take-over ends when a message that was due after the kill has "
        "arrived from each of its partitions. Then it is started again, and when both lead four "
        f"partitions, the other one is killed: {_KILLS} times in all."
    ),
    cases=_cases,
    broker="fresh",
)


class _Arrivals:
    """The latest due time of a message that was received from each partition."""

    def __init__(self) -> None:
        self.due = [0.0] * PARTITIONS
        self.changed = asyncio.Condition()

    async def receive(self, messages: Consumer) -> None:
        """Take messages until cancelled."""
        async for message in messages:
            assert message.key is not None
            assert message.due is not None
            number = partition_of(message.key)
            self.due[number] = max(self.due[number], message.due.timestamp())
            await message.ack()
            async with self.changed:
                self.changed.notify_all()

    async def wait(self, partitions: set[int], due_after: float) -> None:
        """Wait for a message of each partition that was due after a time."""
        async with asyncio.timeout(_TIMEOUT), self.changed:
            await self.changed.wait_for(lambda: all(self.due[one] > due_after for one in partitions))


async def takeover(job: Job) -> Answer:
    """Kill one gate after the other."""
    names = ScheduleNames()
    numbers = {names.log(number): number for number in range(PARTITIONS)}
    seconds: list[float] = []
    with TemporaryDirectory(prefix="bide-bench-", ignore_cleanup_errors=True) as name:
        folders = [Path(name) / str(number) for number in range(2)]
        async with connect(job.url) as client:
            await client.declare(Topology(queues=[Queue.quorum(TARGET)]))
            gates = [GateProcess(job.url, folder) for folder in folders]
            arrivals = _Arrivals()
            async with client.consume(TARGET) as messages:
                running = [
                    asyncio.create_task(arrivals.receive(messages)),
                    asyncio.create_task(_schedule(client)),
                ]
                for kill in range(job.options["kills"]):
                    await asyncio.gather(*(one.wait_until_leading(PARTITIONS // 2) for one in gates))
                    await arrivals.wait(set(range(PARTITIONS)), time.time())
                    victim = kill % 2
                    led = {numbers[stream] for stream in gates[victim].leads()}
                    killed, start = time.time(), time.perf_counter()
                    gates[victim].kill()
                    await arrivals.wait(led, killed)
                    seconds.append(time.perf_counter() - start)
                    gates[victim] = GateProcess(job.url, folders[victim])
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        for gate in gates:
            gate.kill()
    return Answer(values={"takeover_p50": statistics.median(seconds), "takeover_max": max(seconds)})


async def _schedule(client: Client) -> None:
    for number in count():
        await client.schedule(b"", key=f"key:{number}", to=TARGET, delay=_DELAY)
        await asyncio.sleep(_EVERY)  # at most 100 messages a second
