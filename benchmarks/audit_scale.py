"""Duration of ``bide pipeline audit`` with many messages and a growing history.

``python -m benchmarks.audit_scale --messages 1000000 --increment 100000`` starts a broker of its own, turns the taps
on, publishes a million messages with delays of up to a minute while consumers take them, and runs ``bide pipeline audit
--once``: that is the first figure. Then come some increments, each followed by an audit; the same million again,
audited too; and as many increments of the same size. All messages are due on one day, so that each round has the whole
history beside it in the same partitions. After every round the tables must have exactly what was sent. It prints all of
it as JSON, and writes that to ``--result``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

import bide
from bide.admin.apply import apply
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker
from bide.topology import Queue, Topology

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

BODY = b"x" * 200
TARGET = "audit-scale"
CLOCK = bide.Clock(max_delay=timedelta(minutes=10))
COUNTED = ("scheduled", "delivered", "messages")
TIMEOUT = 600
"""Seconds that the last message may take to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A round.

    Attributes:
        what: first, increment, or history.
        history: messages that were audited before.
        new: messages that came since.
        publish_seconds: until the broker had confirmed them; *arrive_seconds* until consumers had taken all of them.
        audit: what the command printed: ``seconds`` is the round, of which ``read_seconds`` were for the facts.
        command_seconds: for the whole command, with the start of Python, Java and Spark.
    """

    what: str
    history: int
    new: int
    publish_seconds: float
    arrive_seconds: float
    audit: dict[str, Any]
    command_seconds: float


def consume(url: str, taken: Any, over: Event) -> None:
    """Consume and acknowledge messages until the event is set."""

    async def run() -> None:
        async with (
            bide.connect(url, infrastructure=CLOCK) as client,
            client.consume(TARGET, prefetch=2_000) as messages,
        ):
            ending = asyncio.ensure_future(asyncio.to_thread(over.wait))
            ending.add_done_callback(lambda _: messages.stop())
            async for message in messages:
                await message.ack()
                with taken.get_lock():
                    taken.value += 1
            await ending

    asyncio.run(run())


@contextmanager
def consumers(url: str, number: int) -> Iterator[Any]:
    """Run consumer processes; yields the shared count of messages that they have acknowledged."""
    context = multiprocessing.get_context("spawn")
    taken, over = context.Value("q", 0), context.Event()
    processes = [context.Process(target=consume, args=(url, taken, over), daemon=True) for _ in range(number)]
    for one in processes:
        one.start()
    try:
        yield taken
    finally:
        over.set()
        for one in processes:
            one.join()


async def prepare(url: str) -> None:
    """Put the delay infrastructure, its taps and the target on the broker."""
    connection = await Connection.open(BrokerUrl.parse(url))
    await apply(connection, CLOCK.topology())
    await apply(connection, Topology(queues=[Queue.quorum(TARGET)]))
    await turn_on(connection, CLOCK)
    await connection.close()


async def publish(url: str, count: int, seconds: int) -> None:
    """Publish ``count`` messages, each with a random delay of whole seconds."""
    delays = [timedelta(seconds=one) for one in range(1, seconds + 1)]
    chosen = random.Random(count)
    async with bide.connect(url, infrastructure=CLOCK) as client:
        await client.publish_many(
            (bide.OutgoingMessage(BODY, to=TARGET, delay=chosen.choice(delays)) for _ in range(count)), window=20_000
        )


def send(url: str, count: int, seconds: int, taken: Any) -> tuple[float, float]:
    """Publish, and wait until consumers have taken all of it; how long both took."""
    expected = taken.value + count
    began = time.monotonic()
    asyncio.run(publish(url, count, seconds))
    published = time.monotonic() - began
    deadline = time.monotonic() + seconds + TIMEOUT
    while taken.value < expected:
        if time.monotonic() > deadline:
            raise SystemExit(f"{expected - taken.value} messages have not arrived after {seconds + TIMEOUT} s")
        if not multiprocessing.active_children():
            raise SystemExit("no consumer is left: see the errors above")
        time.sleep(0.2)  # a shared counter has no event
    return published, time.monotonic() - began


def audit(url: str, port: str, folder: Path, master: str) -> tuple[dict[str, Any], float]:
    """One round by the command line, and how long that took in all."""
    command = [sys.executable, "-m", "bide", "pipeline", "audit", "--into", str(folder), "--once", "--json",
               "--master", master]  # fmt: skip
    environment = {**os.environ, "BIDE_URL": url, "BIDE_STREAM_PORT": port}
    began = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    took = time.monotonic() - began
    report = json.loads(done.stdout)
    del report["into"]  # a temporary folder
    return report, took


def check(folder: Path, expected: int) -> None:
    """The tables have each message exactly once, all of them delivered, and nothing pending."""
    for table in COUNTED:
        data = ds.dataset(folder / table, partitioning="hive", exclude_invalid_files=True)
        ids = data.to_table(columns=["message_id"])["message_id"]
        found, different = len(ids), pc.count_distinct(ids).as_py()
        if (found, different) != (expected, expected):
            raise SystemExit(f"{table} has {found} rows with {different} ids, where {expected} messages were sent")
    outcomes = ds.dataset(folder / "messages", partitioning="hive").to_table(columns=["outcome"])["outcome"]
    if pc.unique(outcomes).to_pylist() != ["delivered"]:
        raise SystemExit(f"outcomes of delivered messages: {pc.value_counts(outcomes).to_pylist()}")
    if pending := ds.dataset(folder / "pending").count_rows():
        raise SystemExit(f"all was delivered, and {pending} rows are pending")


def measure(arguments: argparse.Namespace, broker: LocalBroker, folder: Path) -> Iterator[list[Measured]]:
    """All rounds so far, after each of them."""
    found: list[Measured] = []
    asyncio.run(prepare(broker.url))
    assert broker.stream_url is not None
    port = broker.stream_url.rstrip("/").rpartition(":")[2]
    increments = [("increment", arguments.increment, arguments.increment_seconds)] * arguments.increments
    full = (arguments.messages, arguments.seconds)
    with consumers(broker.url, arguments.consumers) as taken:
        for what, count, seconds in (("first", *full), *increments, ("history", *full), *increments):
            history = sum(one.new for one in found)
            published, arrived = send(broker.url, count, seconds, taken)
            report, took = audit(broker.url, port, folder, arguments.master)
            check(folder, history + count)
            one = Measured(
                what=what,
                history=history,
                new=count,
                publish_seconds=round(published, 1),
                arrive_seconds=round(arrived, 1),
                audit=report,
                command_seconds=round(took, 1),
            )
            found.append(one)
            print(
                f"{what}: {count:,} new after {history:,}: published in {published:.1f} s, all taken after "
                f"{arrived:.1f} s, audited in {report['seconds']:.1f} s ({report['read_seconds']:.1f} s of it for the "
                f"facts), {took:.1f} s with the start",
                file=sys.stderr,
                flush=True,
            )
            yield found


def summary(found: list[Measured]) -> dict[str, Any]:
    """The first round, and increments after the history and after twice as much, side by side."""
    half = next((place for place, one in enumerate(found) if one.what == "history"), len(found))
    sides = {}
    for name, some in (("after_once", found[1:half]), ("after_twice", found[half + 1 :])):
        if not some:
            continue
        seconds = [one.audit["seconds"] for one in some]
        sides[name] = {
            "history": some[0].history,
            "new": some[0].new,
            "seconds": [round(one, 1) for one in seconds],
            "median": round(statistics.median(seconds), 1),
        }
    return {"first_seconds": round(found[0].audit["seconds"], 1), **sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of the first round, and once more later")
    parser.add_argument("--seconds", type=int, default=60, help="the longest of their delays")
    parser.add_argument("--increment", type=int, default=100_000, help="messages of each increment")
    parser.add_argument("--increment-seconds", type=int, default=5, help="the longest of their delays")
    parser.add_argument("--increments", type=int, default=3, help="how many after the history, and after twice that")
    parser.add_argument("--consumers", type=int, default=2, help="processes that take messages")
    parser.add_argument("--master", default="local[*]", help="of Spark")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--into", type=Path, help="a new folder for the audit's tables, which then stays")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    arguments = parser.parse_args()
    if arguments.increments < 1:
        parser.error("--increments: at least one")
    with (
        tempfile.TemporaryDirectory() as temporary,
        LocalBroker.start(ephemeral=True, chroot=arguments.chroot) as broker,
    ):
        text = ""
        for found in measure(arguments, broker, arguments.into or Path(temporary) / "audit"):
            facts = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "rabbitmq": broker.release,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "load_average": [round(one, 1) for one in os.getloadavg()],
            }
            text = json.dumps({**facts, **summary(found), "rounds": [asdict(one) for one in found]}, indent=1)
            # What an interruption leaves is worth having, too.
            if arguments.result is not None:
                arguments.result.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
