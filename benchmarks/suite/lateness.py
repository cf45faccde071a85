"""Lateness of delayed messages at a steady rate, and their cost for the broker."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import struct
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final

from benchmarks.suite.measurement import SMALLEST, Case, Measurement, Plan
from benchmarks.suite.pace import paced_async
from benchmarks.suite.percentiles import lateness
from benchmarks.suite.processor import Meter
from benchmarks.suite.setup import TARGET, prepare
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.message import Message
from bide.delay.clock import Clock
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure

CLOCK: Final = "Clock"
CASCADE: Final = "binary cascade"
HUNDREDTHS: Final = "Clock, to 10 ms"
UNDELAYED: Final = "no delay"
CELERY: Final = "Celery"
DRAMATIQ: Final = "dramatiq"

RATES: Final = {"500/s": 500, "1,500/s": 1_500, "3,000/s": 3_000}
LONGEST: Final = 60
"""The longest delay, in seconds."""

_SECONDS: Final = 60.0
_PREFETCH: Final = 1_000
_BODY: Final = 200
_GRACE: Final = 60.0
"""Seconds after the last due time in which messages may still come."""

_CALLED_AT: Final = struct.Struct("!d")

_ONE_IN: Final = 100
"""Part of the messages whose headers are measured."""


def _cases(plan: Plan) -> Sequence[Case]:
    # With shorter delays a cascade has less to do: only a run that is a mere try has them.
    seconds, longest = plan.seconds(_SECONDS, least=1), max(round(min(plan.scale / SMALLEST, 1) * LONGEST), 1)
    cases = []
    settings = list(RATES)
    for setting, rate in RATES.items():
        options = {"rate": rate, "seconds": seconds, "longest": longest}
        lower = settings[settings.index(setting) - 1] if setting != settings[0] else None
        for name, layout, step in (
            (CLOCK, "clock", 1_000),
            (CASCADE, "cascade", 1_000),
            (HUNDREDTHS, "clock", 10),
            (UNDELAYED, "clock", 0),
        ):
            work = "benchmarks.suite.lateness:bide"
            own = {"layout": layout, "step": step, "longest": longest if step else 0}
            cases.append(Case(name=name, setting=setting, work=work, options={**options, **own}))
        for name, work, package in (
            (CELERY, "benchmarks.suite.clients.celery:lateness", "celery"),
            (DRAMATIQ, "benchmarks.suite.clients.dramatiq:lateness", "dramatiq"),
        ):
            cases.append(
                Case(name=name, setting=setting, work=work, options=options, rival=package, unless_failed=lower)
            )
    return cases


LATENESS: Final = Measurement(
    name="lateness",
    title="Lateness at a steady rate",
    about=(
        f"{_BODY} bytes, published at an even rate for {_SECONDS:g} s, with delays of 1 to {LONGEST} whole seconds at "
        "random, to a quorum queue that is consumed meanwhile. Lateness is the time from the due time to the receipt. "
        "The binary cascade is the layout of NServiceBus, with the same client. Messages without a delay go straight "
        "to the queue: they show the minimum of time and CPU that any delay adds to. Celery and dramatiq are measured "
        "end to end, from the call to the start of the task, with one sender for every 250/s and a worker on all "
        "cores, up to the highest rate that they sustain. Broker CPU is the total of the node from the first publish "
        "to the last receipt."
    ),
    cases=_cases,
    broker="fresh",
)


def infrastructure_of(layout: str) -> DelayInfrastructure:
    """The compared infrastructures: ``clock`` or ``cascade``."""
    return Clock() if layout == "clock" else NServiceBus(routing="direct")


async def bide(job: Job, *, around: AbstractAsyncContextManager[Any] | None = None) -> Answer:
    """Publish and consume with bide, by any of its infrastructures.

    Args:
        around: entered before the first message is published, left after the last was received.
    """
    infrastructure = infrastructure_of(job.options["layout"])
    await prepare(job.url, infrastructure)
    expected = round(job.options["rate"] * job.options["seconds"])
    receiver = Receiver(delayed=job.options["step"] > 0)
    async with (
        connect(job.url, infrastructure=infrastructure) as client,
        client.consume(TARGET, prefetch=_PREFETCH) as messages,
    ):
        await client.publish(b"", to=TARGET, delay=infrastructure.resolution)
        await (await anext(messages)).ack()
        async with around or nullcontext():
            meter = Meter(job.pid)
            publishing = asyncio.create_task(publish_steadily(client, job))
            try:
                async with asyncio.timeout(job.options["seconds"] + job.options["longest"] + _GRACE):
                    async for message in messages:
                        receiver.take(message)
                        await message.ack()
                        if receiver.count == expected:
                            break
            except TimeoutError:
                pass  # the count is checked below
            sent_per_second = await publishing
            cost = meter.read(expected)
    values = lateness(
        receiver.milliseconds, expected=expected, sent_per_second=sent_per_second, rate=job.options["rate"]
    )
    return Answer(
        values={
            **values,
            "client_cpu": cost["client_cpu"],
            "broker_cpu": cost["broker_cpu"],
            "header_bytes": statistics.fmean(receiver.header_bytes),
        }
    )


class Receiver:
    """Records the lateness of received messages.

    Args:
        delayed: whether they say when they were due; else their bodies begin with the time of the call.

    Attributes:
        milliseconds: how late each message was.
        header_bytes: the size of the headers of some of them, as JSON.
    """

    def __init__(self, *, delayed: bool = True) -> None:
        self._delayed = delayed
        self.milliseconds: list[float] = []
        self.header_bytes: list[int] = []

    @property
    def count(self) -> int:
        """Messages that were taken."""
        return len(self.milliseconds)

    def take(self, message: Message) -> None:
        """Record a message."""
        if self.count % _ONE_IN == 0:
            self.header_bytes.append(len(json.dumps(dict(message.raw.values.get("headers") or {}), default=str)))
        if self._delayed:
            late = message.lateness
            assert late is not None
            self.milliseconds.append(late / timedelta(milliseconds=1))
        else:
            (called_at,) = _CALLED_AT.unpack_from(message.body)
            self.milliseconds.append((message.received_at.timestamp() - called_at) * 1_000)


async def publish_steadily(client: Client, job: Job) -> float:
    """Publish at the rate of the job, delays at random; return the messages per second that were confirmed.

    With ``is_keyed`` they are scheduled, each under a key of its own.
    """
    chance = random.Random(1)
    step = timedelta(milliseconds=job.options["step"])
    most = timedelta(seconds=job.options["longest"]) // step if step else 0
    least = timedelta(seconds=1) // step if step else 0
    sending, sent = set[asyncio.Task[Any]](), 0
    start = time.perf_counter()
    is_keyed = job.options.get("is_keyed", False)
    async for number in paced_async(job.options["rate"], job.options["seconds"]):
        body, delay = _CALLED_AT.pack(time.time()).ljust(_BODY, b"\0"), chance.randint(least, most) * step
        sent_now: Coroutine[Any, Any, object]
        if is_keyed:
            sent_now = client.schedule(body, key=f"key:{number}", to=TARGET, delay=delay)
        else:
            sent_now = client.publish(body, to=TARGET, delay=delay)
        task = asyncio.create_task(sent_now)
        sending.add(task)
        task.add_done_callback(sending.discard)
        sent += 1
    await asyncio.gather(*sending)
    return sent / (time.perf_counter() - start)
