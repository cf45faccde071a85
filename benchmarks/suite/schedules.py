"""Scheduling: confirmed schedules with keys per second, and the gate that follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count, cycle
from typing import Final

from benchmarks.suite.gates import GateProcess, one_gate, wait_for_schedules
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import IN_FLIGHT, TARGET, WINDOW, minutes_clock, prepare, random_minutes
from benchmarks.suite.task import Answer, Job, Values
from bide.client.client import Client, connect
from bide.messages.outgoing import OutgoingMessage
from bide.schedules.outgoing import OutgoingSchedule

KEYED: Final = "with a key"
UNKEYED: Final = "without a key (Clock)"
TASKS: Final = "tasks"
BULK: Final = "publish_many"

_SECONDS: Final = 5.0
_BODY: Final = 200
_MESSAGE: Final = bytes(_BODY)
_CATCH_UP: Final = timedelta(minutes=5)


def _cases(plan: Plan) -> Sequence[Case]:
    return [
        Case(
            name=name,
            setting=setting,
            work=f"benchmarks.suite.schedules:{work}",
            options={"seconds": plan.seconds(_SECONDS), "is_keyed": is_keyed},
        )
        for setting, work in ((TASKS, "tasks"), (BULK, "bulk"))
        for name, is_keyed in ((KEYED, True), (UNKEYED, False))
    ]


SCHEDULES: Final = Measurement(
    name="schedules",
    title="Schedule messages with keys",
    about=(
        f"Messages of {_BODY} bytes, delayed by 10 to 59 whole minutes at random, on one connection for {_SECONDS:g} "
        f"s: by `publish_many`, or by {IN_FLIGHT:,} tasks, each of which schedules a message and waits for its "
        "confirm. Messages with a key are appended to the schedule log, and each key is new; messages without one go "
        "into the queues of `Clock`. One gate reads the log meanwhile. *Gate behind* is the time from the last confirm "
        "until it has read everything, and *gate CPU* all that it used until then."
    ),
    cases=_cases,
    broker="fresh",
)


async def tasks(job: Job) -> Answer:
    """``schedule`` or ``publish`` by many tasks at once."""

    async def run(client: Client) -> int:
        end, numbers, delays = time.perf_counter() + job.options["seconds"], count(), cycle(random_minutes())

        async def send() -> int:
            sent = 0
            while time.perf_counter() < end:
                if job.options["is_keyed"]:
                    await client.schedule(_MESSAGE, key=f"key:{next(numbers)}", to=TARGET, delay=next(delays))
                else:
                    await client.publish(_MESSAGE, to=TARGET, delay=next(delays))
                sent += 1
            return sent

        return sum(await asyncio.gather(*(send() for _ in range(IN_FLIGHT))))

    return await _measured(job, run)


async def bulk(job: Job) -> Answer:
    """``publish_many``."""

    async def run(client: Client) -> int:
        return (await client.publish_many(_made(job), window=WINDOW)).confirmed

    return await _measured(job, run)


def _made(job: Job) -> Iterator[OutgoingMessage | OutgoingSchedule]:
    numbers, delays = count(), cycle(random_minutes())
    end = time.perf_counter() + job.options["seconds"]
    while time.perf_counter() < end:
        for _ in range(50):
            if job.options["is_keyed"]:
                yield OutgoingSchedule(_MESSAGE, key=f"key:{next(numbers)}", to=TARGET, delay=next(delays))
            else:
                yield OutgoingMessage(_MESSAGE, to=TARGET, delay=next(delays))


async def _measured(job: Job, run: Callable[[Client], Awaitable[int]]) -> Answer:
    clock = minutes_clock()
    await prepare(job.url, clock)
    async with connect(job.url, infrastructure=clock, timeout=_CATCH_UP) as client:
        if not job.options["is_keyed"]:
            await client.publish(b"", to=TARGET, delay=timedelta(minutes=59))
            return Answer(values=await _rate(job, client, run))
        async with one_gate(job.url) as gate:
            await client.schedule(b"", key="key:0", to=TARGET, delay=timedelta(minutes=59))
            return Answer(values=await _rate(job, client, run, gate))


async def _rate(
    job: Job, client: Client, run: Callable[[Client], Awaitable[int]], gate: GateProcess | None = None
) -> Values:
    before = 0.0 if gate is None else gate.processor_seconds
    meter = Meter(job.pid)
    sent = await run(client)
    values = dict(meter.read(sent))
    if gate is not None:
        start = time.perf_counter()
        await wait_for_schedules(client, sent)
        values["behind"] = time.perf_counter() - start
        values["gate_cpu"] = (gate.processor_seconds - before) / sent * 1e6
    return values
