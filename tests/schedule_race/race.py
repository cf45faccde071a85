"""Changes of schedules at the moment of delivery, with gates, clients and broker killed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import bide
from bide import Queue, Topology
from bide.check.processes import CommandProcess
from bide.durations import to_milliseconds
from bide.local_broker import LocalBroker
from bide.schedules.names import PARTITIONS, partition_of
from tests.schedule_race.client import ANSWER_TIMEOUT, QUEUE, Task, perform
from tests.schedule_race.client_process import ClientProcess
from tests.schedule_race.history import Change, HistoryWriter, Kill, Receipt, Start
from tests.schedule_race.log import ReadLog
from tests.support import flush_declarations

_SPREAD: Final = 0.01
"""Seconds around the moment that is aimed at."""
_STEP: Final = 0.001
_AIMS: Final = (-0.1, 0.3)
_PROMPT: Final = 0.5
"""Seconds. An answer that takes longer says nothing about the aim: no gate led the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a race does.

    Attributes:
        rate: changes per second, at most.
        slots: changes at the same time, at most.
        gate_kill_every: answers of gates until one of them is killed, on average. A number of seconds would not let
            gates take over on a busy machine.
        client_kill_every: requests of a client process until it is killed, on average. A change has two requests.
        seconds: until it gives up.
    """

    seed: int
    operations: int
    rate: float = 300.0
    slots: int = 1000
    gate_kill_every: int = 900
    client_kill_every: int = 1000
    broker_kills: int = 3
    seconds: float = 3600.0


class Race:
    """One race. Run it once.

    Args:
        broker: that may be killed.
        folder: for the indexes of gates, and for logs.
    """

    def __init__(self, plan: Plan, broker: LocalBroker, folder: Path, history: HistoryWriter) -> None:
        self._plan = plan
        self._broker = broker
        self._history = history
        self._rng = random.Random(plan.seed)
        self._gates = [
            CommandProcess(
                name,
                ["gate", "--state", str(folder / name), "--allow", "*"],
                broker.url,
                folder,
                self._add_end,
            )
            for name in ("gate1", "gate2")
        ]
        self._clients = [
            ClientProcess(
                name,
                broker.url,
                folder,
                requests=plan.client_kill_every,
                rng=random.Random(self._rng.random()),
                on_end=self._add_end,
            )
            for name in ("client1", "client2")
        ]
        self._answers_to_kill = self._random_answers()
        self._aims = [0.0] * PARTITIONS
        self._received: set[str] = set()
        self._has_received = asyncio.Event()
        self._broker_restarts = asyncio.Lock()
        self._client: bide.Client

    async def run(self) -> None:
        """Run it, and write the history.

        Raises:
            TimeoutError: it took too long.
        """
        self._history.add(Start(seed=self._plan.seed, operations=self._plan.operations))
        log = ReadLog()
        try:
            async with (
                asyncio.timeout(self._plan.seconds),
                bide.connect(self._broker.url, timeout=ANSWER_TIMEOUT) as self._client,
                asyncio.TaskGroup() as tasks,
            ):
                await self._client.declare(Topology(queues=[Queue.quorum(QUEUE)]))
                receiving = tasks.create_task(self._receive())
                gates = [tasks.create_task(one.run()) for one in self._gates]
                await self._client.schedule(b"first", key="first", to=QUEUE, delay="0s")
                await self._until_received(1)
                await asyncio.to_thread(flush_declarations, self._broker)
                clients = [tasks.create_task(one.run()) for one in self._clients]
                await self._change_all()
                for task in clients:
                    task.cancel()
                await asyncio.wait(clients)
                await self._until_disconnected()
                await log.read(self._broker.url)
                await self._until_received(len(log.delivered))
                for one in self._gates:
                    one.stop()
                await asyncio.wait(gates)
                receiving.cancel()
        finally:
            for fate in log.fates():
                self._history.add(fate)
            self._history.add(log.summary())

    # -- clients

    async def _change_all(self) -> None:
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(self._plan.slots)
        kills = self._plan.broker_kills
        kill_at = {self._plan.operations * (one + 1) // (kills + 1) for one in range(kills)}
        next_at = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._plan.operations):
                await slots.acquire()
                # A pause that was too long is not made up for: the machine is busy then.
                next_at = max(next_at + 1 / self._plan.rate, loop.time())
                await asyncio.sleep(next_at - loop.time())  # the rate of the plan
                if number in kill_at:
                    tasks.create_task(self._kill_broker())
                tasks.create_task(self._race(number)).add_done_callback(lambda _: slots.release())

    async def _race(self, number: int) -> None:
        key, rng = f"k{number}", self._rng
        task = Task(
            what=rng.choice(("cancel", "cancel", "replace", "replace-if")),
            key=key,
            delay=rng.uniform(0.5, 1.5),
            replacement_delay=rng.uniform(0, 0.5),
            offset=self._aims[partition_of(key)] + rng.uniform(-_SPREAD, _SPREAD),
        )
        # The client of the race makes every second change: it is never killed, so that it gets an answer.
        if number % 2:
            change = await self._clients[number // 2 % len(self._clients)].perform(task)
        else:
            change = await perform(self._client, task)
        self._history.add(change)
        if change.outcome != "error" and change.what in ("cancel", "replace-if"):  # a gate has answered
            if change.seconds < _PROMPT:
                self._correct_aim(change)
            self._count_answer()

    def _correct_aim(self, change: Change) -> None:
        """Aim later after a change that was in time, and earlier after one that was not, so that half of them are."""
        is_late = change.outcome in ("too-late", "changed")
        partition, (earliest, latest) = partition_of(change.key), _AIMS
        self._aims[partition] = min(max(self._aims[partition] + (-_STEP if is_late else _STEP), earliest), latest)

    async def _receive(self) -> None:
        async with self._client.consume(QUEUE, prefetch=500) as messages:
            async for message in messages:
                await message.ack()
                assert message.schedule_id is not None
                receipt = Receipt(
                    id=message.schedule_id,
                    body=message.body.decode(),
                    at=to_milliseconds(message.received_at),
                    is_redelivered=message.redelivered,
                )
                self._history.add(receipt)
                self._received.add(receipt.id)
                self._has_received.set()

    async def _until_received(self, count: int) -> None:
        while len(self._received) < count:
            self._has_received.clear()
            await self._has_received.wait()

    async def _until_disconnected(self) -> None:
        """Wait until the broker has read all that killed clients sent, so that the end of the log does not move."""
        names = [one.name for one in self._clients]
        while True:
            connections = await asyncio.to_thread(self._broker.rabbitmqctl, "list_connections", "client_properties")
            if not any(one in connections for one in names):
                return

    # -- faults

    def _add_end(self, name: str, code: int | None) -> None:
        self._history.add(Kill(process=name, code=code))

    def _count_answer(self) -> None:
        self._answers_to_kill -= 1
        if self._answers_to_kill == 0:
            self._answers_to_kill = self._random_answers()
            self._rng.choice(self._gates).kill()

    def _random_answers(self) -> int:
        return round(self._plan.gate_kill_every * self._rng.uniform(0.5, 1.5))

    async def _kill_broker(self) -> None:
        # In a short race, or on a busy machine, it is time for the next kill before the broker has started again.
        async with self._broker_restarts:
            self._history.add(Kill(process="broker"))
            await asyncio.to_thread(self._broker.kill)
            await asyncio.to_thread(self._broker.restart, timeout=timedelta(seconds=self._plan.seconds))
