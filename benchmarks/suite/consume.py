"""Receiving: messages per second, each acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from benchmarks.suite.handled import Handled
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import Meter
from benchmarks.suite.raw import RawConnection
from benchmarks.suite.setup import TARGET, fill
from benchmarks.suite.task import Answer, Job
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.client.message import Message
from bide.endpoint.endpoint import Endpoint

_MESSAGES: Final = 100_000
_PREFETCH: Final = 1_000
_BODY: Final = 200

BIDE: Final = "bide"
ENDPOINT: Final = "bide Endpoint"
FASTSTREAM: Final = "FastStream"
TASKIQ: Final = "taskiq"

_CONTESTANTS: Final = (
    ("raw limit", "benchmarks.suite.consume:raw", None),
    (BIDE, "benchmarks.suite.consume:bide", None),
    (ENDPOINT, "benchmarks.suite.consume:endpoint", None),
    ("aio-pika", "benchmarks.suite.clients.aio_pika:consume", "aio-pika"),
    ("pika", "benchmarks.suite.clients.pika:consume", "pika"),
    (FASTSTREAM, "benchmarks.suite.clients.faststream:consume", "faststream"),
    (TASKIQ, "benchmarks.suite.clients.taskiq:consume", "taskiq-aio-pika"),
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
        "the received bytes, and acknowledges all messages at once. bide's `Endpoint`, FastStream and taskiq call an "
        "empty `async` handler, with their defaults but for the prefetch, from the first call of the handler on. "
        "taskiq's messages have a body of its own format, of the same size."
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


async def endpoint(job: Job) -> Answer:
    """An ``Endpoint`` with an empty handler."""
    await fill(job)
    handled = Handled(job)
    receiver = Endpoint(TARGET, prefetch=job.options["prefetch"])

    @receiver.handler
    async def handle(message: Message) -> None:
        handled.add()

    async with connect(job.url) as client:
        running = asyncio.create_task(receiver.run(client))
        answer = await handled.answer()
        receiver.stop()
        await running
        return answer
