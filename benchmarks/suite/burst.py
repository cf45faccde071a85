"""Time to deliver many messages that are due in the same second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.measurement import DEFAULT_PREFETCH, Case, Measurement, Plan
from benchmarks.suite.setup import TARGET, WINDOW, prepare
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.consumer import Consumer
from bide.delay.clock import Clock
from bide.delay.clock_digits import RESOLUTION
from bide.delay.nservicebus import NServiceBus
from bide.delay.protocol import DelayInfrastructure
from bide.messages.outgoing import OutgoingMessage
from bide.topology import Queue, Topology

ONE_MOMENT: Final = "Clock, to one moment"
ONE_LANE: Final = "Clock, 1 lane"
FOUR_LANES: Final = "Clock, 4 lanes"
CASCADE: Final = "binary cascade"
FLOOR: Final = "one hop"
LOW: Final = "prefetch 32"
HIGH: Final = "prefetch 1,000"

_MESSAGES: Final = 200_000
_MILLION: Final = 1_000_000
_BODY: Final = 200
_WAIT: Final = "wait"
_TOGETHER: Final = 50
"""Messages with the same expiration in the floor: publishing them takes a few milliseconds."""

PREFETCH: Final = 1_000
_SLOWEST: Final = 8_000
"""Messages per second that a publisher reaches at least."""

_MARGIN: Final = 5
"""Seconds between the end of publishing and the due second. The option ``margin`` of a job replaces it."""

_SLOWEST_BURST: Final = 2_000
"""Messages per second that are delivered at least."""

_LEAST_TIMEOUT: Final = 120.0
_DECLARING: Final = 300.0
"""Seconds for the declarations."""

_HALF: Final = timedelta(milliseconds=500)

_ALL: Final = (
    (FLOOR, "floor", 0),
    (ONE_MOMENT, "clock", 1),
    (ONE_LANE, "one queue", 1),
    (FOUR_LANES, "one queue", 4),
    (CASCADE, "cascade", 0),
)
"""Each with its layout and the number of its lanes."""


def timeout_of(messages: int) -> float:
    """Seconds after the due time by which this number of messages arrives on any machine."""
    return max(_LEAST_TIMEOUT, messages / _SLOWEST_BURST)


def _cases(plan: Plan, *, full: int = _MESSAGES, contestants: Sequence[tuple[str, str, int]] = _ALL) -> Sequence[Case]:
    messages = plan.count(full)
    return [
        Case(
            name=name,
            setting=setting,
            work=f"benchmarks.suite.burst:{'floor' if name == FLOOR else 'burst'}",
            options={"messages": messages, "layout": layout, "lanes": lanes},
            dead_letter_prefetch=prefetch,
            timeout=_DECLARING + _ahead(messages) + timeout_of(messages),
        )
        for setting, prefetch in ((LOW, 32), (HIGH, DEFAULT_PREFETCH))
        for name, layout, lanes in contestants
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
        "of NServiceBus the messages leave through its last levels. *One hop* is the least that any delay queue needs: "
        "all messages wait in one quorum queue that dead-letters at least once, straight to the target queue, with an "
        "expiration that ends in the same moment. *Prefetch* is "
        "`dead_letter_worker_consumer_prefetch`, 32 by default. The time is measured from the beginning of the due "
        "second (with `Clock`, half a second later), or from the common due time, to the last receipt."
    ),
    cases=_cases,
    broker="fresh",
)


MILLION: Final = Measurement(
    name="million",
    title="A million messages due in the same second",
    about=(
        f"As [above](#many-messages-due-in-the-same-second), with {_MILLION:,} messages: one hop, `Clock` to one "
        "moment, and the worst case of `Clock` with four lanes."
    ),
    cases=partial(
        _cases, full=_MILLION, contestants=[one for one in _ALL if one[0] in (FLOOR, ONE_MOMENT, FOUR_LANES)]
    ),
    broker="fresh",
)


def infrastructure_of(job: Job) -> DelayInfrastructure:
    """The compared infrastructures: ``clock`` and ``one queue`` (of Clock, in lanes), or ``cascade``.

    The longest delay of Clock is in whole minutes, and longer than the publishing takes.
    """
    layout = job.options["layout"]
    if layout == "cascade":
        return NServiceBus(routing="direct")
    resolution = _HALF if layout == "one queue" else RESOLUTION
    longest = timedelta(minutes=_ahead_of(job) // 60 + 1)
    return Clock(lanes=job.options["lanes"], max_delay=longest - resolution, resolution=resolution)


def _ahead(messages: int, margin: int = _MARGIN) -> int:
    """Seconds from the beginning of publishing to the due second."""
    return messages // _SLOWEST + margin


def _ahead_of(job: Job) -> int:
    return _ahead(job.options["messages"], job.options.get("margin", _MARGIN))


async def burst(job: Job) -> Answer:
    """Publish, wait for the due second, and receive."""
    infrastructure = infrastructure_of(job)
    await prepare(job.url, infrastructure)
    async with (
        connect(job.url, infrastructure=infrastructure) as client,
        client.consume(TARGET, prefetch=PREFETCH) as arriving,
    ):
        await client.publish(b"", to=TARGET, delay=infrastructure.resolution)
        await (await anext(arriving)).ack()
        return await _received(arriving, job, await send(client, job))


async def floor(job: Job) -> Answer:
    """The same by one queue that dead-letters to the target."""
    topology = Topology(queues=[Queue.quorum(TARGET), _waiting_queue()])
    async with connect(job.url) as client:
        await client.declare(topology)
        async with client.consume(TARGET, prefetch=PREFETCH) as arriving:
            due = time.time() + _ahead_of(job)
            await client.publish_many(_expiring(job.options["messages"], due), window=WINDOW)
            _check_is_ahead(job, due)
            return await _received(arriving, job, due)


def _waiting_queue() -> Queue:
    """With the arguments of the queues of Clock, except for the time to live."""
    return Queue.quorum(
        _WAIT,
        arguments={
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": TARGET,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )


def _expiring(messages: int, due: float) -> Iterator[OutgoingMessage]:
    body, expiration = bytes(_BODY), timedelta(0)
    for number in range(messages):
        if number % _TOGETHER == 0:
            expiration = timedelta(milliseconds=max(round((due - time.time()) * 1_000), 1))
        yield OutgoingMessage(body, to=_WAIT, expiration=expiration)


async def _received(arriving: Consumer, job: Job, due: float) -> Answer:
    messages, received = job.options["messages"], 0
    async with asyncio.timeout(due - time.time() + timeout_of(messages)):
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
    layout, ahead = job.options["layout"], _ahead_of(job)
    start = time.time()
    extra = _HALF if layout == "one queue" else timedelta(0)
    due = start + ahead + extra.total_seconds()
    outgoing = _at(messages, due) if layout == "clock" else _in_seconds(messages, start, ahead, extra=extra)
    await client.publish_many(outgoing, window=WINDOW)
    _check_is_ahead(job, due)
    return due


def _check_is_ahead(job: Job, due: float) -> None:
    if time.time() > due - 1:
        raise BenchmarkError(f"publishing {job.options['messages']} messages took longer than {_ahead_of(job)} s")


def _at(messages: int, due: float) -> Iterator[OutgoingMessage]:
    body, moment = bytes(_BODY), datetime.fromtimestamp(due, UTC)
    for _ in range(messages):
        yield OutgoingMessage(body, to=TARGET, deliver_at=moment)


def _in_seconds(messages: int, start: float, ahead: int, *, extra: timedelta) -> Iterator[OutgoingMessage]:
    body = bytes(_BODY)
    for _ in range(messages):
        passed = int(time.time() - start)
        yield OutgoingMessage(body, to=TARGET, delay=timedelta(seconds=max(ahead - passed, 1)) + extra)
