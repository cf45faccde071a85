"""The highest sustained rate of delayed messages through an infrastructure."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from functools import partial
from math import log2
from typing import Final

from benchmarks.suite.fine_cascade import FineCascade
from benchmarks.suite.measurement import SMALLEST, Case, Measurement, Plan
from benchmarks.suite.percentiles import percentile
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, WINDOW, prepare
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.consumer import Consumer
from bide.delay.clock import Clock
from bide.delay.protocol import DelayInfrastructure
from bide.messages.outgoing import OutgoingMessage

CLOCK: Final = "Clock"
CASCADE: Final = "binary cascade"

_BITS: Final = 12
_UNIT: Final = timedelta(milliseconds=10)
_WARM_UP: Final = 90.0
_SECONDS: Final = 90.0
_FIRST: Final = 200_000
_PREFETCH: Final = 1_000
_BODY: Final = 200
_TURN: Final = 50


def _cases(plan: Plan) -> Sequence[Case]:
    # With fewer bits a cascade has less to do: only a run that is a mere try has them.
    bits = max(_BITS + round(min(log2(plan.scale / SMALLEST), 0)), 5)
    longest = (1 << bits) * _UNIT.total_seconds()
    options = {
        "bits": bits,
        "warm_up": plan.seconds(_WARM_UP, least=longest),
        "seconds": plan.seconds(_SECONDS, least=longest / 2),
        "first": plan.count(_FIRST, least=1_000),
    }
    return [
        Case(name=name, work="benchmarks.suite.sustained:sustain", options={**options, "layout": layout})
        for name, layout in ((CLOCK, "clock"), (CASCADE, "cascade"))
    ]


SUSTAINED: Final = Measurement(
    name="sustained",
    title="Delayed messages that go through",
    about=(
        f"Delays of 0 to {(1 << _BITS) - 1:,} units of {_UNIT // timedelta(milliseconds=1)} ms at random, for `Clock` "
        f"(at most two hops) and for a binary cascade that is built with that unit ({_BITS} levels, six hops on "
        "average). To overload the broker all the time, the client keeps twice as many messages in transit as there "
        "would be if all were on time: every five seconds, it sets the limit to the number of messages delivered in "
        f"twice the mean delay. After {_WARM_UP:g} s, the messages that arrive within {_SECONDS:g} s are counted. One "
        "client publishes and consumes."
    ),
    cases=_cases,
    broker="fresh",
)


def infrastructure_of(layout: str, bits: int) -> DelayInfrastructure:
    """The compared infrastructures: ``clock`` or ``cascade``, both in units of 10 ms."""
    if layout == "cascade":
        return FineCascade(levels=bits)
    return Clock(max_delay=timedelta(seconds=60) - _UNIT)


class Flow:
    """Publishes as much as may be under way, and counts what arrives.

    Attributes:
        arrived: messages that were received and acknowledged.
        late: milliseconds, of those that arrived last.
    """

    def __init__(self, *, bits: int, allowed: int) -> None:
        self.arrived = 0
        self.late: deque[float] = deque(maxlen=10_000)
        self._published = 0
        self._highest = (1 << bits) - 1
        self._mean_delay = self._highest * _UNIT.total_seconds() / 2
        self._least = self._allowed = allowed
        self._room = asyncio.Event()
        self._room.set()

    async def publish(self, client: Client) -> None:
        """Publish until cancelled."""
        async with aclosing(self._messages()) as outgoing:
            await client.publish_many(outgoing, window=WINDOW)

    async def _messages(self) -> AsyncGenerator[OutgoingMessage, None]:
        chance, body = random.Random(1), bytes(_BODY)
        while True:
            if self._published - self.arrived >= self._allowed:
                self._room.clear()
                await self._room.wait()
            for _ in range(_TURN):
                self._published += 1
                yield OutgoingMessage(body, to=TARGET, delay=chance.randint(0, self._highest) * _UNIT)

    async def receive(self, messages: Consumer) -> None:
        """Receive until cancelled."""
        async for message in messages:
            await message.ack()
            self.arrived += 1
            if self.arrived % _TURN == 0:
                assert message.lateness is not None
                self.late.append(message.lateness / timedelta(milliseconds=1))
                if self._published - self.arrived < self._allowed:
                    self._room.set()

    async def regulate(self) -> None:
        """Limit waiting messages to the deliveries of twice the mean delay, until cancelled."""
        pause = min(5.0, self._mean_delay)
        while True:
            before, start = self.arrived, time.perf_counter()
            await asyncio.sleep(pause)  # the span that the rate is measured over
            rate = (self.arrived - before) / (time.perf_counter() - start)
            if self.arrived:
                self._allowed = max(round(rate * 2 * self._mean_delay), self._least // 4)


async def sustain(job: Job) -> Answer:
    """Saturate an infrastructure."""
    async with saturated(job) as (flow, run):
        await run(job.options["warm_up"])
        before, meter = flow.arrived, Meter(job.pid)
        flow.late.clear()
        # On a busy machine, none may arrive within a short time.
        while flow.arrived == before:
            await run(job.options["seconds"])
        values = dict(meter.read(flow.arrived - before))
    if flow.late:
        values["p50"] = percentile(sorted(flow.late), 50)
    return Answer(values=values)


@asynccontextmanager
async def saturated(job: Job) -> AsyncGenerator[tuple[Flow, Callable[[float], Awaitable[None]]], None]:
    """An infrastructure with more to do than it can: what goes through, and a function that lets it run for seconds."""
    infrastructure = infrastructure_of(job.options["layout"], job.options["bits"])
    await prepare(job.url, infrastructure)
    flow = Flow(bits=job.options["bits"], allowed=job.options["first"])
    async with (
        connect(job.url, infrastructure=infrastructure) as client,
        client.consume(TARGET, prefetch=_PREFETCH) as messages,
    ):
        endless = [
            asyncio.create_task(work) for work in (flow.publish(client), flow.receive(messages), flow.regulate())
        ]
        try:
            yield flow, partial(_unless_ended, endless)
        finally:
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)


async def _unless_ended(endless: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait so long, or for the error that ends one of the tasks."""
    done, _ = await asyncio.wait(endless, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
