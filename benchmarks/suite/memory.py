"""The memory of a bulk publish, by the length of its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.suite.measurement import Case, Measurement, Plan
from benchmarks.suite.processor import Meter, resident_bytes
from benchmarks.suite.setup import TARGET, WINDOW
from benchmarks.suite.task import Answer, Job
from bide.client.client import connect
from bide.messages.outgoing import OutgoingMessage
from bide.topology import Queue, Topology

BULK: Final = "bide bulk"

_MESSAGES: Final = 10_000_000
_BODY: Final = 200
_FIRST: Final = 100_000
"""Messages from which on growth counts: the window and what else is there only once is there by then."""

_MB: Final = 1e6


def _cases(plan: Plan) -> Sequence[Case]:
    options = {"messages": plan.count(_MESSAGES, least=20_000)}
    return [Case(name=BULK, work="benchmarks.suite.memory:publish", options=options, timeout=1_800)]


MEMORY: Final = Measurement(
    name="memory",
    title="Memory of a bulk publish",
    about=(
        f"{_MESSAGES:,} messages of {_BODY} bytes from a generator, not delayed, to a queue that keeps the last 1,000. "
        f"*Memory* is the largest memory of the process, and *growth* its growth after the first {_FIRST:,} messages."
    ),
    cases=_cases,
    most_rounds=1,
)


async def publish(job: Job) -> Answer:
    """Publish, and read the memory at every report."""
    messages = job.options["messages"]
    async with connect(job.url) as client:
        await client.declare(Topology(queues=[Queue.quorum(TARGET, {"x-max-length": 1_000})]))
        meter = Meter(job.pid)
        confirmed = first = most = 0
        async for report in client.publish_many(_letters(messages), window=WINDOW).batches():
            confirmed += report.confirmed
            if confirmed >= min(_FIRST, messages // 2):
                memory = resident_bytes()
                first, most = first or memory, max(most, memory)
        values = meter.read(confirmed)
    return Answer(values={**values, "memory": most / _MB, "growth": (most - first) / _MB})


def _letters(messages: int) -> Iterator[OutgoingMessage]:
    body = bytes(_BODY)
    for number in range(messages):
        yield OutgoingMessage(body, to=TARGET, headers={"number": number})
