"""The time that a cancel takes, as a multiple of a confirmed publish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, Final

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.gates import GateProcess, one_gate, wait_for_schedules
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.pace import paced_async
from benchmarks.suite.percentiles import percentile
from benchmarks.suite.processor import processor_seconds
from benchmarks.suite.setup import TARGET, WINDOW
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.schedule_result import ScheduleOutcome
from bide.schedules.outgoing import OutgoingSchedule
from bide.topology import Queue, Topology

CANCEL: Final = "cancel"
ALONE: Final = "alone"
STEADY: Final = "1,000/s"

_RATE: Final = 1_000
_SECONDS: Final = 40.0
"""Half of them are for publishes."""

_TURN: Final = 2.0
"""Seconds of one kind at a steady rate, before the other has its turn."""

_CALLS: Final = 2_000
_BODY: Final = 200


def _cases(plan: Plan) -> Sequence[Case]:
    alone = {"calls": plan.count(_CALLS)}
    seconds = plan.seconds(_SECONDS, least=1)
    steady = {"rate": _RATE, "seconds": seconds, "turn": min(_TURN, seconds / 2)}
    return [
        Case(name=CANCEL, setting=ALONE, work="benchmarks.suite.cancel:alone", options=alone),
        Case(name=CANCEL, setting=STEADY, work="benchmarks.suite.cancel:steady", options=steady),
    ]


CANCELS: Final = Measurement(
    name="cancel",
    title="Cancel a schedule",
    about=(
        "The time from the call of `cancel` to the answer `CANCELLED`, beside that of `publish`, not delayed, to its "
        "confirm: on one connection, in the same process, with one gate. Alone, one call follows the other, and the "
        f"two kinds take turns. At {STEADY}, calls start at an even rate, and the kinds take turns every {_TURN:g} s. "
        "A cancel is an append to the schedule log, which the gate reads, applies to its index, and answers. The "
        f"messages have {_BODY} bytes, and the queue keeps the last 1,000. CPU is that of the cancels."
    ),
    cases=_cases,
    broker="fresh",
)


class _Calls:
    """Both kinds of calls, timed, in milliseconds."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._cancelled = 0
        self.publishes: list[float] = []
        self.cancels: list[float] = []

    async def schedule(self, number: int) -> None:
        """Schedule what is to be cancelled, and wait for the gate."""
        made = (
            OutgoingSchedule(bytes(_BODY), key=f"key:{one}", to=TARGET, delay=timedelta(hours=1))
            for one in range(number)
        )
        await self._client.publish_many(made, window=WINDOW)
        await wait_for_schedules(self._client, number)

    async def publish(self) -> None:
        """One publish."""
        start = time.perf_counter()
        await self._client.publish(bytes(_BODY), to=TARGET)
        self.publishes.append((time.perf_counter() - start) * 1000)

    async def cancel(self) -> None:
        """One cancel."""
        key, self._cancelled = f"key:{self._cancelled}", self._cancelled + 1
        start = time.perf_counter()
        result = await self._client.cancel(key)
        self.cancels.append((time.perf_counter() - start) * 1000)
        if result.outcome is not ScheduleOutcome.CANCELLED:
            raise BenchmarkError(f"the cancel of {key} returned {result.outcome.name}")

    def answer(self, **more: float) -> Answer:
        """The percentiles of both."""
        values = dict(more)
        for percent in (50, 99):
            publish, cancel = (percentile(sorted(one), percent) for one in (self.publishes, self.cancels))
            values |= {
                f"publish_p{percent}": publish,
                f"cancel_p{percent}": cancel,
                f"times_p{percent}": cancel / publish,
            }
        return Answer(values=values)


async def alone(job: Job) -> Answer:
    """One call after the other."""
    calls: int = job.options["calls"]

    async def run(timed: _Calls, _gate: GateProcess) -> Answer:
        await timed.schedule(calls)
        for _ in range(calls):
            await timed.publish()
            await timed.cancel()
        return timed.answer()

    return await _with_gate(job, run)


async def steady(job: Job) -> Answer:
    """Calls at an even rate, both kinds in turns."""
    rate, turn = job.options["rate"], job.options["turn"]
    turns = max(round(job.options["seconds"] / turn / 2), 1)

    async def run(timed: _Calls, gate: GateProcess) -> Answer:
        await timed.schedule(round(rate * turn) * turns)
        seconds = used_by_gate = used_by_broker = 0.0
        for _ in range(turns):
            await _paced(timed.publish, rate, turn)
            before, broker_before = gate.processor_seconds, processor_seconds(job.pid)
            seconds += await _paced(timed.cancel, rate, turn)
            used_by_gate += gate.processor_seconds - before
            used_by_broker += processor_seconds(job.pid) - broker_before
        cancels = len(timed.cancels)
        return timed.answer(
            sent=cancels / seconds,
            broker_cpu=used_by_broker / cancels * 1e6,
            gate_cpu=used_by_gate / cancels * 1e6,
        )

    return await _with_gate(job, run)


async def _paced(call: Callable[[], Coroutine[Any, Any, None]], rate: float, seconds: float) -> float:
    """Start calls at a rate, and return the seconds until all were answered."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        async for _ in paced_async(rate, seconds):
            group.create_task(call())
    return time.perf_counter() - start


async def _with_gate(job: Job, run: Callable[[_Calls, GateProcess], Awaitable[Answer]]) -> Answer:
    async with connect(job.url) as client, one_gate(job.url) as gate:
        await client.declare(Topology(queues=[Queue.quorum(TARGET, {"x-max-length": 1_000})]))
        await client.publish(bytes(_BODY), to=TARGET)
        return await run(_Calls(client), gate)
