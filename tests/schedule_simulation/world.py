"""The broker, the processes and the history of one simulation."""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bide
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.schedules.encoding import encode
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule, Claim, ClaimedOccurrence, Done, EndedOccurrence, ScheduleRecord
from bide.schedules.requests import RequestId
from bide.testing import MemoryBroker
from bide.topology import Binding, Queue
from tests.schedule_model.judge import Verdict, read
from tests.schedule_simulation.loop import PROCESS, FrozenCalls, SimulatedLoop
from tests.schedule_simulation.network import Network

NAMES = ScheduleNames()

_BEAT = re.compile(rb'\{"v":1,"kind":"beat","gate":"([^"]*)".*"after":[0-9]')
"""A beat of a gate that follows the log. Those without a position only mark its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of a schedule log.

    Attributes:
        retention: of each stream in bytes. An eighth has room for the largest state and the largest chunk.
        reservations: that a room queue takes: a quarter of the retention.
    """

    retention: int
    segment: int
    reservations: int


@dataclass(slots=True, kw_only=True)
class Received:
    """A message that a consumer received."""

    queue: str
    schedule: str
    message_id: str | None
    body: bytes
    at: int


@dataclass(slots=True, kw_only=True)
class Operation:
    """A call of a client, with its result."""

    what: str
    key: str
    begun: int
    """The number of records in the log when it was called."""
    ended: int = 0
    requests: list[str] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Process:
    """A gate or an application.

    Attributes:
        is_connected: whether an application has reached the broker. Before, it ends when its connection breaks.
    """

    name: str
    network: Network
    calls: FrozenCalls = field(default_factory=FrozenCalls)
    task: asyncio.Task[Any] | None = None
    folder: Path | None = None
    gate: bide.Gate | None = None
    is_stopping: bool = False
    is_connected: bool = False

    def start(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
        context = copy_context()
        context.run(PROCESS.set, self.calls)
        self.task = loop.create_task(work, context=context, name=self.name)


class World:
    """Everything in one simulation.

    Attributes:
        problems: what is wrong with the history.
        outage_until: the time of the loop until which all gates are down.
    """

    def __init__(self, seed: int, scale: Scale, on_turn: Callable[[], None]) -> None:
        self.rng = random.Random(seed)
        self.scale = scale
        release = self.rng.choice(((3, 10), (4, 0), (4, 3)))
        self.broker = MemoryBroker(release=release)
        self.loop = SimulatedLoop(self.broker.clock, random.Random(seed + 1), on_turn)
        self.latency = self.rng.choice((0.0005, 0.002, 0.02))
        self.verdicts = [Verdict() for _ in range(PARTITIONS)]
        self.history: list[tuple[int, str, bytes]] = []
        self.digest = 0
        self.beating: set[bytes] = set()
        self.received: list[Received] = []
        self.operations: list[Operation] = []
        self.problems: list[str] = []
        self.outage_until = 0.0
        self.connection: Connection

    @property
    def now(self) -> int:
        """Milliseconds since the Unix epoch."""
        return self.broker.clock.milliseconds

    def network(self, latency: float | None = None) -> Network:
        return Network(self.broker, self.rng, self.latency if latency is None else latency)

    async def prepare(self) -> None:
        """Declare the log with its sizes, and queues that get a copy of each record: the whole history."""
        self.connection = await Connection.open(self.network(0.0).url)
        channel = await self.connection.channel(confirms=True)
        sizes = {
            "x-max-length-bytes": self.scale.retention,
            "x-stream-max-segment-size-bytes": self.scale.segment,
            "x-max-length": self.scale.reservations,
        }
        topology = NAMES.topology()
        queues = [
            Queue(
                one.name,
                arguments={name: sizes.get(name, value) for name, value in one.arguments.items()},
            )
            for one in topology.queues
        ]
        for exchange in topology.exchanges:
            await channel.declare_exchange(exchange)
        for queue in queues:
            await channel.declare_queue(queue)
        for binding in topology.bindings:
            await channel.bind(binding)
        for partition in range(PARTITIONS):
            name = f"history.{partition}"
            await channel.declare_queue(Queue(name))
            for source in (NAMES.operations, NAMES.gates):
                await channel.bind(Binding(source, name, str(partition)))
            await self.consume(name, self._recorder(partition))

    def _recorder(self, partition: int) -> Callable[[Delivery], None]:
        verdict = self.verdicts[partition]
        kinds = {NAMES.operations: "operations", NAMES.gates: "gates"}

        def record(delivery: Delivery) -> None:
            self.history.append((partition, kinds[delivery.exchange], delivery.body))
            self.digest = zlib.crc32(delivery.body, self.digest)
            if beat := _BEAT.match(delivery.body):
                self.beating.add(beat[1])
            read(verdict, kinds[delivery.exchange], delivery.body, partition, PARTITIONS)

        return record

    async def consume(self, queue: str, on_message: Callable[[Delivery], None]) -> None:
        """Receive all messages of a queue."""
        channel = await self.connection.channel()
        await channel.consume(queue, on_message=on_message, on_end=lambda _: None, no_ack=True)

    async def declare_target(self, queue: Queue) -> None:
        """Declare a target, and receive what it gets."""
        channel = await self.connection.channel()
        await channel.declare_queue(queue)
        await self.receive(queue.name)

    async def receive(self, queue: str) -> None:
        """Keep what a queue gets."""

        def keep(delivery: Delivery) -> None:
            headers = delivery.values["headers"]
            self.received.append(
                Received(
                    queue=queue,
                    schedule=headers["bide-schedule-id"],
                    message_id=delivery.values.get("message_id"),
                    body=delivery.body,
                    at=self.now,
                )
            )

        await self.consume(queue, keep)

    async def stray(self, rng: random.Random) -> None:
        """Append a schedule to the log of another partition, as a CC header can."""
        key, partition = f"stray{rng.randrange(100)}", rng.randrange(PARTITIONS)
        if partition == partition_of(key):
            return
        record = AddSchedule(
            request=RequestId(rng.randbytes(10).hex(), 1),
            key=key,
            target="q:open",
            nominal=self.now,
            due=self.now,
            message=ScheduledMessage(b"\0\0", b"stray"),
        )
        await self._append(partition, record)

    async def forge(self, rng: random.Random) -> None:
        """Append a claim, or a report, as an application that pretends to be a gate."""
        partition = rng.randrange(PARTITIONS)
        waiting = self.verdicts[partition].waiting
        if not waiting:
            return
        key = rng.choice(sorted(waiting))
        entry = waiting[key]
        item = ClaimedOccurrence(key=key, version=entry["version"], nominal=entry["nominal"], due=entry["due"])
        ended = EndedOccurrence(occurrence=entry["occurrence"], outcome="delivered")
        await self._append(
            partition, rng.choice((Claim(gate="forged", items=(item,)), Done(gate="forged", items=(ended,))))
        )

    async def _append(self, partition: int, record: ScheduleRecord) -> None:
        async with await self.connection.channel(confirms=True) as channel:
            await channel.publish(exchange=NAMES.operations, routing_key=str(partition), values={}, body=encode(record))
