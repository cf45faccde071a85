"""Cancels and replaces at the moment of delivery, while gates and the broker are killed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import bide
from bide import Queue, ScheduleOutcome, Topology
from bide.check.processes import CommandProcess
from bide.durations import to_milliseconds
from bide.errors import BideError
from bide.local_broker import LocalBroker
from bide.schedules.names import PARTITIONS, partition_of
from tests.schedule_race.history import Change, HistoryWriter, Kill, Receipt, Start, What
from tests.schedule_race.log import ReadLog
from tests.support import flush_declarations

_QUEUE: Final = "reminders"
_SPREAD: Final = 0.01
"""Seconds around the moment that is aimed at."""
_STEP: Final = 0.001
_AIMS: Final = (-0.1, 0.3)
_PROMPT: Final = 0.5
"""Seconds. An answer that takes longer says nothing about the aim: no gate led the partition."""
_ANSWER_TIMEOUT: Final = timedelta(minutes=3)
"""Longer than the broker takes to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a race does.

    Attributes:
        rate: changes per second, at most.
        slots: changes at the same time, at most.
        gate_kill_every: seconds, on average.
        seconds: until it gives up.
    """

    seed: int
    operations: int
    rate: float = 300.0
    slots: int = 1000
    gate_kill_every: float = 4.0
    broker_kills: int = 3
    seconds: float = 3600.0


class Race:
    """One race. Run it once.

    Args:
        broker: that may be killed.
        folder: for the indexes of gates.
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
                lambda name, code: history.add(Kill(process=name, code=code)),
            )
            for name in ("gate1", "gate2")
        ]
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
                bide.connect(self._broker.url, timeout=_ANSWER_TIMEOUT) as self._client,
                asyncio.TaskGroup() as tasks,
            ):
                await self._client.declare(Topology(queues=[Queue.quorum(_QUEUE)]))
                receiving = tasks.create_task(self._receive())
                gates = [tasks.create_task(one.run()) for one in self._gates]
                await self._client.schedule(b"first", key="first", to=_QUEUE, delay="0s")
                await self._until_received(1)
                await asyncio.to_thread(flush_declarations, self._broker)
                killing_gates = tasks.create_task(self._kill_gates())
                await self._change_all()
                killing_gates.cancel()
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

    # -- the client

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
        what: What = rng.choice(("cancel", "cancel", "replace", "replace-if"))
        first: str | None = None
        try:
            made = await self._client.schedule(f"{key}/1", key=key, to=_QUEUE, delay=f"{rng.uniform(0.5, 1.5):.3f}s")
            first = made.id
            assert made.due_time is not None
            aim = made.due_time.timestamp() + self._aims[partition_of(key)] + rng.uniform(-_SPREAD, _SPREAD)
            await asyncio.sleep(aim - datetime.now(UTC).timestamp())  # the moment to change it
            begun = asyncio.get_running_loop().time()
            second: str | None = None
            if what == "cancel":
                outcome = (await self._client.cancel(key)).outcome
            else:
                replaced = await self._client.schedule(
                    f"{key}/2",
                    key=key,
                    to=_QUEUE,
                    delay=f"{rng.uniform(0, 0.5):.3f}s",
                    if_version=made.version if what == "replace-if" else None,
                )
                outcome, second = replaced.outcome, replaced.id
        except BideError as error:
            self._history.add(Change(what=what, key=key, first=first, error=repr(error)))
            return
        self._history.add(Change(what=what, key=key, first=first, second=second, outcome=outcome.value))
        if what != "replace" and asyncio.get_running_loop().time() - begun < _PROMPT:
            self._correct_aim(key, outcome)

    def _correct_aim(self, key: str, outcome: ScheduleOutcome) -> None:
        """Aim later after a change that was in time, and earlier after one that was not, so that half of them are."""
        is_late = outcome in (ScheduleOutcome.TOO_LATE, ScheduleOutcome.CHANGED)
        partition, (earliest, latest) = partition_of(key), _AIMS
        self._aims[partition] = min(max(self._aims[partition] + (-_STEP if is_late else _STEP), earliest), latest)

    async def _receive(self) -> None:
        async with self._client.consume(_QUEUE, prefetch=500) as messages:
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

    # -- faults

    async def _kill_gates(self) -> None:
        while True:
            await asyncio.sleep(self._plan.gate_kill_every * self._rng.uniform(0.5, 1.5))  # until the next kill
            self._rng.choice(self._gates).kill()

    async def _kill_broker(self) -> None:
        # In a short race, or on a busy machine, it is time for the next kill before the broker has started again.
        async with self._broker_restarts:
            self._history.add(Kill(process="broker"))
            await asyncio.to_thread(self._broker.kill)
            await asyncio.to_thread(self._broker.restart)
