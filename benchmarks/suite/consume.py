"""Receiving: messages per second, each acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import Meter
from benchmarks.suite.raw import RawConnection
from benchmarks.suite.setup import TARGET, fill
from benchmarks.suite.task import Answer, Job
from bide.amqp.url import BrokerUrl
from bide.client.client import connect

_MESSAGES: Final = 100_000
_PREFETCH: Final = 1_000
_BODY: Final = 200

_CONTESTANTS: Final = (
    ("raw limit", "benchmarks.suite.consume:raw", None),
    ("bide", "benchmarks.suite.consume:bide", None),
    ("aio-pika", "benchmarks.suite.clients.aio_pika:consume", "aio-pika"),
    ("pika", "benchmarks.suite.clients.pika:consume", "pika"),
)


def _cases(plan: Plan) -> Sequence[Case]:
    options = {"messages": plan.count(_MESSAGES), "size": _BODY, "prefetch": _PREFETCH}
    return [Case(name=name, work=work, options=options, rival=package) for name, work, package in _CONTESTANTS]


CONSUME: Final = Measurement(
    name="consume",
    title="Receive and acknowledge",
    about=(
        f"{_MESSAGES:,} messages of {_BODY} bytes wait in a quorum queue; one consumer with a prefetch of "
        f"{_PREFETCH:,} receives them and acknowledges each one. The raw limit only looks for delivery tags in "
        "the received bytes, and acknowledges all messages at once."
    ),
    cases=_cases,
)


def raw(job: Job) -> Answer:
    """Without looking at the messages."""
    asyncio.run(fill(job))
    connection = RawConnection.open(BrokerUrl.parse(job.url))
    meter = Meter(job.pid)
    connection.consume(TARGET, prefetch=job.options["prefetch"], messages=job.options["messages"])
    values = meter.read(job.options["messages"])
    connection.close()
    return Answer(values=values)


async def bide(job: Job) -> Answer:
    """``consume``."""
    await fill(job)
    wanted, received = job.options["messages"], 0
    async with connect(job.url) as client:
        meter = Meter(job.pid)
        async with client.consume(TARGET, prefetch=job.options["prefetch"]) as messages:
            async for message in messages:
                await message.ack()
                received += 1
                if received == wanted:
                    break
            return Answer(values=meter.read(received))
