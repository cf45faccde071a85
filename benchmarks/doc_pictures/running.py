"""One small campaign: scheduled, audited and replayed by ``bide pipeline``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import bide
from benchmarks.doc_pictures.figures import Audited, Received, audited_of, campaign_of, lateness, replay_of
from bide.admin.apply import apply
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker

QUEUE: Final = "reminders"
ERRORS: Final = "error"
CLOCK: Final = bide.Clock()
SMALL: Final = ("--spark-conf", "spark.sql.shuffle.partitions=4")
"""What Spark is to know of so few messages; in two hundred parts they take it longer."""

TIMEOUT: Final = 90
"""Seconds that the last message may be late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How large, and how long, in messages and seconds.

    Attributes:
        lead: the shortest delay.
        seconds: from the first due time to the last.
        over: what failed is spread over this time.
    """

    messages: int
    lead: int
    seconds: int
    over: int


class Mailer:
    """What the endpoint has seen.

    Attributes:
        fails: from when until when its handler fails, once the first message has come.
        first: every message by its id, as it came first.
        parked: those that failed, with the time.
        again: those that an operator sent back.
    """

    def __init__(self, seconds: float) -> None:
        self.fails: tuple[float, float] | None = None
        self._seconds = seconds
        self.first: dict[str, Received] = {}
        self.parked: dict[str, float] = {}
        self.again: dict[str, Received] = {}

    async def remind(self, message: bide.Message) -> None:
        """The handler."""
        assert message.message_id is not None
        assert message.sent_at is not None
        # What is sent back without a delay, as the first of a replay, has no due time.
        due = message.due or message.received_at
        got = Received(message.sent_at.timestamp(), due.timestamp(), message.received_at.timestamp())
        if message.history.returned:
            self.again.setdefault(message.message_id, got)
            return
        self.first.setdefault(message.message_id, got)
        if self.fails is None:
            # Early: an audit that begins then looks when much is still to come, on a slow machine too.
            self.fails = (got.due + self._seconds / 4, got.due + self._seconds * 3 / 8)
        if self.fails[0] <= got.at < self.fails[1]:
            self.parked.setdefault(message.message_id, got.at)
            raise TimeoutError("the mail server does not answer")


def write_table(path: Path, options: Options) -> None:
    """Reminders whose delays heap up in the middle, as those of people do.

    Delays instead of due times, since the start of Spark takes an unknown time.
    """
    chance = random.Random(6)
    delays: list[int] = []
    while len(delays) < options.messages:
        after = chance.gauss(options.seconds / 2, options.seconds / 5.5)
        if 0 <= after <= options.seconds:
            delays.append(int((options.lead + after) * 1000))
    table = {
        "order_id": pa.array(range(options.messages)),
        "email": pa.array([f"customer-{number}@shop.example" for number in range(options.messages)]),
        "wait": pa.array(delays, pa.int64()),
    }
    pq.write_table(pa.table(table), path)


async def pipeline(broker: LocalBroker, *arguments: str) -> dict[str, Any]:
    """Run a command of ``bide pipeline``, and return what it prints as JSON."""
    environment = {
        **os.environ,
        "BIDE_URL": broker.url,
        "BIDE_MANAGEMENT_URL": broker.management_url,
        "BIDE_STREAM_PORT": str(broker.stream_port),
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "bide", "pipeline", *arguments, *SMALL, "--json"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise SystemExit(f"bide pipeline {arguments[0]} ended with {process.returncode}")
    print(f"bide pipeline {arguments[0]}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(output)
    return found


async def until_none(left: Callable[[], int], *, seconds: float, endpoint: asyncio.Task[None]) -> None:
    """Wait until no message is left to be received, as long as the endpoint runs."""
    deadline = time.monotonic() + seconds
    while left():
        if endpoint.done():
            endpoint.result()
        if time.monotonic() > deadline:
            raise SystemExit(f"{left()} messages were not received within {seconds:.0f} s")
        await asyncio.sleep(0.2)  # no event reports the last message


async def prepare(url: str) -> None:
    """Put the delay infrastructure and its taps on the broker."""
    connection = await Connection.open(BrokerUrl.parse(url))
    await apply(connection, CLOCK.topology())
    await turn_on(connection, CLOCK)
    await connection.close()


async def run(broker: LocalBroker, folder: Path, options: Options) -> dict[str, Any]:
    """The campaign, its audit and its replay: all figures."""
    await prepare(broker.url)
    mailer = Mailer(options.seconds)
    app = bide.Endpoint(
        QUEUE,
        retry=bide.Retry(immediate=0, delays=[]),
        error_queue=ERRORS,
        concurrency=100,
        slow_down_after=None,
        observers=[bide.EventStream()],
        management_url=broker.management_url,
    )
    app.handler(mailer.remind)
    table = folder / "reminders.parquet"
    write_table(table, options)
    async with bide.connect(broker.url, infrastructure=CLOCK) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(QUEUE)]))
        endpoint = asyncio.create_task(app.run(client))
        try:
            ledger = ("--ledger", str(folder / "ledger"))
            scheduled = await pipeline(
                broker, "schedule", str(table), "--to", QUEUE, "--type", "Reminder", "--delay-column", "wait", *ledger
            )
            await until_none(
                lambda: options.messages - len(mailer.first) if mailer.fails is None else 0,
                seconds=options.lead + TIMEOUT,
                endpoint=endpoint,
            )
            assert mailer.fails is not None
            await asyncio.sleep(max(mailer.fails[1] - time.time(), 0))  # the audit begins after the last failure
            tables = folder / "audit"
            report = await pipeline(broker, "audit", "--into", str(tables), "--once")
            await until_none(
                lambda: options.messages - len(mailer.first),
                seconds=options.seconds + TIMEOUT,
                endpoint=endpoint,
            )
            back = await pipeline(broker, "replay", "--queue", ERRORS, "--over", f"{options.over}s")
            await until_none(
                lambda: len(mailer.parked) - len(mailer.again),
                seconds=options.over + TIMEOUT,
                endpoint=endpoint,
            )
        finally:
            app.stop()
            await endpoint
    if (sent := back["sent"]) != len(mailer.parked):
        raise SystemExit(f"{sent} messages were replayed, and {len(mailer.parked)} were parked")
    start = min(one.sent for one in mailer.first.values())
    late = {name: lateness(seen) for name, seen in (("first", mailer.first.values()), ("again", mailer.again.values()))}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rabbitmq": broker.release,
        "cores": os.cpu_count(),
        "load_average": [round(one, 1) for one in os.getloadavg()],
        "messages": options.messages,
        "seconds": {
            "schedule": scheduled["seconds"],
            "audit": report["seconds"],
            "replay": back["seconds"],
            "over": options.over,
            "fails": mailer.fails[1] - mailer.fails[0],
        },
        "late_ms": late,
        "schedule": asdict(campaign_of(list(mailer.first.values()), start)),
        "audit": asdict(audit_of(tables, start)),
        "replay": asdict(replay_of(mailer.parked.values(), list(mailer.again.values()), start, options.over)),
    }


def audit_of(tables: Path, start: float) -> Audited:
    """The rows of the table ``messages``, by due time."""
    columns = ["due", "delivered", "lateness_ms", "outcome"]
    found = ds.dataset(tables / "messages", partitioning="hive", exclude_invalid_files=True).to_table(columns=columns)
    for name in columns[:2]:
        # As numbers: whether Parquet's times have a zone is up to who wrote them.
        place, column = found.column_names.index(name), found[name]
        a_second = {"ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[column.type.unit]
        seconds = [None if one is None else one / a_second - start for one in column.cast(pa.int64()).to_pylist()]
        found = found.set_column(place, name, pa.array(seconds, pa.float64()))
    return audited_of(found.to_pylist())
