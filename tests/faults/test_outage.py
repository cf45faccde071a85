"""Publishing while one of three nodes fails for 40 s, in network namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import bide
from bide.errors import BideError
from bide.local_broker import LocalBroker, LocalCluster
from bide.local_broker.configuration import amqp_url
from bide.local_broker.installation import numbers
from tests.broker.receiving import connection_of, eventually, fresh
from tests.faults.cluster import cluster
from tests.support import Rabbitmq

OUTAGE = 40.0
LONGEST_GAP = 10.0
BEAT = 0.05
POLLING = 1.0
"""Seconds between two looks of RabbitMQ's failure detector. With its own 5 s an election alone takes up to 11 s."""


@pytest.fixture(scope="module")
def nodes(rabbitmq: Rabbitmq) -> Iterator[LocalCluster]:
    with cluster(rabbitmq, namespaces=True, polling=int(1_000 * POLLING)) as made:
        yield made


@dataclass
class Publishing:
    """Publishes one message after the other, as a caller that waits for each."""

    client: bide.Client
    queue: str
    ended: bool = False
    confirmed: list[float] = field(default_factory=list)
    errors: list[BideError] = field(default_factory=list)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self.ended:
            try:
                await self.client.publish(b"", to=self.queue)
            except BideError as error:
                self.errors.append(error)
            self.confirmed.append(clock())
            await asyncio.sleep(0.05)  # twenty publishes a second

    @property
    def longest_gap(self) -> float:
        return max(later - earlier for earlier, later in zip(self.confirmed, self.confirmed[1:], strict=False))


class Metronome:
    """Counts time in which this process gets processor time: without it, nothing is published either.

    Attributes:
        beats: the number of intervals of ``BEAT`` seconds so far.
        longest_stall: seconds of the longest time without processor time.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.longest_stall = 0.0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await asyncio.sleep(BEAT)  # it takes longer by what is measured
            self.beats += 1
            self.longest_stall = max(self.longest_stall, clock() - begun - BEAT)

    async def wait(self, seconds: float) -> None:
        """Wait for this much time with processor time."""
        end = self.beats + seconds / BEAT

        async def has_passed() -> bool:
            return self.beats >= end

        await eventually(has_passed)


Change = Callable[[LocalCluster, LocalBroker], None]
FAULTS: dict[str, tuple[Change, Change]] = {
    "stopped": (lambda _, node: node.pause(), lambda _, node: node.resume()),
    "cut off from the others": (
        lambda cluster, node: cluster.cut_off(node, *(one for one in cluster.nodes if one is not node)),
        lambda cluster, node: cluster.reconnect(node, *(one for one in cluster.nodes if one is not node)),
    ),
    "cut off from all": (LocalCluster.unplug, LocalCluster.plug),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_outage_of_one_node_does_not_stop_publishing(nodes: LocalCluster, fault: str) -> None:
    """Two clients of each node: for a queue whose leader is on the node that fails, and for one whose leader is not.

    Up to RabbitMQ 3.13 a new channel takes the leader of a queue from Mnesia, which does not learn of a new one before
    the nodes have given up the one that fails (``net_ticktime``): there the client of that node is not looked at that
    publishes to a queue with its leader there.
    """
    victim, *others = nodes.nodes
    publishing: list[Publishing] = []
    for node in nodes.nodes:
        hosts = [node.host, *(one.host for one in nodes.nodes if one is not node)]
        url = amqp_url(hosts, "/", user=node.user, password=node.password)
        for leader in (victim, others[0]):
            client = await bide.connect(f"{url}?order=given")
            queue = await led_by(leader)
            publishing.append(Publishing(client, queue))
    tasks = [asyncio.create_task(one.run()) for one in publishing]
    metronome = Metronome()
    beating = asyncio.create_task(metronome.run())
    await metronome.wait(3)  # publishing without a fault
    fail, restore = FAULTS[fault]
    try:
        await asyncio.to_thread(fail, nodes, victim)
        await metronome.wait(OUTAGE)  # the outage itself
    finally:
        await asyncio.to_thread(restore, nodes, victim)
    await metronome.wait(3)  # publishing after the fault
    for one in publishing:
        one.ended = True
    await asyncio.gather(*tasks)
    beating.cancel()
    gaps = [one.longest_gap for one in publishing]
    addresses = [(await connection_of(one.client)).address for one in publishing]
    for one in publishing:
        await one.client.close()
    watched = range(6) if numbers(nodes.release) >= (4, 0) else range(1, 6)
    assert [publishing[one].errors for one in watched] == [[]] * len(watched)
    longest = LONGEST_GAP + metronome.longest_stall
    assert max(gaps[3], gaps[5]) < longest, (gaps, longest)
    # Clients of the healthy nodes have nothing to leave: they wait for the election, which a busy machine slows down.
    election = max(gaps[2], gaps[4])
    assert max(gaps[one] for one in (0, 1) if one in watched) < longest + election, (gaps, longest)
    # The clients of the node that failed have left it; those that were confirmed what they sent stayed where they were.
    assert victim.host not in [addresses[one] for one in (0, 1) if one in watched]
    assert addresses[3::2] == [one.host for one in others]


async def led_by(node: LocalBroker) -> str:
    """A new quorum queue whose leader is on this node."""
    queue = fresh("q")
    async with bide.connect(node.url) as client:
        leader = {"x-queue-leader-locator": "client-local"}
        await client.declare(bide.Topology(queues=[bide.Queue.quorum(queue, arguments=leader)]))
        await client.publish(b"", to=queue)
    return queue
