"""Time to deliver many messages that are due in the same second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.measurement import DEFAULT_PREFETCH, Case, Measurement, Plan
from benchmarks.suite.setup import TARGET, WINDOW, prepare
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.delay.clock import Clock
from bide.delay.clock_digits import RESOLUTION
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure
from bide.messages.outgoing import OutgoingMessage

ONE_MOMENT: Final = "Clock, to one moment"
ONE_LANE: Final = "Clock, 1 lane"
FOUR_LANES: Final = "Clock, 4 lanes"
CASCADE: Final = "binary cascade"
LOW: Final = "prefetch 32"
HIGH: Final = "prefetch 1,000"

_MESSAGES: Final = 200_000
_BODY: Final = 200
PREFETCH: Final = 1_000
_SLOWEST: Final = 8_000
"""Messages per second that a publisher reaches at least."""

_MARGIN: Final = 5
"""Seconds between the end of publishing and the due second. The option ``margin`` of a job replaces it."""

TIMEOUT: Final = 120.0
_HALF: Final = timedelta(milliseconds=500)


def _cases(plan: Plan) -> Sequence[Case]:
    messages = plan.count(_MESSAGES)
    return [
        Case(
            name=name,
            setting=setting,
            work="benchmarks.suite.burst:burst",
            options={"messages": messages, "layout": layout, "lanes": lanes},
            dead_letter_prefetch=prefetch,
        )
        for setting, prefetch in ((LOW, 32), (HIGH, DEFAULT_PREFETCH))
        for name, layout, lanes in (
            (ONE_MOMENT, "clock", 1),
            (ONE_LANE, "one queue", 1),
            (FOUR_LANES, "one queue", 4),
            (CASCADE, "cascade", 0),
        )
    ]


BURST: Final = Measurement(
    name="burst",
    title="Many messages due in the same second",
    about=(
        f"{_MESSAGES:,} messages of {_BODY} bytes, published over several seconds, due in one and the same second. "
        "*To one moment*: all messages have the same `deliver_at`, as in a campaign, and `Clock` releases them from "
        "the hundred queues of the last digit at once. In the other cases, the delay is the number of whole seconds "
        "after which the message is due in that second. With `Clock` it is half a second longer, so that all messages "
        "leave through the one queue of the half second, or through its lanes, which is the worst case. In the cascade "
        "of NServiceBus the messages leave through its last levels. *Prefetch* is "
        "`dead_letter_worker_consumer_prefetch`, 32 by default. The time is measured from the beginning of the due "
        "second (with `Clock`, half a second later), or from the common due time, to the last receipt."
    ),
    cases=_cases,
    broker="fresh",
)


def infrastructure_of(layout: str, lanes: int) -> DelayInfrastructure:
    """The compared infrastructures: ``clock`` and ``one queue`` (of Clock, in lanes), or ``cascade``."""
    if layout == "cascade":
        return NServiceBus(routing="direct")
    resolution = _HALF if layout == "one queue" else RESOLUTION
    return Clock(lanes=lanes, max_delay=timedelta(seconds=60) - resolution, resolution=resolution)


async def burst(job: Job) -> Answer:
    """Publish, wait for the due second, and receive."""
    messages, layout = job.options["messages"], job.options["layout"]
    infrastructure = infrastructure_of(layout, job.options["lanes"])
    await prepare(job.url, infrastructure)
    async with (
        connect(job.url, infrastructure=infrastructure) as client,
        client.consume(TARGET, prefetch=PREFETCH) as arriving,
    ):
        await client.publish(b"", to=TARGET, delay=infrastructure.resolution)
        await (await anext(arriving)).ack()
        due = await send(client, job)
        received = 0
        async with asyncio.timeout(due - time.time() + TIMEOUT):
            async for message in arriving:
                await message.ack()
                received += 1
                if received == messages:
                    break
        seconds = time.time() - due
    return Answer(values={"seconds": seconds, "rate": messages / seconds})


async def send(client: Client, job: Job) -> float:
    """Publish all of them; return when they are due, in seconds since the epoch.

    Raises:
        BenchmarkError: it took so long that some have come already.
    """
    messages: int = job.options["messages"]
    layout = job.options["layout"]
    margin: int = job.options.get("margin", _MARGIN)
    ahead = messages // _SLOWEST + margin
    start = time.time()
    extra = _HALF if layout == "one queue" else timedelta(0)
    due = start + ahead + extra.total_seconds()
    outgoing = _at(messages, due) if layout == "clock" else _in_seconds(messages, start, ahead, extra=extra)
    await client.publish_many(outgoing, window=WINDOW)
    if time.time() > due - 1:
        raise BenchmarkError(f"publishing {messages} messages took longer than {ahead} s")
    return due


def _at(messages: int, due: float) -> Iterator[OutgoingMessage]:
    body, moment = bytes(_BODY), datetime.fromtimestamp(due, UTC)
    for _ in range(messages):
        yield OutgoingMessage(body, to=TARGET, deliver_at=moment)


def _in_seconds(messages: int, start: float, ahead: int, *, extra: timedelta) -> Iterator[OutgoingMessage]:
    body = bytes(_BODY)
    for _ in range(messages):
        passed = int(time.time() - start)
        yield OutgoingMessage(body, to=TARGET, delay=timedelta(seconds=max(ahead - passed, 1)) + extra)
