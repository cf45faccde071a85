"""Random histories of real gates and real clients on the broker in memory, in virtual time.

usage: python -m tests.schedule_simulation [occurrences] [first seed] [operations of a history] [--fault NAME]

Everything happens in one thread and in virtual time, so a seed has one history. Between any two turns of the event
loop, that is at every await, a gate may be killed, frozen, cut off or stopped, or its clock stepped. The judge of the
model reads the whole history of the log, and what the consumers of the targets received.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import bide
import bide.client.schedule_room
import bide.gate.log_follower
import bide.gate.log_reader
import bide.gate.partition_session
import bide.gate.room
import bide.gate.worker
from bide.errors import BrokerUnreachableError, ConnectionLostError, NoGateAnswerError, ScheduleLogError
from bide.gate import partition_index
from bide.gate.index import ScheduleIndex
from bide.messages import prepared
from bide.schedules import snapshot
from bide.topology import Queue
from tests.schedule_simulation import faults
from tests.schedule_simulation.applications import Applications, note_requests
from tests.schedule_simulation.judging import judge_answers, judge_deliveries, judge_looks
from tests.schedule_simulation.loop import REAL_DISK
from tests.schedule_simulation.scenario import RESERVATION, Scenario
from tests.schedule_simulation.world import Process, World

TICK = 5.0
"""Seconds, instead of an hour: answers are forgotten after ten to fifteen, sessions after two minutes."""

CLAIM, CHUNK, REQUEST, FENCE = b'"kind":"claim"', b'"kind":"snapshot"', b'"request":"', b'"after":-1,'
"""What records contain. A gate that builds its index anew appends a fence."""


@dataclass(slots=True)
class Result:
    """One history.

    Attributes:
        problems: what is wrong with it.
        schedules: the number of occurrences in it.
        records: the number of records in the log.
        received: the number of messages that consumers received.
        starts: how often a gate was started.
        digest: of the log: the same for the same seed.
    """

    problems: list[str] = field(default_factory=list)
    schedules: int = 0
    records: int = 0
    received: int = 0
    starts: int = 0
    digest: int = 0


class Simulation:
    """One history.

    Args:
        schedules: how many operations clients start, about.

    Attributes:
        small_logs: the part of the histories with a small log.
        rest_within: seconds in which the work has to come to rest at the end.
        chunk_entries: the maximum number of entries of a chunk of a snapshot; one of them is drawn.
    """

    small_logs: ClassVar[float] = 0.15
    rest_within: ClassVar[int] = 300
    chunk_entries: ClassVar[tuple[int, ...]] = (5, 500)

    def __init__(self, seed: int, schedules: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.rng = random.Random(seed * 7 + 1)
        self.scenario = Scenario(seed, self.rng, schedules, self.small_logs)
        self.world = World(seed, self.scenario.scale, self.on_turn)
        self.applications = Applications(seed, self.scenario, self.world)
        self.is_calm = True
        self.gates: list[Process] = []
        self.clients: list[Process] = []
        self.folders = 0
        self.saved: list[Path] = []
        self.starts = 0
        self.carry_kills = self.scenario.carry_kills
        self.outages = self.scenario.outages

    # -- processes

    def new_folder(self, copied: Path | None) -> Path:
        self.folders += 1
        made = self.folder / str(self.folders)
        if copied is None or not copied.exists():
            made.mkdir()
        else:
            shutil.copytree(copied, made)
        return made

    def start_gate(self, number: int, index: Path | None = None) -> Process:
        process = Process(f"gate{number}", self.world.network())
        process.folder = self.new_folder(index)
        process.network.on_write = partial(self.on_gate_write, process)
        process.start(self.world.loop, self.supervise(process, number))
        return process

    async def supervise(self, process: Process, number: int) -> None:
        """Run a gate. One that does not reach the broker when it starts ends, and is started again."""
        assert process.folder is not None
        while not process.network.is_dead:
            self.starts += 1
            with patch.object(bide.gate.worker, "new_gate_name", lambda: f"host{number}/m{number}/{self.starts}"):
                process.gate = bide.Gate(
                    process.network.url,
                    allow=["open", "slow", "stuck", "gone"],
                    state=process.folder,
                    retention=self.world.scale.retention,
                    declare=False,
                    grace="2s",
                )
            try:
                await process.gate.run()
            except (ConnectionLostError, BrokerUnreachableError):
                await asyncio.sleep(0.5)  # in virtual time
            else:
                return

    def start_client(self, number: int) -> Process:
        process = Process(f"client{number}", self.world.network())
        process.network.on_write = partial(self.on_client_write, process)
        process.start(self.world.loop, self.applications.work(process, number))
        return process

    # -- disturbances

    def on_turn(self) -> None:
        if self.is_calm or self.rng.random() >= self.scenario.trouble:
            return
        rng, loop = self.rng, self.world.loop
        place = rng.randrange(len(self.gates))
        gate = self.gates[place]
        if gate.task is None or gate.task.done():
            return
        match rng.randrange(10):
            case 0 | 1 | 2:
                self.replace_gate(place)
            case 3:
                gate.network.cut()
            case 4 if (client := rng.choice(self.clients)).is_connected:
                client.network.cut()
            case 5 if not gate.calls.is_frozen:
                gate.calls.is_frozen = True
                longest = 60.0 if self.scenario.is_small else 20.0
                loop.call_later(rng.choice((0.05, 2.0, 7.0, longest)), loop.thaw, gate.calls)
            # A gate that starts with a wrong clock is believed. Two that are wrong alike confirm each other.
            case 6 if self.is_beating(gate) and all(not one.network.clock_error for one in self.gates):
                gate.network.clock_error = rng.choice((0.4, -0.3, 30.0))
            case 7:
                gate.network.clock_error = 0.0
            case 8 if gate.gate is not None:
                gate.is_stopping = True
                gate.gate.stop()
                loop.call_later(rng.choice((1.0, 5.0, 20.0)), self.replace_gate, place)
            case 9 if self.outages:
                self.outages -= 1
                pause = rng.choice((10.0, 30.0, 60.0))
                self.world.outage_until = loop.time() + pause
                for one in range(len(self.gates)):
                    self.replace_gate(one, pause)
            case _:
                return

    def on_gate_write(self, gate: Process, data: bytes) -> None:
        if self.is_calm or gate not in self.gates:
            return
        if CLAIM in data and self.rng.random() < self.scenario.cut_claims:
            self.soon(gate.network.cut, is_late=True)
        if FENCE in data and self.rng.random() < self.scenario.freeze_starts and not gate.calls.is_frozen:
            gate.calls.is_frozen = True
            self.world.loop.call_later(60.0, self.world.loop.thaw, gate.calls)
        if CHUNK in data and self.carry_kills and self.rng.random() < 0.7:
            self.carry_kills -= 1
            self.soon(self.replace_gate, self.gates.index(gate))

    def on_client_write(self, client: Process, data: bytes) -> None:
        if REQUEST in data and not self.is_calm and self.rng.random() < self.scenario.cut_requests:
            self.soon(client.network.cut)

    def soon(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call something after this turn of the loop, outside of the process that caused it."""
        self.world.loop.call_soon(partial(call, *args, **kwargs), context=Context())

    def is_beating(self, gate: Process) -> bool:
        return gate.gate is not None and gate.gate.name.encode() in self.world.beating

    def replace_gate(self, place: int, pause: float | None = None) -> None:
        """Kill a gate, and start another one after a while: with its index, with an old one, or without one."""
        if self.is_calm:
            return
        rng, gate = self.rng, self.gates[place]
        assert gate.folder is not None
        assert gate.task is not None
        left = self.new_folder(gate.folder)
        self.saved = [*self.saved[:1], *self.saved[1:][-2:], left]
        index = rng.choice((left, left, None, *self.saved))
        gate.network.kill()
        if gate.calls.is_frozen:
            self.world.loop.thaw(gate.calls)
        if not gate.task.done():
            gate.task.cancel()
        number = int(gate.name.removeprefix("gate"))

        def start() -> None:
            if not self.is_calm and self.gates[place] is gate:
                self.gates[place] = self.start_gate(number, index)

        self.world.loop.call_later(rng.choice((0.0, 0.1, 1.0, 6.0)) if pause is None else pause, start)

    # -- the history

    async def prepare(self) -> None:
        """Declare the log and the targets."""
        world = self.world
        await world.prepare()
        await world.declare_target(Queue("open"))
        await world.receive("bide.v1.schedule.undeliverable")
        channel = await world.connection.channel()
        await channel.declare_queue(Queue("slow", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}))
        await channel.declare_queue(Queue("foreign"))
        await channel.declare_queue(Queue("stuck", arguments={"x-max-length": 0, "x-overflow": "reject-publish"}))

    async def main(self) -> None:
        await self.prepare()
        self.gates = [self.start_gate(number) for number in range(self.rng.choice((1, 2, 3)))]
        self.clients = [self.start_client(number) for number in range(3)]
        self.is_calm = False
        working = [one.task for one in self.clients if one.task is not None]
        await asyncio.wait(working)
        for one in working:
            one.result()
        await asyncio.sleep(self.rng.choice((0.0, 5.0, 30.0)))  # in virtual time
        await self.calm()

    async def calm(self) -> None:
        """End all disturbances, and wait until everything was delivered."""
        world = self.world
        self.is_calm = True
        await world.receive("slow")
        for place, gate in enumerate(self.gates):
            gate.network.clock_error = 0.0
            assert gate.task is not None
            if gate.calls.is_frozen:
                world.loop.thaw(gate.calls)
            if gate.task.done() or gate.network.is_dead or gate.is_stopping:
                self.check_end(gate)
                gate.network.kill()
                self.gates[place] = self.start_gate(90 + place, None)
        await self.leave_one()
        async with bide.connect(world.network().url, declare=False, timeout="20s") as client:
            for _ in range(self.rest_within // 5):
                await self.resume_all(client)
                await asyncio.sleep(5)  # in virtual time
                if self.is_at_rest():
                    break
            else:
                self.world.problems.append("does not come to rest")
        for gate in self.gates:
            assert gate.gate is not None
            self.check_end(gate)
            gate.gate.stop()
        await asyncio.wait([one.task for one in self.gates if one.task is not None])

    async def resume_all(self, client: bide.Client) -> None:
        for verdict in self.world.verdicts:
            for key, entry in list(verdict.waiting.items()):
                if entry["paused"]:
                    # The log may still be full, or no gate may lead.
                    with suppress(ScheduleLogError, NoGateAnswerError):
                        await client.resume(key)

    async def leave_one(self) -> None:
        """In half of the histories, leave the rest of the work to one gate, which may have been frozen for long."""
        if self.rng.random() < 0.5:
            return
        left = self.rng.choice(self.gates)
        for gate in self.gates:
            if gate is not left and gate.gate is not None and gate.task is not None:
                gate.gate.stop()
                await asyncio.wait({gate.task})
                self.check_end(gate)
        self.gates = [left]

    def check_end(self, gate: Process) -> None:
        task = gate.task
        assert task is not None
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            self.world.problems.append(f"{gate.name} ended: {error!r}")

    def is_at_rest(self) -> bool:
        for verdict in self.world.verdicts:
            if verdict.waiting:
                return False
            if any(one.fate == "under way" and one.target != "q:stuck" for one in verdict.lives.values()):
                return False
        return True

    def run(self) -> Result:
        loop = self.world.loop
        try:
            loop.set_exception_handler(lambda _, context: self.world.problems.append(f"asyncio: {context['message']}"))
            loop.run_until_complete(self.main())
            self.world.problems += judge_answers(self.world)
            self.world.problems += judge_deliveries(self.world)
            self.world.problems += judge_looks(self.world)
        finally:
            self.is_calm = True
            loop.run_until_complete(end_tasks())
            loop.close()
        lives = sum(len(one.lives) for one in self.world.verdicts)
        return Result(
            [f"seed {self.seed}: {one}" for one in self.world.problems],
            lives,
            len(self.world.history),
            len(self.world.received),
            self.starts,
            self.world.digest,
        )


async def end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(seed: int, schedules: int = 150, fault: str | None = None, *, kind: type[Simulation] = Simulation) -> Result:
    """One history; what is wrong with it."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=REAL_DISK) as folder, ExitStack() as stack:
        random.seed(seed)
        stack.enter_context(patch.object(os, "urandom", rng.randbytes))
        stack.enter_context(patch.object(secrets, "token_hex", lambda size=8: rng.randbytes(size).hex()))
        stack.enter_context(patch.object(prepared, "_id_prefix", "0" * 20))
        stack.enter_context(patch.object(prepared, "_id_counter", count()))
        note_requests(stack)
        simulation = kind(seed, schedules, Path(folder))
        stack.enter_context(patch.object(bide.gate.room, "MAX_RESERVATIONS", simulation.world.scale.reservations))
        stack.enter_context(patch.object(bide.client.schedule_room, "RESERVATION_BYTES", RESERVATION))
        stack.enter_context(patch.object(bide.gate.partition_session, "_TICK_EVERY", TICK))
        stack.enter_context(patch.object(bide.gate.log_follower, "_SIZE_STEP", 1))
        stack.enter_context(patch.object(bide.gate.worker, "_LEAST_RETENTION", 1))
        stack.enter_context(patch.object(bide.gate.log_reader, "PREFETCH", simulation.scenario.prefetch))
        stack.enter_context(
            patch.object(snapshot, "cut", partial(snapshot.cut, most=rng.choice(simulation.chunk_entries)))
        )
        # In a third of the histories each batch goes through the thread, so that other calls come between.
        stack.enter_context(patch.object(partition_index, "_BRIEF_RECORDS", (0, 2, 16)[seed % 3]))
        # The index is committed after each batch, or more rarely.
        stack.enter_context(patch.object(partition_index, "_COMMIT_EVERY", (0.001, 0.3, 5.0)[seed // 3 % 3]))
        # A batch ends after 50 ms, and commits wait for checkpoints, which must not depend on this machine.
        stack.enter_context(patch.object(ScheduleIndex, "is_checkpointing", False))
        stack.enter_context(
            patch.object(partition_index, "time", SimpleNamespace(monotonic=simulation.world.loop.time))
        )
        faults.plant(fault, stack)
        return simulation.run()
