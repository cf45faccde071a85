"""Lateness of delayed messages beside undelayed ones of the same run, and its limits."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import bide
from benchmarks.suite.machine import stolen_seconds
from benchmarks.suite.percentiles import percentile
from bide.admin.infrastructure import install
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from tests.timeouts import TIMEOUT
from tests.timing.undelayed import UndelayedMessages

INFRASTRUCTURES: Final[Mapping[str, bide.DelayInfrastructure]] = {
    "clock": bide.Clock(max_delay=timedelta(seconds=5)),
    "nservicebus": bide.NServiceBus(routing="direct"),
    "celery": bide.Celery(),
}

RATE: Final = 30.0
"""Messages per second of each infrastructure."""

SHORTEST: Final = timedelta(seconds=1)
LONGEST: Final = timedelta(seconds=3)
"""Delays between these two take one or two hops through the queues of an infrastructure."""

_RESOLUTION: Final = timedelta(milliseconds=10)

PER_HOP: Final[Mapping[int, float]] = {50: 0.75, 99: 2.0}
MARGIN_MS: Final = 35.0
"""The limit of a percentile of the lateness: that of undelayed messages, this part of it more per hop, and a margin.

On two cores that 20 to 30 other processes competed for, half of the undelayed messages took up to 7 to 21 ms, and half
of the delayed ones were up to 10 to 65 ms late: within the limits, and above them with 50 ms more. Where other
processes slow undelayed messages down to 30 ms, the limits may fail without cause.
"""

MAX_STEAL: Final = 0.05
"""A round counts if the host of the virtual machine withheld no more than this part of the time of its cores."""

MAX_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """Messages through one delay infrastructure.

    Attributes:
        milliseconds: lateness of each message: from its due time to its receipt. The due time is that of the caller:
            when ``publish`` was called, plus the delay.
        hops: mean number of queues that a message waited in.
    """

    milliseconds: Sequence[float]
    hops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Delayed and undelayed messages of the same time, on the same broker.

    Attributes:
        undelayed: milliseconds from sending to receipt, of each undelayed message.
        delayed: by the name of the infrastructure.
        steal: part of the time of all cores that the host of a virtual machine withheld meanwhile.
    """

    undelayed: Sequence[float]
    delayed: Mapping[str, Delayed]
    steal: float

    def too_late(self) -> dict[str, list[int]]:
        """The percentiles above their limit, by the name of the infrastructure; empty if all messages were on time."""
        found = {}
        for name, one in self.delayed.items():
            ordered = sorted(one.milliseconds)
            limits = self._limits(one.hops).items()
            if percents := [percent for percent, limit in limits if percentile(ordered, percent) > limit]:
                found[name] = percents
        return found

    def _limits(self, hops: float) -> dict[int, float]:
        ordered = sorted(self.undelayed)
        return {
            percent: percentile(ordered, percent) * (1 + more * hops) + MARGIN_MS for percent, more in PER_HOP.items()
        }

    def __str__(self) -> str:
        lines = [f"undelayed: {_described(self.undelayed)}, steal {self.steal:.1%}"]
        for name, one in self.delayed.items():
            limits = ", ".join(f"p{percent} {limit:.1f}" for percent, limit in self._limits(one.hops).items())
            lines.append(f"{name}: {_described(one.milliseconds)}, {one.hops:.1f} hops, limits {limits} ms")
        return "\n".join(lines)


async def without_steal(measure: Callable[[], Awaitable[Round]]) -> Round:
    """The first round with little CPU steal, or the last of :data:`MAX_ROUNDS`; its result decides nothing here."""
    for _ in range(MAX_ROUNDS - 1):
        found = await measure()
        if found.steal <= MAX_STEAL:
            return found
    return await measure()


async def measure(
    url: str,
    *,
    seconds: float,
    client_url: str | None = None,
    infrastructures: Mapping[str, bide.DelayInfrastructure] = INFRASTRUCTURES,
    rate: float = RATE,
    consumer_pause: float = 0.0,
) -> Round:
    """Publish to the infrastructures and, undelayed, to one more queue for some seconds, and receive everything.

    Args:
        url: of a virtual host for this round.
        client_url: what the clients of delayed messages connect to, if not *url*.
        rate: messages per second of each infrastructure.
        consumer_pause: seconds that the consumers of delayed messages sleep before each message is counted.
    """
    async with AsyncExitStack() as stack:
        flows = []
        for name, infrastructure in infrastructures.items():
            await _install(url, infrastructure)
            connecting = bide.connect(client_url or url, infrastructure=infrastructure, declare=False)
            flow = _Flow(name, infrastructure, await stack.enter_async_context(connecting))
            await flow.prepare()
            flows.append(flow)
        stolen, start = _stolen_seconds(), time.monotonic()
        with UndelayedMessages(url) as undelayed:
            found = await asyncio.gather(
                *(flow.run(round(seconds * rate), rate=rate, consumer_pause=consumer_pause) for flow in flows)
            )
        passed = time.monotonic() - start
        steal = (_stolen_seconds() - stolen) / (passed * (os.cpu_count() or 1))
    return Round(undelayed=undelayed.milliseconds, delayed=dict(zip(infrastructures, found, strict=True)), steal=steal)


class _Flow:
    """Messages to a queue through one infrastructure, published and received by the same client."""

    def __init__(self, queue: str, infrastructure: bide.DelayInfrastructure, client: bide.Client) -> None:
        self._queue = queue
        self._client = client
        self._chance = random.Random(queue)
        self._step = max(infrastructure.resolution, _RESOLUTION)
        self._due: list[float] = []

    async def prepare(self) -> None:
        await self._client.declare(bide.Topology(queues=[bide.Queue.quorum(self._queue)]))
        await self._client.bind(self._queue)

    async def run(self, count: int, *, rate: float, consumer_pause: float) -> Delayed:
        async with asyncio.timeout(TIMEOUT):
            publishing = asyncio.create_task(self._publish(count, rate))
            milliseconds = await self._receive(count, consumer_pause)
            return Delayed(milliseconds=milliseconds, hops=await publishing)

    async def _publish(self, count: int, rate: float) -> float:
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            publishes = []
            for number in range(count):
                await asyncio.sleep(start + (number + self._chance.random()) / rate - time.monotonic())  # the rate
                delay = self._chance.randint(SHORTEST // self._step, LONGEST // self._step) * self._step
                self._due.append(time.monotonic() + delay.total_seconds())
                publish = self._client.publish(str(number), to=self._queue, delay=delay)
                publishes.append(group.create_task(publish))
        return statistics.fmean(publish.result().hops for publish in publishes)

    async def _receive(self, count: int, pause: float) -> list[float]:
        milliseconds: list[float] = []
        async with self._client.consume(self._queue) as messages:
            async for message in messages:
                await asyncio.sleep(pause)  # of the receiver, as given
                milliseconds.append((time.monotonic() - self._due[int(message.body)]) * 1_000)
                await message.ack()
                if len(milliseconds) == count:
                    break
        return milliseconds


async def _install(url: str, infrastructure: bide.DelayInfrastructure) -> None:
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        await install(connection, infrastructure)
    finally:
        await connection.close()


def _stolen_seconds() -> float:
    """0 where the kernel is not Linux, and reports no steal."""
    return stolen_seconds() if Path("/proc/stat").exists() else 0.0


def _described(milliseconds: Sequence[float]) -> str:
    ordered = sorted(milliseconds)
    return ", ".join(f"p{percent} {percentile(ordered, percent):.1f}" for percent in PER_HOP) + " ms"
