"""Publishing: confirmed, persistent, delayed messages per second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import cycle
from typing import Final

from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import Meter
from benchmarks.suite.raw import RawConnection
from benchmarks.suite.setup import IN_FLIGHT, TARGET, WINDOW, delayed_frames, minutes_clock, prepare, random_minutes
from benchmarks.suite.task import Answer, Job
from bide.amqp.url import BrokerUrl
from bide.client.client import connect
from bide.messages.outgoing import OutgoingMessage

RAW: Final = "raw limit"
ASYNC: Final = "bide"
BULK: Final = "bide bulk"
AIO_PIKA: Final = "aio-pika"
CELERY: Final = "Celery"
SMALL: Final = "200 B"
LARGE: Final = "4 KB"

_SIZES: Final = {SMALL: 200, LARGE: 4096}
_SECONDS: Final = 5.0

_CONTESTANTS: Final = (
    # name, function, package
    (RAW, "benchmarks.suite.publish:raw", None),
    (BULK, "benchmarks.suite.publish:bulk", None),
    (ASYNC, "benchmarks.suite.publish:tasks", None),
    (AIO_PIKA, "benchmarks.suite.clients.aio_pika:publish", "aio-pika"),
    ("pika, pipelined", "benchmarks.suite.clients.pika:publish_pipelined", "pika"),
    ("pika, blocking", "benchmarks.suite.clients.pika:publish_blocking", "pika"),
    ("kombu", "benchmarks.suite.clients.kombu:publish", "kombu"),
    (CELERY, "benchmarks.suite.clients.celery:publish", "celery"),
    ("dramatiq", "benchmarks.suite.clients.dramatiq:publish", "dramatiq"),
)


def _cases(plan: Plan) -> Sequence[Case]:
    return [
        Case(
            name=name,
            setting=setting,
            work=work,
            options={"size": size, "seconds": plan.seconds(_SECONDS)},
            rival=package,
        )
        for setting, size in _SIZES.items()
        for name, work, package in _CONTESTANTS
    ]


PUBLISH: Final = Measurement(
    name="publish",
    title="Publish delayed messages",
    about=(
        "Every message is persistent, confirmed by the broker, and delayed by 10 to 59 whole minutes at random; one "
        f"connection, for {_SECONDS:g} s. The raw limit writes pre-encoded frames and counts confirms, with the "
        f"window of `publish_many` ({WINDOW:,} messages). bide and aio-pika have {IN_FLIGHT:,} tasks, each of which "
        "publishes a message and waits for its confirm, repeatedly. pika is measured twice: `SelectConnection` with "
        "the same window (pipelined), and `BlockingConnection`, which waits for each confirm, as kombu, Celery "
        "(`apply_async(countdown=...)` with `confirm_publish`) and dramatiq (`send_with_options(delay=...)` with "
        "`confirm_delivery`) do. All clients except the last two send through the same queues of `Clock`, and the "
        "benchmark gives clients other than bide the headers; Celery uses its own cascade, dramatiq its one classic "
        "queue for delayed messages."
    ),
    cases=_cases,
)


def raw(job: Job) -> Answer:
    """Frames that were encoded before."""
    infrastructure = asyncio.run(prepare(job.url, minutes_clock()))
    frames = delayed_frames(infrastructure, random_minutes(), job.options["size"])
    connection = RawConnection.open(BrokerUrl.parse(job.url))
    meter = Meter(job.pid)
    end = time.perf_counter() + job.options["seconds"]
    sent = connection.publish(frames, window=WINDOW, until=lambda sent: time.perf_counter() >= end)
    values = meter.read(sent)
    connection.close()
    return Answer(values=values)


async def bulk(job: Job) -> Answer:
    """``publish_many``."""
    clock = minutes_clock()
    await prepare(job.url, clock)
    async with connect(job.url, infrastructure=clock) as client:
        await client.publish(b"", to=TARGET, delay=timedelta(hours=0, minutes=59))
        meter = Meter(job.pid)
        report = await client.publish_many(_letters(job), window=WINDOW)
        return Answer(values=meter.read(report.confirmed))


def _letters(job: Job) -> Iterator[OutgoingMessage]:
    body, delays = bytes(job.options["size"]), cycle(random_minutes())
    end = time.perf_counter() + job.options["seconds"]
    while time.perf_counter() < end:
        for _ in range(50):
            yield OutgoingMessage(body, to=TARGET, delay=next(delays))


async def tasks(job: Job) -> Answer:
    """``publish`` by many tasks at once."""
    clock = minutes_clock()
    await prepare(job.url, clock)
    body, delays = bytes(job.options["size"]), cycle(random_minutes())
    async with connect(job.url, infrastructure=clock) as client:
        await client.publish(b"", to=TARGET, delay=timedelta(minutes=59))
        meter = Meter(job.pid)
        end = time.perf_counter() + job.options["seconds"]

        async def publish() -> int:
            sent = 0
            while time.perf_counter() < end:
                await client.publish(body, to=TARGET, delay=next(delays))
                sent += 1
            return sent

        sent = sum(await asyncio.gather(*(publish() for _ in range(IN_FLIGHT))))
        return Answer(values=meter.read(sent))
