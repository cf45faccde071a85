"""The cost of declaring the queues of ``Clock`` on first use, and all at once.

``python -m benchmarks.clock_growth`` starts a fresh private broker. First it times, in turns and each on an empty
virtual host, the first delayed publish of a new connection, and the declaration of all queues. Then 40 messages/s with
a delay of a second are published for eight seconds or more, in turns: with nothing beside them, while another client
uses 40 digits for the first time, ten a second, and while another client declares all queues.

With ``--nodes 3`` it starts a cluster on loopback instead, and times only the first delayed publish.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Final

import bide
from bide.admin.infrastructure import install
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.local_broker import LocalBroker, LocalCluster

_TARGETS: Final = bide.Topology(queues=[bide.Queue.quorum("steady"), bide.Queue.quorum("other")])
_PAUSE: Final = 0.025
_SECONDS: Final = 8.0
_DIGITS: Final = 40


async def first_publish(url: str) -> float:
    """Seconds from connecting to the confirm of the first delayed message."""
    start = time.perf_counter()
    async with bide.connect(url) as client:
        await client.declare(_TARGETS)
        await client.publish(b"", to="other", delay="5m")
        return time.perf_counter() - start


async def declare_all(url: str) -> float:
    """Seconds that the declaration of all queues takes."""
    connection = await Connection.open(BrokerUrl.parse(url))
    start = time.perf_counter()
    await install(connection, bide.Clock())
    seconds = time.perf_counter() - start
    await connection.close()
    return seconds


async def use_digits(url: str) -> None:
    """Use one digit after the other for the first time."""
    async with bide.connect(url) as client:
        for number in range(_DIGITS):
            await client.publish(b"", to="other", delay=timedelta(minutes=1 + number))
            await asyncio.sleep(0.1)  # ten new digits a second


async def use_nothing(_: str) -> None:
    """Leave the broker alone."""


BESIDE: Final[dict[str, Callable[[str], Awaitable[object]]]] = {
    "nothing": use_nothing,
    "40 digits for the first time": use_digits,
    "declaring all queues": declare_all,
}


async def lateness(url: str, beside: Callable[[str], Awaitable[object]]) -> list[float]:
    """How many milliseconds the steady messages were late."""
    found: list[float] = []
    async with bide.connect(url) as client:
        await client.declare(_TARGETS)
        await client.publish(b"before", to="steady", delay="1s")

        async def take() -> None:
            async with client.consume("steady") as messages:
                async for message in messages:
                    await message.ack()
                    if message.body == b"end":
                        return
                    if message.body == b"counts" and message.lateness is not None:
                        found.append(message.lateness / timedelta(milliseconds=1))

        taking = asyncio.create_task(take())
        disturbing = asyncio.ensure_future(beside(url))
        publishing = []
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end or not disturbing.done():
            publishing.append(asyncio.create_task(client.publish(b"counts", to="steady", delay="1s")))
            await asyncio.sleep(_PAUSE)  # 40 messages a second
        await asyncio.gather(*publishing, disturbing)
        await client.publish(b"end", to="steady", delay="1s")
        await taking
    return found


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values is not above."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def measure_cluster(nodes: int, rounds: int, chroot: Path | None) -> None:
    """Print the time of the first delayed publish on empty virtual hosts of a cluster."""
    with LocalCluster.start(nodes=nodes, ephemeral=True, chroot=chroot) as made:
        print(f"RabbitMQ {made.release}, {nodes} nodes", flush=True)
        first = []
        for number in range(rounds):
            name = f"growth-{number}"
            made.nodes[0].add_vhost(name)
            # The other nodes start the virtual host a moment later.
            time.sleep(1)
            first.append(asyncio.run(first_publish(made.vhost_url(name))))
        load = os.getloadavg()[0]
        print(
            f"first delayed message: median {median(first):.2f} s, at most {max(first):.2f} s, load average {load:.1f}"
        )


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="How often everything is measured. [default: 5]")
    parser.add_argument("--chroot", type=Path, help="Root folder of a system with another RabbitMQ.")
    parser.add_argument("--nodes", type=int, default=1, help="Nodes of the cluster. [default: 1]")
    given = parser.parse_args()
    if given.nodes > 1:
        measure_cluster(given.nodes, given.rounds, given.chroot)
        return
    with LocalBroker.start(ephemeral=True, chroot=given.chroot) as broker:
        print(f"RabbitMQ {broker.release}", flush=True)

        def vhosts() -> Iterator[str]:
            number = 0
            while True:
                number += 1
                yield broker.add_vhost(f"growth-{number}")
                broker.delete_vhost(f"growth-{number}")

        urls = vhosts()
        first, whole = [], []
        for _ in range(given.rounds):
            first.append(asyncio.run(first_publish(next(urls))))
            whole.append(asyncio.run(declare_all(next(urls))))
        print(f"first delayed message: median {median(first):.2f} s, at most {max(first):.2f} s")
        print(f"declaring all queues: median {median(whole):.2f} s, at most {max(whole):.2f} s", flush=True)
        found: dict[str, list[float]] = {name: [] for name in BESIDE}
        for _ in range(given.rounds):
            for name, beside in BESIDE.items():
                found[name] += asyncio.run(lateness(next(urls), beside))
        for name, late in found.items():
            p50, p99 = percentile(late, 0.5), percentile(late, 0.99)
            print(f"beside {name}: {len(late)} messages, late by p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
