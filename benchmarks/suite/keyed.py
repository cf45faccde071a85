"""Lateness and broker CPU of messages with a key, beside messages without one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.suite import lateness
from benchmarks.suite.gates import GateProcess, one_gate
from benchmarks.suite.lateness import LONGEST, RATES
from benchmarks.suite.measurement import SMALLEST, Case, Measurement, Plan
from benchmarks.suite.schedules import KEYED, UNKEYED
from benchmarks.suite.task import Answer, Job

SETTINGS: Final = ("500/s", "1,500/s")

_SECONDS: Final = 60.0


def _cases(plan: Plan) -> Sequence[Case]:
    longest = max(round(min(plan.scale / SMALLEST, 1) * LONGEST), 1)
    seconds = plan.seconds(_SECONDS, least=1)
    return [
        Case(
            name=name,
            setting=setting,
            work=work,
            options={
                "rate": RATES[setting],
                "seconds": seconds,
                "longest": longest,
                "layout": "clock",
                "step": 1_000,
                "is_keyed": is_keyed,
            },
        )
        for setting in SETTINGS
        for name, work, is_keyed in (
            (KEYED, "benchmarks.suite.keyed:keyed", True),
            (UNKEYED, "benchmarks.suite.lateness:bide", False),
        )
    ]


KEYED_LATENESS: Final = Measurement(
    name="keyed",
    title="Lateness with a key and without",
    about=(
        f"As [lateness at a steady rate](#lateness-at-a-steady-rate): 200 bytes, published evenly for {_SECONDS:g} s, "
        f"with delays of 1 to {LONGEST} whole seconds at random, to a quorum queue that is consumed meanwhile. "
        "Messages with a key are scheduled, each under a key of its own, and delivered by one gate; messages without "
        "one pass the queues of `Clock`. *Gate CPU* is the processor time of the gate."
    ),
    cases=_cases,
    broker="fresh",
)


async def keyed(job: Job) -> Answer:
    """As :func:`benchmarks.suite.lateness.bide`, with a gate."""
    used: list[float] = []
    async with one_gate(job.url) as gate:
        answer = await lateness.bide(job, around=_metered(gate, used))
    messages = job.options["rate"] * job.options["seconds"]
    return Answer(values={**answer.values, "gate_cpu": used[0] / messages * 1e6})


@asynccontextmanager
async def _metered(gate: GateProcess, used: list[float]) -> AsyncIterator[None]:
    before = gate.processor_seconds
    yield
    used.append(gate.processor_seconds - before)
