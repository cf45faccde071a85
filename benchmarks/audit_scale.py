"""Cost of a round of ``bide pipeline audit`` while the history grows.

``python -m benchmarks.audit_scale --rounds 100`` starts a broker of its own, and writes to the streams of its taps what
they would get of 100,000 messages in each round: nine of ten are delivered in the same round, the others in the next
one. All are due on one day, so that the whole history is beside the new messages. Ids are random, so that no order of
them helps. After each round comes ``bide pipeline audit --once``, and at the end the tables must have exactly what was
written.

With ``--before DIR``, another checkout audits the same streams into a folder of its own, and the two take turns. With
``--folder DIR``, the broker, the tables and the figures stay, and the same command continues after an interruption that
did not come while it was writing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import duckdb

import bide
from bide.admin.infrastructure import install
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.taps import taps_of
from bide.local_broker import LocalBroker

DAY: Final = datetime(2026, 1, 2, tzinfo=UTC)
"""All messages are due on this day, each round in the minutes after those of the round before."""
TARGETS: Final = 5
LATER: Final = 10
"""One message in ten is delivered in the next round."""
WINDOW: Final = 2_000
REPOSITORY: Final = Path(__file__).parents[1]
SITE: Final = REPOSITORY / "benchmarks/pipeline/site"
"""What Python needs to count the processor time of Spark's processes that have ended."""

Row = tuple[str, dict[str, Any]]
"""A message id and headers."""


def messages_of(number: int, *, count: int, rounds: int) -> list[Row]:
    """The messages of a round, the same in each run."""
    chance = random.Random(number)
    start, span = DAY + timedelta(days=1) / rounds * number, timedelta(days=1) / rounds
    rows = []
    for place in range(count):
        due = int((start + span * place / count).timestamp() * 1_000)
        headers = {"bide-to": f"q:target-{place % TARGETS}", "bide-due": due, "bide-sent": due - 60_000}
        rows.append((f"{chance.getrandbits(128):032x}", headers))
    return rows


async def write(url: str, stream: str, rows: list[Row]) -> None:
    """Write messages to a stream, and wait until the broker has confirmed them."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        channel = await connection.channel(confirms=True)
        for begin in range(0, len(rows), WINDOW):
            await asyncio.gather(
                *(
                    channel.publish(
                        exchange="",
                        routing_key=stream,
                        values={"message_id": name, "headers": headers, "delivery_mode": 2},
                        body=b"x" * 200,
                    )
                    for name, headers in rows[begin : begin + WINDOW]
                )
            )
    finally:
        await connection.close()


async def prepare(url: str) -> None:
    """Declare the streams of the taps."""
    connection = await Connection.open(BrokerUrl.parse(url))
    try:
        await install(connection, bide.Clock())
        await turn_on(connection, bide.Clock())
    finally:
        await connection.close()


def audit(broker: LocalBroker, source: Path, into: Path, options: list[str]) -> dict[str, Any]:
    """One round by the command of a checkout: what it printed, and both times of the whole command."""
    python, times = sys.executable, into.with_name(f"{into.name}-times.json")
    metered = [python, "-m", "benchmarks.pipeline.metered", str(times), python, "-m", "bide"]
    command = [*metered, "pipeline", "audit", "--into", str(into), "--once", "--json", *options]
    assert broker.stream_url is not None
    environment = {
        **os.environ,
        "BIDE_URL": broker.url,
        "BIDE_STREAM_PORT": broker.stream_url.rstrip("/").rpartition(":")[2],
        "PYTHONPATH": os.pathsep.join(map(str, (source / "src", SITE, REPOSITORY))),
    }
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    took = json.loads(times.read_text())
    report: dict[str, Any] = json.loads(done.stdout)
    return {
        "seconds": round(report["seconds"], 1),
        "read_seconds": round(report["read_seconds"], 1),
        "command_seconds": round(took["seconds"], 1),
        "processor_seconds": round(took["processor_seconds"], 1),
        "engine": report["engine"],
    }


def check(into: Path, expected: int, late: int) -> None:
    """The tables have each message exactly once, and the last ones are overdue."""
    with duckdb.connect() as database:
        for table in ("scheduled", "messages"):
            counts = f"select count(*), count(distinct message_id) from '{into}/{table}/**/*.parquet'"
            found = database.execute(counts).fetchone()
            if found != (expected, expected):
                raise SystemExit(f"{table} has {found} rows and ids, where {expected} messages were written")
        outcomes = f"select outcome, count(*) from '{into}/messages/**/*.parquet' group by all"
        if dict(database.execute(outcomes).fetchall()) != {"delivered": expected - late, "overdue": late}:
            raise SystemExit(f"outcomes are wrong, where {late} messages are not delivered")


def measure(arguments: argparse.Namespace, broker: LocalBroker, folder: Path, known: list[Any]) -> Iterator[list[Any]]:
    """All rounds so far, after each of them."""
    taps = taps_of(bide.Clock())
    sources = {"now": REPOSITORY, **({"before": arguments.before} if arguments.before else {})}
    found = list(known)
    for number in range(len(found), arguments.rounds):
        rows, last = (
            messages_of(one, count=arguments.messages, rounds=arguments.rounds) if one >= 0 else []
            for one in (number, number - 1)
        )
        begun = time.monotonic()
        written = folder / f"written-{number}"
        if not written.exists():
            # A second run that finds this, and not the other, does not know how much was written.
            (folder / f"writing-{number}").touch(exist_ok=False)
            asyncio.run(write(broker.url, taps.scheduled, rows))
            delivered = [row for place, row in enumerate(rows) if place % LATER]
            asyncio.run(write(broker.url, taps.delivered, [*last[::LATER], *delivered]))
            written.touch()
        wrote = time.monotonic() - begun
        # They take turns at being first.
        names = sorted(sources, reverse=bool(number % 2))
        audits = {name: audit(broker, sources[name], folder / name, arguments.options) for name in names}
        found.append({"history": number * arguments.messages, "write_seconds": round(wrote, 1), **audits})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        yield found
    for name in sources:
        check(folder / name, arguments.rounds * arguments.messages, len(range(0, arguments.messages, LATER)))


def summary(found: list[Any]) -> dict[str, Any]:
    """The medians of the rounds after the first one, and of as many at the end."""
    some = max(1, min(10, (len(found) - 1) // 2))
    sides = {"first": found[1 : 1 + some], "last": found[-some:]}
    return {
        name: {
            side: {
                "history": rounds[0]["history"],
                **{
                    figure: round(statistics.median(one[name][figure] for one in rounds), 1)
                    for figure in ("seconds", "read_seconds", "command_seconds", "processor_seconds")
                },
            }
            for side, rounds in sides.items()
        }
        for name in ("now", "before")
        if name in found[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--messages", type=int, default=100_000, help="of each round")
    parser.add_argument("--before", type=Path, help="another checkout, which audits the same streams")
    parser.add_argument("--folder", type=Path, help="where everything is kept, to continue")
    parser.add_argument("--chroot", type=Path, help="the root of another system whose RabbitMQ is started")
    parser.add_argument("--result", type=Path, help="a file for all figures, as JSON")
    parser.add_argument("options", nargs="*", default=["--engine", "spark"], help="of the audit; after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures = folder / "figures.json"
        known = json.loads(figures.read_text())["rounds"] if figures.exists() else []
        with LocalBroker.start(folder / "broker", detached=False, chroot=arguments.chroot) as broker:
            asyncio.run(prepare(broker.url))
            for found in measure(arguments, broker, folder, known):
                about = {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "rabbitmq": broker.release,
                    "python": platform.python_version(),
                    "cores": os.cpu_count(),
                    "load_average": [round(one, 1) for one in os.getloadavg()],
                    "messages": arguments.messages,
                    "options": arguments.options,
                }
                text = json.dumps({**about, **(summary(found) if len(found) > 1 else {}), "rounds": found}, indent=1)
                figures.write_text(f"{text}\n")
        if arguments.result is not None:
            arguments.result.write_text(figures.read_text())


if __name__ == "__main__":
    main()
