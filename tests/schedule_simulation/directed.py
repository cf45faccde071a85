"""Histories of chosen steps, each of which shows a fault that random histories do not show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar, Final

import bide
from bide.errors import ScheduleLogError
from bide.gate.partition import PartitionGate
from bide.testing.rules.stream import StreamQueue
from tests.schedule_simulation.scenario import PARTITION, SMALL
from tests.schedule_simulation.simulation import CHUNK, Simulation
from tests.schedule_simulation.world import NAMES, Process

_LOOK_EVERY: Final = 0.01
_MOST_LOOKS: Final = 60_000

_SEGMENTS: Final = 3 * SMALL.segment

_RUNS: Final = _SEGMENTS // 300
"""Requests to run a schedule, of 300 bytes or more: the beginning of a segment is among them."""


class DirectedHistory(Simulation):
    """A history without random disturbances, with a small log and two gates.

    Afterwards the work comes to rest, and the history is judged like any other.
    """

    small_logs: ClassVar[float] = 1.0
    rest_within: ClassVar[int] = 90

    def __init__(self, seed: int, schedules: int, folder: Path) -> None:
        super().__init__(seed, schedules, folder)
        self.scenario.prefetch = 3
        self.client: bide.Client

    async def play(self) -> None:
        """The steps, with :attr:`client`."""
        raise NotImplementedError  # each subclass has its own

    async def main(self) -> None:
        await self.prepare()
        self.gates = [self.start_gate(number) for number in range(2)]
        await self.until(lambda: all(one.gate is not None and one.gate.leads for one in self.gates))
        async with bide.connect(self.world.network().url, declare=False, timeout="20s") as client:
            self.client = client
            await self.play()
        await self.calm()

    async def leave_one(self) -> None:
        """Keep the gates that the steps have left."""

    # -- steps

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait in virtual time."""
        for _ in range(_MOST_LOOKS):
            if condition():
                return
            await asyncio.sleep(_LOOK_EVERY)  # in virtual time
        raise AssertionError("what this history needs does not happen")

    async def leader_and_other(self) -> tuple[Process, Process]:
        """The gate that leads the partition of the keys, and the other one."""
        await self.until(lambda: [self.leads(one) for one in self.gates].count(True) == 1)
        leader, other = sorted(self.gates, key=self.leads, reverse=True)
        return leader, other

    def leads(self, gate: Process) -> bool:
        """Whether a gate leads the partition of the keys."""
        return gate.gate is not None and PARTITION in gate.gate.leads

    def partition(self, gate: Process) -> PartitionGate:
        """The partition of the keys in a gate."""
        assert gate.gate is not None
        return gate.gate._partitions[PARTITION]

    def kill(self, gate: Process) -> None:
        """Kill a gate."""
        assert gate.task is not None
        gate.network.kill()
        gate.task.cancel()

    async def stop(self, gate: Process) -> None:
        """Stop a gate as SIGTERM does, and leave its work to the other one."""
        assert gate.gate is not None
        assert gate.task is not None
        gate.gate.stop()
        await asyncio.wait({gate.task})
        self.check_end(gate)
        self.gates.remove(gate)

    async def add(self, body: str, key: int, delay: str) -> None:
        """Schedule a message. While the room of applications is used up, try again."""
        while True:
            with suppress(ScheduleLogError):
                await self.client.schedule(body, key=self.scenario.keys[key], to="open", delay=delay)
                return
            await asyncio.sleep(1)  # in virtual time

    async def fill(self, until: Callable[[], bool]) -> None:
        """Append schedules that replace each other."""
        number = 0
        while not until():
            await self.add(f"filling {number} ".ljust(self.scenario.body_size), key=0, delay="10m")
            number += 1
            await asyncio.sleep(_LOOK_EVERY)  # in virtual time
        await self.client.cancel(self.scenario.keys[0])

    async def end_segment(self) -> None:
        """Append at once what a reader reads in any case: the segment that it has begun, to its end."""
        end = self.last + _SEGMENTS // self.scenario.body_size
        while self.last < end:
            await self.add("filling".ljust(self.scenario.body_size), key=0, delay="10m")

    @property
    def log(self) -> StreamQueue:
        """The log of the partition."""
        found = self.world.broker._hosts["/"]._queues[NAMES.log(PARTITION)]
        assert isinstance(found, StreamQueue)
        return found

    @property
    def last(self) -> int:
        """The last offset in the log."""
        return self.log._next_offset - 1

    async def fill_until_gone(self, offset: int) -> None:
        """Append until retention has removed a record."""
        await self.fill(lambda: self.log.first_offset > offset)


class _Overtaken(DirectedHistory):
    """A gate misses a schedule, and has to deliver it later."""

    async def play(self) -> None:
        _, other = await self.leader_and_other()
        await self.take_away(other)
        await self.add("missed", key=1, delay="40s")
        await self.fill_until_gone(self.last)
        back = self.bring_back(other)
        await self.until(lambda: back.gate is not None and bool(back.gate.leads))
        await self.stop(next(one for one in self.gates if one is not back))

    async def take_away(self, gate: Process) -> None:
        """Let a gate read no more."""
        raise NotImplementedError  # each subclass has its own

    def bring_back(self, gate: Process) -> Process:
        """Let it read on, or start it again."""
        raise NotImplementedError  # each subclass has its own


class OvertakenReader(_Overtaken):
    """Retention overtakes a gate that is frozen. ``no-count``: it goes on, and never learns of the schedule."""

    async def take_away(self, gate: Process) -> None:
        # A gate that misses a beat of its own needs no count.
        await self.until(lambda: not self.partition(gate).leadership._unread)
        gate.calls.is_frozen = True
        await self.end_segment()

    def bring_back(self, gate: Process) -> Process:
        self.world.loop.thaw(gate.calls)
        return gate


class OldIndex(_Overtaken):
    """A gate starts with an old index. ``index-unchecked``: it goes on behind it, and never learns of the schedule."""

    async def take_away(self, gate: Process) -> None:
        self.kill(gate)

    def bring_back(self, gate: Process) -> Process:
        again = self.start_gate(2, gate.folder)
        self.gates[self.gates.index(gate)] = again
        return again


class NewIndex(DirectedHistory):
    """A gate without an index begins with a snapshot. ``stale-carry``: it never reads the schedule behind it."""

    async def play(self) -> None:
        leader, _ = await self.leader_and_other()
        index, offset = self.partition(leader).index, self.last

        def is_carried() -> bool:
            uncarried = index.position.size - index.position.carried_size
            return self.log.first_offset > offset and uncarried * 16 < SMALL.retention

        await self.fill(is_carried)
        await self.add("behind the snapshot", key=1, delay="40s")
        new = self.start_gate(2)
        before, self.gates = self.gates, [*self.gates, new]
        await self.until(lambda: new.gate is not None and bool(new.gate.leads))
        for one in before:
            await self.stop(one)


class PartialSnapshot(DirectedHistory):
    """A leader is killed while it writes a snapshot, and a gate without an index takes its place.

    ``partial-snapshot``: that gate begins with the chunks that there are, and never learns of the other schedules.
    """

    chunk_entries: ClassVar[tuple[int, ...]] = (1,)

    def __init__(self, seed: int, schedules: int, folder: Path) -> None:
        super().__init__(seed, schedules, folder)
        self.freezes_writer = False

    def on_gate_write(self, gate: Process, data: bytes) -> None:
        if self.freezes_writer and CHUNK in data:
            self.freezes_writer, gate.calls.is_frozen = False, True

    async def play(self) -> None:
        leader, other = await self.leader_and_other()
        await self.stop(other)
        # A log that has its first record needs no snapshot.
        await self.fill_until_gone(0)
        # The chunks of these come last.
        for number in range(len(self.scenario.keys)):
            await self.add(f"waiting {number}", key=number, delay="40s")
        self.freezes_writer = True
        while self.freezes_writer:
            # Without a gate, the room of applications may stay used up.
            with suppress(ScheduleLogError):
                body = "filling".ljust(self.scenario.body_size)
                await self.client.schedule(body, key=self.scenario.keys[0], to="open", delay="40s")
            await asyncio.sleep(_LOOK_EVERY)  # in virtual time
        await asyncio.sleep(1)  # in virtual time: what the gate has sent arrives
        self.kill(leader)
        self.world.loop.thaw(leader.calls)
        self.gates = [self.start_gate(2)]
        await self.until(lambda: self.leads(self.gates[0]))


class StaleLeader(DirectedHistory):
    """A leader is frozen, and misses a cancel. The first records that it reads then ask to run the schedule at once.

    They came too late. ``not-current``: the gate delivers the schedule, because it acts before it has read a beat or a
    snapshot, by which it notices what it has missed.
    """

    async def play(self) -> None:
        leader, other = await self.leader_and_other()
        await self.add("cancelled", key=1, delay="1h")
        await self.until(lambda: self.partition(leader).index.position.offset == self.last)
        leader.calls.is_frozen = True
        # Before the other gate says that it leads: a leader that reads this steps back.
        await self.end_segment()
        await self.until(lambda: self.leads(other))
        result = await self.client.cancel(self.scenario.keys[1])
        assert result.outcome is bide.ScheduleOutcome.CANCELLED
        begun = self.last
        for _ in range(_RUNS):
            await self.client.run_now(self.scenario.keys[1])
        ended = self.last
        await self.fill(lambda: begun < self.log.first_offset < ended)
        self.world.loop.thaw(leader.calls)
        await asyncio.sleep(10)  # in virtual time: the leader reads on


class SameMoment(DirectedHistory):
    """Two schedules of one key have a run at the same moment; the first one was moved, and runs before it.

    ``occurrence-by-key``: the run of the second one counts as delivered.
    """

    async def play(self) -> None:
        first = self.client.now() + timedelta(seconds=10)
        await self.repeat("first", first)
        await self.client.reschedule(self.scenario.keys[1], delay="1s")
        await self.until(lambda: len(self.world.received) == 1)
        await self.repeat("second", first)

    async def repeat(self, body: str, first: datetime) -> None:
        """Schedule a recurring message with one run."""
        await self.client.schedule(
            body,
            key=self.scenario.keys[1],
            to="open",
            every="1h",
            first_run=first,
            last_run=first + timedelta(seconds=1),
        )


DIRECTED: Final[dict[str, type[DirectedHistory]]] = {
    "index-unchecked": OldIndex,
    "no-count": OvertakenReader,
    "not-current": StaleLeader,
    "occurrence-by-key": SameMoment,
    "partial-snapshot": PartialSnapshot,
    "stale-carry": NewIndex,
}
"""The history that shows each of these faults."""
