"""The memory and disk that a broker needs for many waiting messages."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.lateness import CASCADE, CLOCK, Receiver, infrastructure_of, publish_steadily
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.percentiles import lateness
from benchmarks.suite.processor import resident_bytes
from benchmarks.suite.setup import TARGET, WINDOW, prepare
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.delay.protocol import DelayInfrastructure
from bide.local_broker import LocalBroker
from bide.messages.outgoing import OutgoingMessage
from bide.topology import Queue, Topology

_MESSAGES: Final = 1_000_000
_BODY: Final = 200
_HOLD: Final = 175.0
"""Seconds for which every message waits at least once all are published, in which the rest is done."""

_SLOWEST_PUBLISH: Final = 8_000
_SLOWEST_DRAIN: Final = 2_000
"""Messages per second that are reached at least."""

_SPREAD: Final = 300.0
_SAMPLE: Final = {"rate": 500, "seconds": 30.0, "longest": 10, "step": 1_000}
_PREFETCH: Final = 1_000
_TIMEOUT: Final = 300.0
"""Seconds for what does not take longer with more messages."""

_MB: Final = 1e6
_STORE: Final = "store"
_SETTLE: Final = 5.0
"""Seconds before the broker's memory is read, so that it has flushed and collected garbage."""


def _cases(plan: Plan) -> Sequence[Case]:
    messages, spread = plan.count(_MESSAGES), round(plan.seconds(_SPREAD, least=2))
    hold = _hold(plan.seconds(_HOLD, least=15), messages)
    options = {
        "messages": messages,
        "hold": hold,
        "spread": spread,
        "sample": {**_SAMPLE, "seconds": plan.seconds(30.0, least=1), "longest": round(plan.seconds(10, least=1))},
        "settle": plan.seconds(_SETTLE, least=0.2),
    }
    # Filling ends before the first message is due, and draining begins at the latest when the last one is.
    timeout = 3 * _TIMEOUT + hold + spread + messages / _SLOWEST_DRAIN
    return [
        Case(name=name, work="benchmarks.suite.store:store", options={**options, "layout": layout}, timeout=timeout)
        for name, layout in ((CLOCK, "clock"), (CASCADE, "cascade"))
    ]


def _hold(least: float, messages: int) -> int:
    """The shortest delay, so that all messages are published before the first one is due."""
    return round(least + messages / _SLOWEST_PUBLISH)


STORE: Final = Measurement(
    name="store",
    title="Many messages that wait",
    about=(
        f"{_MESSAGES:,} messages of {_BODY} bytes, with delays of {_hold(_HOLD, _MESSAGES)} to "
        f"{_hold(_HOLD, _MESSAGES) + _SPREAD:g} whole seconds at random, on a broker of their own; with `--scale 10`, "
        f"ten times as many, with delays from {_hold(_HOLD, 10 * _MESSAGES):,} s on. While they wait, other messages "
        f"are sent and received ({_SAMPLE['rate']}/s, delays of 1 to {_SAMPLE['longest']} s) to measure the lateness. "
        "Then the broker is stopped and started again; the start ends when it confirms a delayed message. At the end "
        "all messages are received, and a check finds lost ones. *Drained* are the messages per second from the first "
        f"receipt to the last: at most all of them in the {_SPREAD:g} s in which they fall due, if the first is "
        "received in time. Memory is the node's resident memory, and disk the size of its data folder; the figures per "
        "message are their growth."
    ),
    cases=_cases,
    most_rounds=1,
    broker="own",
)


def store(job: Job) -> Answer:
    """Fill, measure, restart, empty."""
    infrastructure = infrastructure_of(job.options["layout"])
    messages = job.options["messages"]
    root = None if job.root is None else Path(job.root)
    with TemporaryDirectory(prefix="bide-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "broker"
        with _broker(folder, root, messages) as broker:
            values = asyncio.run(_fill(broker, infrastructure, job))
            start = time.monotonic()
            broker.stop()
        stopped = time.monotonic()
        with _broker(folder, root, messages) as broker:
            asyncio.run(_publish_one(broker, infrastructure))
            ready = time.monotonic()
            lost, drained = asyncio.run(_empty(broker, job))
            # Nothing of it is needed any more, and an orderly end may take seconds.
            broker.kill()
    return Answer(
        values={**values, "stop": stopped - start, "restart": ready - stopped, "drained": drained, "lost": lost}
    )


def _broker(folder: Path, root: Path | None, messages: int) -> LocalBroker:
    # It has to read the messages that wait.
    timeout = timedelta(minutes=3) + timedelta(minutes=1) * (messages // _MESSAGES)
    return LocalBroker.start(
        folder, ephemeral=False, detached=False, chroot=root, plugins=("rabbitmq_management",), timeout=timeout
    )


async def _fill(broker: LocalBroker, infrastructure: DelayInfrastructure, job: Job) -> dict[str, float]:
    messages = job.options["messages"]
    await prepare(broker.url, infrastructure)
    async with connect(broker.url, infrastructure=infrastructure) as client:
        await client.declare(Topology(queues=[Queue.quorum(_STORE)]))
        await client.bind(_STORE)
        await asyncio.sleep(job.options["settle"])  # the broker flushes and collects garbage meanwhile
        memory, disk = _memory(broker), _disk(broker)
        await client.publish_many(_letters(job), window=WINDOW)
        await asyncio.sleep(job.options["settle"])  # as above
        values = {
            "memory": _memory(broker) / _MB,
            "disk": _disk(broker) / _MB,
            "bytes_memory": (_memory(broker) - memory) / messages,
            "bytes_disk": (_disk(broker) - disk) / messages,
        }
        late = await _sample(client, Job(work="", options=job.options["sample"]))
        return {**values, **{name: late[name] for name in ("p50", "p99", "max", "min", "early")}}


def _memory(broker: LocalBroker) -> int:
    pid = broker.pid
    if pid is None:
        raise BenchmarkError("the broker has ended")
    return resident_bytes(pid)


def _disk(broker: LocalBroker) -> int:
    """Bytes on disk, as many as are written: files may be longer than that."""
    files = (broker.folder / "data").rglob("*")
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


def _letters(job: Job) -> Iterator[OutgoingMessage]:
    chance, padding = random.Random(1), bytes(_BODY - 8)
    hold, spread = job.options["hold"], job.options["spread"]
    for number in range(job.options["messages"]):
        delay = timedelta(seconds=chance.randint(hold, hold + spread))
        yield OutgoingMessage(number.to_bytes(8, "big") + padding, to=_STORE, delay=delay)


async def _sample(client: Client, job: Job) -> dict[str, float]:
    """How late others are meanwhile."""
    expected = round(job.options["rate"] * job.options["seconds"])
    receiver = Receiver()
    async with client.consume(TARGET, prefetch=_PREFETCH) as arriving:
        publishing = asyncio.create_task(publish_steadily(client, job))
        async with asyncio.timeout(_TIMEOUT):
            async for message in arriving:
                receiver.take(message)
                await message.ack()
                if receiver.count == expected:
                    break
        sent = await publishing
    return dict(lateness(receiver.milliseconds, expected=expected, sent_per_second=sent, rate=job.options["rate"]))


async def _publish_one(broker: LocalBroker, infrastructure: DelayInfrastructure) -> None:
    async with connect(broker.url, infrastructure=infrastructure) as client:
        await client.publish(b"", to=TARGET, delay=timedelta(seconds=1))


async def _empty(broker: LocalBroker, job: Job) -> tuple[int, float]:
    """Receive all; return how many never came, and the messages per second from the first to the last."""
    messages = job.options["messages"]
    seen, missing = bytearray(messages), messages
    longest_wait = _TIMEOUT + job.options["hold"] + job.options["spread"]
    first = last = time.monotonic()
    async with connect(broker.url) as client, client.consume(_STORE, prefetch=_PREFETCH) as arriving:
        while missing:
            try:
                async with asyncio.timeout(longest_wait):
                    message = await anext(arriving)
            except TimeoutError:
                break
            last = time.monotonic()
            if missing == messages:
                first = last
            number = int.from_bytes(message.body[:8], "big")
            missing -= not seen[number]
            seen[number] = 1
            await message.ack()
    received = messages - missing
    return missing, received / (last - first) if received > 1 else 0.0
