"""Comparison of ``bide pipeline plan`` with a broker that gets the same messages.

``python -m benchmarks.plan_check --messages 1000000 --seconds 300`` plans a table of messages to be sent evenly over
five minutes, a third of them delayed by whole minutes, a third by minutes and seconds, a third by minutes, seconds and
hundredths of a second. Then it sends them at those times through ``Clock``, asks the broker every few seconds how many
messages each queue has, and compares level by level. It prints the comparison, and writes all of it to ``--result``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import bide
from bide.admin.apply import apply, message_counts
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.clock_digits import LEVELS
from bide.local_broker import LocalBroker
from bide.pipelines.plan.columns import Columns
from bide.pipelines.plan.levels import PlanLevels
from bide.pipelines.plan.occupancy import Timeline
from bide.pipelines.plan.workload import of_table
from bide.topology import Queue

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BODY = b"x" * 200
TARGET = "plan-check"

Plan = Mapping[str, Mapping[int, float]]
"""Messages held by level and second since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the queues of each level had, at a time in milliseconds since the Unix epoch.

    Attributes:
        disk: bytes of all files of the broker, if it is here.
    """

    at: int
    held: dict[str, int]
    disk: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One level over all samples.

    Attributes:
        mean: messages held, measured, on the average of the samples.
        planned_mean: the same as planned.
        peak: the most that were seen; *planned_peak* likewise, at the same moments.
        off: mean of the distances between measured and planned, as a share of *planned_mean*. Both are means of ten
            seconds, because which messages of a second have come already is left to chance.
        worst: the largest of these distances, as a share of *planned_peak*.
    """

    level: str
    samples: int
    mean: float
    planned_mean: float
    peak: float
    planned_peak: float
    off: float
    worst: float


def table_of(messages: int, seconds: float, longest_minutes: int, chance: random.Random) -> list[tuple[int, int]]:
    """When each message is to be sent, counted from the first, and its delay, both in milliseconds."""
    found = []
    for number in range(messages):
        delay = chance.randint(1, longest_minutes) * 60_000 if longest_minutes else 0
        if number % 3 or not delay:
            delay += chance.randint(1, 59) * 1000
        if number % 3 == 2:
            delay += chance.randint(1, 99) * 10
        found.append((int(number * seconds * 1000 / messages), delay))
    return found


async def outgoing(
    table: Sequence[tuple[int, int]], start: float, sent_at: list[int]
) -> AsyncIterator[bide.OutgoingMessage]:
    """The messages of a table, each at its time or as soon as the broker lets it; and when that was."""
    for sent, delay in table:
        pause = start + sent / 1000 - time.time()
        if pause > 0.001:
            await asyncio.sleep(pause)
        sent_at.append(int((time.time() - start) * 1000))
        yield bide.OutgoingMessage(BODY, to=TARGET, delay=timedelta(milliseconds=delay))


def size_of(folder: Path | None) -> int | None:
    """Bytes of all files in a folder."""
    if folder is None:
        return None
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


async def sample(url: str, clock: bide.Clock, until: asyncio.Event, every: float, folder: Path | None) -> list[Sample]:
    """Read the depths of all digit queues repeatedly, until the event is set."""
    queues = {clock.digit_queue(level, digit): level.letter for level in LEVELS for digit in clock.used_digits(level)}
    wanted = [Queue.quorum(name) for name in queues]
    connection = await Connection.open(BrokerUrl.parse(url))
    samples = []
    try:
        while not until.is_set():
            begun = time.time()
            counts = await message_counts(connection, wanted)
            ended = time.time()
            held: Counter[str] = Counter()
            for name, count in counts.items():
                held[queues[name]] += count
            samples.append(Sample(at=int((begun + ended) * 500), held=dict(held), disk=size_of(folder)))
            try:
                await asyncio.wait_for(until.wait(), max(every - (ended - begun), 0.1))
            except TimeoutError:
                continue
    finally:
        await connection.close()
    return samples


async def run(
    url: str,
    clock: bide.Clock,
    table: Sequence[tuple[int, int]],
    start: float,
    *,
    every: float = 1.0,
    folder: Path | None = None,
) -> tuple[list[Sample], list[tuple[int, int]]]:
    """Publish a table and watch the queues until all of it has arrived.

    Returns:
        what was seen, and the table with the times at which messages were sent indeed.
    """
    sent_at: list[int] = []
    over = asyncio.Event()
    watching = asyncio.create_task(sample(url, clock, over, every, folder))
    async with bide.connect(url, infrastructure=clock) as client:
        report = await client.publish_many(outgoing(table, start, sent_at), window=1_000)
        behind = time.time() - start - table[-1][0] / 1000
        print(f"{report}; the last one {behind:.1f} s after its time", file=sys.stderr, flush=True)
        last = start + max(sent + delay for sent, delay in table) / 1000
        deadline = last + 120
        asking = await Connection.open(BrokerUrl.parse(url))
        async with await asking.channel() as channel:
            found = await channel.declare_queue(Queue.quorum(TARGET), passive=True)
            while found.message_count != len(table):
                if time.time() > deadline:
                    raise SystemExit(f"{found.message_count} of {len(table)} messages have arrived at {deadline}")
                await asyncio.sleep(1)  # no event reports the length of a queue
                found = await channel.declare_queue(Queue.quorum(TARGET), passive=True)
            # The next table is counted anew.
            await channel.purge_queue(TARGET)
        await asking.close()
    over.set()
    return await watching, [(at, delay) for at, (_, delay) in zip(sent_at, table, strict=True)]


async def prepare(url: str, clock: bide.Clock) -> None:
    """Put the delay infrastructure and the target on the broker."""
    connection = await Connection.open(BrokerUrl.parse(url))
    await apply(connection, clock.topology())
    async with await connection.channel() as channel:
        await channel.declare_queue(Queue.quorum(TARGET))
    await connection.close()
    async with bide.connect(url, infrastructure=clock) as client:
        await client.bind(TARGET)


def planned(spark: SparkSession, clock: bide.Clock, table: Sequence[tuple[int, int]]) -> Plan:
    """Messages held by level and second since the start, as the plan has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "table.parquet")
        at = pa.array([sent for sent, _ in table], pa.timestamp("ms", "UTC"))
        pq.write_table(pa.table({"at": at, "delay": pa.array([delay for _, delay in table], pa.int64())}), path)
        workload = of_table(spark.read.parquet(path), Columns(at="at", delay="delay"))
        timeline = Timeline(workload, PlanLevels.of(clock), every=timedelta(seconds=1))
        rows = timeline.levels().selectExpr("level", "unix_seconds(at) as second", "held").collect()
        timeline.close()
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["level"]][row["second"]] = row["held"]
    return found


def compare(samples: Sequence[Sample], plan: Plan, start: float) -> list[Compared]:
    """Level by level, from the start on."""
    samples = [one for one in samples if one.at >= start * 1000]
    found = []
    for level in [one.letter for one in LEVELS]:
        if level not in plan:
            continue
        pairs = [(one.held.get(level, 0), _at(plan[level], one.at / 1000 - start)) for one in samples]
        means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
        peaks = [max(values) for values in zip(*pairs, strict=True)]
        by_window: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for one, pair in zip(samples, pairs, strict=True):
            by_window[one.at // 10_000].append(pair)
        distances = [
            abs(sum(measured for measured, _ in window) - sum(expected for _, expected in window)) / len(window)
            for window in by_window.values()
        ]
        found.append(
            Compared(
                level=level,
                samples=len(pairs),
                mean=means[0],
                planned_mean=means[1],
                peak=peaks[0],
                planned_peak=peaks[1],
                off=sum(distances) / len(distances) / means[1],
                worst=max(distances) / peaks[1],
            )
        )
    return found


def _at(seconds: Mapping[int, float], at: float) -> float:
    """The number of messages at a time, interpolated between the means of the seconds around it."""
    below = int(at - 0.5)
    share = at - 0.5 - below
    return seconds.get(below, 0.0) * (1 - share) + seconds.get(below + 1, 0.0) * share


def spark_session() -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    spark = (
        builder.config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=300, help="for how long messages are sent")
    parser.add_argument("--longest", type=int, default=5, help="minutes of the longest delay")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    parser.add_argument("--url", help="a broker; one is started if this is not given")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    clock = bide.Clock(max_delay=timedelta(minutes=arguments.longest + 1))
    table = table_of(arguments.messages, arguments.seconds, arguments.longest, random.Random(5))
    spark = spark_session()
    with ExitStack() as stack:
        release = folder = None
        url = arguments.url
        if url is None:
            broker = stack.enter_context(LocalBroker.start(ephemeral=True, chroot=arguments.chroot))
            url, release, folder = broker.url, broker.release, broker.folder
        asyncio.run(prepare(url, clock))
        began = time.monotonic()
        plan = planned(spark, clock, table)
        took = time.monotonic() - began
        print(f"planned in {took:.1f} s", file=sys.stderr, flush=True)
        start = time.time() + 2
        samples, as_sent = asyncio.run(run(url, clock, table, start, every=arguments.every, folder=folder))
    by_plan = {"as planned": plan, "as sent": planned(spark, clock, as_sent)}
    spark.stop()
    found = {name: compare(samples, one, start) for name, one in by_plan.items()}
    for name, levels in found.items():
        for one in levels:
            print(
                f"{name}, level {one.level}: mean {one.mean:,.0f}, planned {one.planned_mean:,.0f}; "
                f"most {one.peak:,.0f}, planned {one.planned_peak:,.0f}; "
                f"off by {one.off:.2%}, at worst {one.worst:.2%} of the most"
            )
    if arguments.result is not None:
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rabbitmq": release,
            "messages": arguments.messages,
            "seconds": arguments.seconds,
            "longest_minutes": arguments.longest,
            "planned_in_seconds": round(took, 1),
            "last_sent_late_seconds": (as_sent[-1][0] - table[-1][0]) / 1000,
            "levels": {name: [asdict(one) for one in levels] for name, levels in found.items()},
        }
        lines = ",\n  ".join(json.dumps(_sampled(one, by_plan, start)) for one in samples)
        # A line for each sample.
        text = json.dumps(facts, indent=1).removesuffix("\n}")
        arguments.result.write_text(f'{text},\n "samples": [\n  {lines}\n ]\n}}\n')


def _sampled(one: Sample, by_plan: Mapping[str, Plan], start: float) -> dict[str, Any]:
    at = one.at / 1000 - start
    plans = {name: {level: round(_at(held, at), 1) for level, held in plan.items()} for name, plan in by_plan.items()}
    return {"at": round(at, 3), "disk": one.disk, "measured": one.held, **plans}


if __name__ == "__main__":
    main()
