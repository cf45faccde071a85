"""How late delayed messages are, and what they cost the broker: ``Clock`` against the binary cascade, side by side.

Both run on one private broker in turns, A B A B, so that a machine whose speed drifts cannot favour one of them::

    .venv/bin/python benchmarks/lateness.py --root /path/to/a/newer/system --rate 1500 --seconds 60 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bide
from bide.broker import LocalBroker
from bide.delay.infrastructure import DelayInfrastructure

LONGEST_DELAY = 60
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measurement.

    Attributes:
        p50: lateness in milliseconds, as the consumer sees it; p99 and longest likewise.
        early: messages that came before their due time.
        cpu: microseconds of the broker's processor time per message, publishing and consuming included.
        header_bytes: mean size of the headers that arrive, as JSON.
    """

    layout: str
    messages: int
    lost: int
    early: int
    p50: float
    p99: float
    longest: float
    cpu: float
    header_bytes: float


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def publish(client: bide.Client, queue: str, rate: int, seconds: int, chance: random.Random) -> int:
    """Publish at an even rate, whole-second delays at random; return how many."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    sending: set[asyncio.Task[bide.Receipt]] = set()
    total = rate * seconds
    body = b"x" * 200
    for number in range(total):
        pause = start + number / rate - loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        delay = timedelta(seconds=chance.randint(1, LONGEST_DELAY))
        task = asyncio.create_task(client.publish(body, to=queue, delay=delay))
        sending.add(task)
        task.add_done_callback(sending.discard)
    await asyncio.gather(*sending)
    return total


async def measure(
    broker: LocalBroker, layout: str, infrastructure: DelayInfrastructure, *, rate: int, seconds: int, seed: int
) -> Round:
    """One round in a virtual host of its own."""
    name = f"lateness-{layout}-{seed}"
    url = broker.add_vhost(name)
    late: list[float] = []
    sizes: list[int] = []
    pid = broker.pid
    assert pid is not None
    async with bide.connect(url, infrastructure=infrastructure) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("target")]))
        await client.publish(b"", to="target", delay="1s")
        async with client.consume("target", prefetch=1000) as messages:
            await (await anext(messages)).ack()
            before = processor_seconds(pid)
            publishing = asyncio.create_task(publish(client, "target", rate, seconds, random.Random(seed)))
            expected = rate * seconds
            deadline = datetime.now(UTC) + timedelta(seconds=seconds + LONGEST_DELAY + 60)
            while len(late) < expected and datetime.now(UTC) < deadline:
                try:
                    async with asyncio.timeout(LONGEST_DELAY + 30):
                        message = await anext(messages)
                except TimeoutError:
                    break
                assert message.lateness is not None
                late.append(message.lateness.total_seconds() * 1000)
                sizes.append(len(json.dumps(dict(message.raw.values["headers"]), default=str)))
                await message.ack()
            await publishing
            used = processor_seconds(pid) - before
    broker.delete_vhost(name)
    late.sort()
    return Round(
        layout=layout,
        messages=len(late),
        lost=expected - len(late),
        early=sum(1 for one in late if one < 0),
        p50=late[len(late) // 2],
        p99=late[len(late) * 99 // 100],
        longest=late[-1],
        cpu=used / len(late) * 1e6,
        header_bytes=statistics.fmean(sizes),
    )


def report(rounds: Sequence[Round]) -> None:
    """Print every round, the medians, and the ratios of Clock to the cascade."""
    for one in rounds:
        print(json.dumps(asdict(one)))
    by_layout = {layout: [one for one in rounds if one.layout == layout] for layout in ("clock", "nservicebus")}
    for figure in ("p50", "p99", "longest", "cpu", "header_bytes"):
        clock, cascade = (statistics.median(getattr(one, figure) for one in found) for found in by_layout.values())
        print(f"{figure:12} clock {clock:9.2f}   nservicebus {cascade:9.2f}   ratio {clock / cascade:.2f}")


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="root folder of a system whose RabbitMQ is used")
    parser.add_argument("--rate", type=int, default=1500, help="messages per second")
    parser.add_argument("--seconds", type=int, default=60, help="how long to publish")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: list[Round] = []
    layouts: tuple[tuple[str, DelayInfrastructure], ...] = (
        ("clock", bide.Clock()),
        ("nservicebus", bide.NServiceBus(routing="direct")),
    )
    with LocalBroker.start(ephemeral=True, chroot=options.root) as broker:
        print(f"RabbitMQ {broker.release}")
        for number in range(options.rounds):
            for layout, infrastructure in layouts:
                rounds.append(
                    asyncio.run(
                        measure(broker, layout, infrastructure, rate=options.rate, seconds=options.seconds, seed=number)
                    )
                )
    report(rounds)


if __name__ == "__main__":
    main()
