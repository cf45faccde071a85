"""Many schedules that wait: memory, listing, rebuilding the index, cancelling by filter."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.gates import GateProcess, wait_for_schedules
from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import largest_bytes, resident_bytes
from benchmarks.suite.setup import TARGET, WINDOW
from benchmarks.suite.task import Answer, Job
from bide.client.client import Client, connect
from bide.client.schedule_result import FilterResult
from bide.schedules.outgoing import OutgoingSchedule
from bide.topology import Queue, Topology

PENDING: Final = "schedules that wait"

_SCHEDULES: Final = 1_000_000
_BODY: Final = 200
_PAGE: Final = 100
_PAGES: Final = 50
_GROUPS: Final = 10
_LEAST_DELAY: Final = timedelta(hours=10)
_SPREAD: Final = 36_000
_TIMEOUT: Final = timedelta(minutes=20)
_MB: Final = 1e6
_SETTLE: Final = 5.0
"""Seconds before memory is read, so that the broker has flushed and collected garbage."""


def _cases(plan: Plan) -> Sequence[Case]:
    options = {
        "schedules": plan.count(_SCHEDULES, least=1_000),
        "pages": plan.count(_PAGES, least=5),
        "settle": plan.seconds(_SETTLE),
    }
    return [Case(name=PENDING, work="benchmarks.suite.pending:pending", options=options, timeout=7_200)]


PENDINGS: Final = Measurement(
    name="pending",
    title="Many schedules that wait",
    about=(
        f"{_SCHEDULES:,} schedules of {_BODY} bytes with keys of their own, due in 10 to 20 hours, sent by "
        "`publish_many` to a broker and one gate of their own. *Messages/s* counts until the gate has read all of "
        "them. *Gate* is its resident memory then, and *broker growth* that of the node since before. A page is the "
        f"first {_PAGE} schedules of a prefix, {_PAGES} times at random, from the question to the last view. *Rebuild* "
        "is the time from the start of a gate whose index was deleted until it has answered how many wait: it reads "
        f"the records themselves, because no snapshot is needed yet. *Cancel a tenth* cancels "
        f"{_SCHEDULES // _GROUPS:,} of them by the prefix of their keys, from the call to the result with all keys; "
        "*move a tenth* moves as many to another time."
    ),
    cases=_cases,
    most_rounds=1,
    broker="fresh",
)


async def pending(job: Job) -> Answer:
    """Fill, list, rebuild, cancel."""
    number: int = job.options["schedules"]
    with TemporaryDirectory(prefix="bide-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "gate"
        async with connect(job.url, timeout=_TIMEOUT) as client:
            await client.declare(Topology(queues=[Queue.quorum(TARGET)]))
            gate = await GateProcess(job.url, folder).wait_until_leading()
            await client.schedule(b"", key=next(_keys(number)), to=TARGET, delay=_LEAST_DELAY)
            await asyncio.sleep(job.options["settle"])  # the broker flushes and collects garbage meanwhile
            before, start = resident_bytes(job.pid), time.perf_counter()
            await client.publish_many(_made(number), window=WINDOW)
            await wait_for_schedules(client, number, look_every=1.0)
            values = {"rate": number / (time.perf_counter() - start)}
            await asyncio.sleep(job.options["settle"])  # as above
            values |= {
                "gate_memory": resident_bytes(gate.pid) / _MB,
                "gate_index": sum(one.stat().st_size for one in folder.iterdir()) / _MB,
                "broker_memory": (resident_bytes(job.pid) - before) / _MB,
                **await _pages(client, number, job.options["pages"]),
            }
            gate.stop()
            shutil.rmtree(folder)
            start = time.perf_counter()
            gate = GateProcess(job.url, folder)
            await wait_for_schedules(client, number)
            values |= {
                "rebuild": time.perf_counter() - start,
                "rebuild_cpu": gate.processor_seconds,
                "rebuild_memory": largest_bytes(gate.pid) / _MB,
            }
            values["move_tenth"] = await _change_a_group(client.move_scheduled(prefix="4:", delay="30h"), number)
            values["tenth"] = await _change_a_group(client.cancel_scheduled(prefix="3:"), number)
            gate.stop()
    return Answer(values=values)


def _keys(number: int) -> Iterator[str]:
    digits = len(str(number - 1))
    return (f"{one % _GROUPS}:{one:0{digits}}" for one in range(number))


def _made(number: int) -> Iterator[OutgoingSchedule]:
    chance, body = random.Random(1), bytes(_BODY)
    for key in _keys(number):
        delay = _LEAST_DELAY + timedelta(seconds=chance.randrange(_SPREAD))
        yield OutgoingSchedule(body, key=key, to=TARGET, delay=delay)


async def _pages(client: Client, number: int, pages: int) -> dict[str, float]:
    """The first page of random prefixes, each with up to a thousand keys."""
    chance, milliseconds = random.Random(1), []
    digits = len(str(number - 1))
    for _ in range(pages):
        one = chance.randrange(number)
        prefix = f"{one % _GROUPS}:{one:0{digits}}"[:-4]
        start, found = time.perf_counter(), 0
        async with aclosing(client.list_scheduled(prefix=prefix)) as views:
            async for _view in views:
                found += 1
                if found == _PAGE:
                    break
        milliseconds.append((time.perf_counter() - start) * 1000)
        if found != _PAGE:
            raise BenchmarkError(f"only {found} schedules begin with {prefix!r}")
    return {"page_p50": statistics.median(milliseconds), "page_max": max(milliseconds)}


async def _change_a_group(change: Awaitable[FilterResult], number: int) -> float:
    start = time.perf_counter()
    result = await change
    seconds = time.perf_counter() - start
    if result.count != number // _GROUPS or len(result.keys) != result.count:
        raise BenchmarkError(f"{result.count} schedules were changed, and {len(result.keys)} keys are in the result")
    return seconds
