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
from itertools import count, islice
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
from bide.client.publish_result import PublishResult
from bide.client.schedule_requests import ScheduleRequests
from bide.errors import (
    BideError,
    BrokerUnreachableError,
    BulkInDoubtError,
    ConnectionLostError,
    NoGateAnswerError,
    PublishError,
    PublishInDoubtError,
    ScheduleLogError,
)
from bide.gate import partition_index
from bide.gate.index import ScheduleIndex
from bide.messages import prepared
from bide.schedules import snapshot
from bide.schedules.names import partition_of
from bide.topology import Queue
from tests.schedule_simulation import faults
from tests.schedule_simulation.judging import judge_answers, judge_deliveries, judge_looks
from tests.schedule_simulation.loop import REAL_DISK
from tests.schedule_simulation.world import REQUESTS, Operation, Process, Scale, World

RESERVATION = 8_000

TICK = 5.0
"""Seconds, instead of an hour: answers are forgotten after ten to fifteen, sessions after two minutes."""

SMALL = Scale(retention=512_000, segment=16_000, reservations=512_000 // 4 // RESERVATION)
"""An eighth, 64 KB, has room for the largest state and a chunk: ten schedules that wait, those under way, and a hundred
answers that are remembered."""

LARGE = Scale(retention=64_000_000, segment=8_000_000, reservations=64_000_000 // 4 // RESERVATION)

PARTITION = 3
"""In small logs all keys are in one partition."""

CLAIM, CHUNK, REQUEST, FENCE = b'"kind":"claim"', b'"kind":"snapshot"', b'"request":"', b'"after":-1,'
"""What records contain. A gate that builds its index anew appends a fence."""

TARGETS = (*("open",) * 6, "slow", "stuck", "gone", "foreign")
"""``slow`` refuses for a while, ``stuck`` always, ``gone`` does not exist, ``foreign`` is not allowed."""

EXPECTED = (NoGateAnswerError, PublishInDoubtError, ScheduleLogError, PublishError)


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
    """

    small_logs: ClassVar[float] = 0.15
    rest_within: ClassVar[int] = 300

    def __init__(self, seed: int, schedules: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.rng = rng = random.Random(seed * 7 + 1)
        self.is_small = rng.random() < self.small_logs
        self.world = World(seed, SMALL if self.is_small else LARGE, self.on_turn)
        # In a small log, enough that retention takes its beginning, and slowly enough that answers are forgotten.
        # More would outgrow an eighth of its retention: no answer is forgotten while no gate runs.
        self.operations = 1500 if self.is_small else schedules
        self.pause = 0.2 if self.is_small else rng.choice((0.002, 0.02, 0.2))
        self.span = rng.choice((0.1, 0.5, 5.0) if self.is_small else (0.5, 5.0, 60.0))
        names = (f"k{number}" for number in count())
        if self.is_small:
            names = (one for one in names if partition_of(one) == PARTITION)
        self.keys = list(islice(names, rng.choice((3, 10) if self.is_small else (3, 30, 300))))
        self.rare_keys = list(islice(names, 3))
        self.targets = tuple(one for one in TARGETS if not (self.is_small and one in ("slow", "stuck")))
        self.body_size = 600 if self.is_small else 10
        # In every fifth history, changes are aimed at the moments when schedules are claimed.
        self.is_aimed = seed % 5 == 4 and not self.is_small
        if self.is_aimed:
            self.span, self.pause = 0.3, 0.02
        # Every tenth history schedules in bulk and moves by filter, too. The others draw as they did without that.
        self.has_bulk = seed % 10 == 3
        self.trouble = rng.choice((0.0, 0.0002, 0.001, 0.005))
        self.is_recurring = rng.random() < 0.15 and not self.is_small
        # How often a connection breaks just when it carries something that matters.
        self.cut_claims = rng.choice((0.0, 0.0, 0.05, 0.3))
        self.cut_requests = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.weights: tuple[float, ...]
        if self.is_small:
            self.weights = (80, 1, 8, 4, 1, 2, 1, 0, 1, 1)
        elif self.is_recurring:
            self.weights = (10, 50, 16, 8, 3, 4, 3, 0.3, 2, 1)
        else:
            self.weights = (50, 6, 16, 8, 3, 4, 3, 1, 2, 2)
        self.freeze_starts = rng.choice((0.0, 0.2)) if self.is_small else 0.0
        # A gate that crashes again and again while it carries stops before the log is lost, as it should.
        self.carry_kills = rng.choice((0, 1, 2)) if self.is_small else 0
        self.outages = 2 if self.is_small else 0
        self.outage_until = 0.0
        self.prefetch = rng.choice((3, 30, 1000)) if self.is_small else 1000
        self.is_calm = True
        self.gates: list[Process] = []
        self.clients: list[Process] = []
        self.problems: list[str] = []
        self.folders = 0
        self.saved: list[Path] = []
        self.starts = 0
        self.versions: list[str] = ["none"]

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
        process.start(self.world.loop, self.work(process, number))
        return process

    # -- disturbances

    def on_turn(self) -> None:
        if self.is_calm or self.rng.random() >= self.trouble:
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
                loop.call_later(rng.choice((0.05, 2.0, 7.0, 60.0 if self.is_small else 20.0)), loop.thaw, gate.calls)
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
                self.outage_until = loop.time() + pause
                for one in range(len(self.gates)):
                    self.replace_gate(one, pause)
            case _:
                return

    def on_gate_write(self, gate: Process, data: bytes) -> None:
        if self.is_calm or gate not in self.gates:
            return
        if CLAIM in data and self.rng.random() < self.cut_claims:
            self.soon(gate.network.cut, is_late=True)
        if FENCE in data and self.rng.random() < self.freeze_starts and not gate.calls.is_frozen:
            gate.calls.is_frozen = True
            self.world.loop.call_later(60.0, self.world.loop.thaw, gate.calls)
        if CHUNK in data and self.carry_kills and self.rng.random() < 0.7:
            self.carry_kills -= 1
            self.soon(self.replace_gate, self.gates.index(gate))

    def on_client_write(self, client: Process, data: bytes) -> None:
        if REQUEST in data and not self.is_calm and self.rng.random() < self.cut_requests:
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

    # -- applications

    async def work(self, process: Process, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        async with bide.connect(process.network.url, declare=False, timeout="20s") as client:
            process.is_connected = True
            running = set[asyncio.Task[None]]()
            for place in range(self.operations // 3):
                await asyncio.sleep(rng.random() * self.pause)  # in virtual time
                if len(running) > 5:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self.operate(client, rng, f"{number}.{place}"))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)

    async def operate(self, client: bide.Client, rng: random.Random, name: str) -> None:
        key = rng.choice(self.keys)
        version = rng.choice(self.versions[-5:]) if rng.random() < 0.1 else None
        what = rng.choices(
            ("schedule", "recurring", "cancel", "move", "pause", "resume", "run_now", "filter", "look", "forge"),
            self.weights,
        )[0]
        if asyncio.get_running_loop().time() < self.outage_until:
            what, version = "burst", None
        if what == "forge":
            await (self.world.forge(rng) if rng.random() < 0.5 else self.world.stray(rng))
            return
        if self.has_bulk and what in ("schedule", "move", "filter") and rng.random() < 0.3:
            what = "bulk" if what == "schedule" else "move_filter"
        if what == "bulk":
            await self.call_bulk(client, rng, name)
            return
        delay = rng.random() * self.span
        if self.is_small and rng.random() < 0.01:
            # These wait for so long that retention removes their records, and nothing replaces what a gate has missed.
            key, delay = rng.choice(self.rare_keys), rng.random() * 60
        await self.call(client, rng, name, what, key, version, delay)
        if self.is_aimed and what in ("schedule", "move"):
            await asyncio.sleep(max(delay + rng.uniform(-0.07, 0.03), 0))  # in virtual time
            change = rng.choice(("cancel", "cancel", "move", "pause", "schedule"))
            await self.call(client, rng, f"{name}a", change, key, None, rng.random() * self.span)

    async def call(
        self,
        client: bide.Client,
        rng: random.Random,
        name: str,
        what: str,
        key: str,
        version: str | None,
        seconds: float,
    ) -> None:
        operation = Operation(what=what, key=key, begun=len(self.world.history))
        self.world.operations.append(operation)
        REQUESTS.set(operation.requests)
        delay = f"{seconds:.3f}s"
        body = f"{name} ".ljust(self.body_size)
        try:
            match what:
                case "schedule" | "burst":
                    operation.result = await client.schedule(
                        body,
                        key=key,
                        to=rng.choice(self.targets),
                        delay=delay,
                        if_absent=what == "schedule" and version is None and rng.random() < 0.1,
                        if_version=version,
                    )
                case "recurring":
                    first = client.now() + bide.durations.parse_delay(delay)
                    if rng.random() < 0.5:
                        # The same moment under the same key, as with cron expressions.
                        first = first.replace(microsecond=0)
                    operation.result = await client.schedule(
                        body,
                        key=key,
                        to=rng.choice(self.targets),
                        every=rng.choice(("1s", "3s", "7s")),
                        first_run=first,
                        last_run=first + bide.durations.parse_delay("20s"),
                        catch_up=rng.choice(("last", "all", "none")),
                    )
                case "move":
                    operation.result = await client.reschedule(key, delay=delay, if_version=version)
                case "filter":
                    until = client.now() + bide.durations.parse_delay(delay)
                    operation.result = await client.cancel_scheduled(
                        prefix=key, due_before=until if rng.random() < 0.7 else None
                    )
                case "move_filter":
                    since = client.now() if rng.random() < 0.3 else None
                    operation.result = await client.move_scheduled(prefix=key, due_from=since, delay=delay)
                case "look":
                    operation.result = await client.scheduled(key)
                case _:
                    operation.result = await getattr(client, what)(key, if_version=version)
        except EXPECTED as error:
            operation.error = error
            if isinstance(error, ScheduleLogError):
                # An application that is refused tries again later.
                await asyncio.sleep(rng.random() * 5)  # in virtual time
        except BideError as error:
            self.problems.append(f"{what} of {key} raised {error!r}")
        operation.ended = len(self.world.history)
        if isinstance(operation.result, bide.Scheduled) and operation.result.version is not None:
            self.versions.append(operation.result.version)

    async def call_bulk(self, client: bide.Client, rng: random.Random, name: str) -> None:
        """Schedule several messages at once. Each is an operation."""
        messages = [
            bide.OutgoingSchedule(
                f"{name}.{place} ".ljust(self.body_size),
                key=rng.choice(self.keys),
                to=rng.choice(self.targets),
                delay=f"{rng.random() * self.span:.3f}s",
            )
            for place in range(rng.choice((1, 3) if self.is_small else (1, 3, 20)))
        ]
        begun, results = len(self.world.history), list[PublishResult]()
        requests = list[str]()
        REQUESTS.set(requests)
        try:
            async for one in client.publish_many(messages):
                results.append(one)
        except BulkInDoubtError as error:
            results += [*error.in_doubt, *error.unsent]
        except BideError as error:
            self.problems.append(f"a bulk publish raised {error!r}")
            return
        for one in results:
            key = messages[one.position].key
            operation = Operation(what="bulk", key=key, begun=begun, ended=len(self.world.history))
            operation.requests.append(requests[one.position])
            operation.error = one.error
            if one.error is None:
                assert one.schedule_id is not None
                operation.result = bide.Scheduled(
                    key=key, id=one.schedule_id, version=one.schedule_id, due_time=one.due
                )
                self.versions.append(one.schedule_id)
            elif not isinstance(one.error, EXPECTED):
                self.problems.append(f"bulk of {key} raised {one.error!r}")
            self.world.operations.append(operation)
        if len(results) != len(messages):
            self.problems.append(f"a bulk publish of {len(messages)} had {len(results)} results")
        if any(isinstance(one.error, ScheduleLogError) for one in results):
            await asyncio.sleep(rng.random() * 5)  # in virtual time

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
                self.problems.append("does not come to rest")
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
            self.problems.append(f"{gate.name} ended: {error!r}")

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
            loop.set_exception_handler(lambda _, context: self.problems.append(f"asyncio: {context['message']}"))
            loop.run_until_complete(self.main())
            self.problems += judge_answers(self.world)
            self.problems += judge_deliveries(self.world)
            self.problems += judge_looks(self.world)
        finally:
            self.is_calm = True
            loop.run_until_complete(end_tasks())
            loop.close()
        lives = sum(len(one.lives) for one in self.world.verdicts)
        return Result(
            [f"seed {self.seed}: {one}" for one in self.problems],
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
    append, numbered = ScheduleRequests.append, ScheduleRequests.numbered

    async def noting(self: ScheduleRequests, partition: int, what: str, make: Any, *, needs_answer: bool) -> Any:
        requests = REQUESTS.get()

        def noted(request: Any) -> Any:
            if requests is not None:
                requests.append(str(request))
            return make(request)

        return await append(self, partition, what, noted, needs_answer=needs_answer)

    def numbering(self: ScheduleRequests, partition: int) -> Any:
        number = numbered(self, partition)
        requests = REQUESTS.get()
        if requests is not None:
            requests.append(str(number))
        return number

    with tempfile.TemporaryDirectory(dir=REAL_DISK) as folder, ExitStack() as stack:
        random.seed(seed)
        stack.enter_context(patch.object(os, "urandom", rng.randbytes))
        stack.enter_context(patch.object(secrets, "token_hex", lambda size=8: rng.randbytes(size).hex()))
        stack.enter_context(patch.object(prepared, "_id_prefix", "0" * 20))
        stack.enter_context(patch.object(prepared, "_id_counter", count()))
        stack.enter_context(patch.object(ScheduleRequests, "append", noting))
        stack.enter_context(patch.object(ScheduleRequests, "numbered", numbering))
        simulation = kind(seed, schedules, Path(folder))
        stack.enter_context(patch.object(bide.gate.room, "MAX_RESERVATIONS", simulation.world.scale.reservations))
        stack.enter_context(patch.object(bide.client.schedule_room, "RESERVATION_BYTES", RESERVATION))
        stack.enter_context(patch.object(bide.gate.partition_session, "_TICK_EVERY", TICK))
        stack.enter_context(patch.object(bide.gate.log_follower, "_SIZE_STEP", 1))
        stack.enter_context(patch.object(bide.gate.worker, "_LEAST_RETENTION", 1))
        stack.enter_context(patch.object(bide.gate.log_reader, "PREFETCH", simulation.prefetch))
        stack.enter_context(patch.object(snapshot, "cut", partial(snapshot.cut, most=rng.choice((5, 500)))))
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
