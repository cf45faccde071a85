"""Gates agree on the leader of a partition, replace a silent one, and share the work."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from bide.gate.leadership import (
    CURRENT_FOR,
    REPEAT_AFTER,
    TAKE_OVER_AFTER,
    PartitionLeadership,
    may_take,
    partition_to_release,
)
from bide.schedules.records import Beat

STANDBY = False
LEADER = True


def beat_of(gate: str, clock: int, after: int, leads: bool) -> Beat:
    return Beat(gate=gate, clock=clock, after=after, count=0, leads=leads)


class Log:
    """A log of beats, which all gates read at once."""

    def __init__(self, *gates: str) -> None:
        self.now = 100.0
        self.offset = 10
        self.clock = 0
        self.gates = {gate: PartitionLeadership(gate, self.now) for gate in gates}

    def beat(self, gate: str, leads: bool, *, after: int | None = None) -> Beat:
        self.clock += 1
        self.gates[gate].sent(self.clock, self.now, leads=leads)
        return beat_of(gate, self.clock, self.offset if after is None else after, leads)

    def append(self, beat: Beat) -> None:
        self.offset += 1
        for one in self.gates.values():
            one.read(self.offset, beat, self.now)

    def leaders(self) -> set[str | None]:
        return {one.leader for one in self.gates.values()}

    def is_leading(self) -> list[str]:
        return [name for name, one in self.gates.items() if one.leads(self.now)]


@pytest.fixture
def log() -> Log:
    return Log("a", "b")


def test_of_two_gates_that_take_over_at_once_the_first_one_leads(log: Log) -> None:
    first, second = log.beat("a", LEADER), log.beat("b", LEADER)
    log.append(first)
    assert log.leaders() == {"a"}
    log.append(second)
    assert log.leaders() == {"a"}
    assert log.is_leading() == ["a"]


def test_a_gate_may_come_to_lead_until_it_has_read_its_beat(log: Log) -> None:
    """So a gate that stops waits for it, and releases the partition then."""
    gate = log.gates["a"]
    log.append(log.beat("a", STANDBY))
    found = [gate.may_come_to_lead]
    beat = log.beat("a", LEADER)
    found.append(gate.may_come_to_lead)
    log.append(beat)
    found.append(gate.may_come_to_lead)
    assert found == [False, True, False]


def test_a_leader_that_is_replaced_steps_back(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    log.append(log.beat("b", LEADER))
    assert log.is_leading() == ["b"]
    log.append(log.beat("a", LEADER, after=11))  # It was sent before.
    assert log.leaders() == {"b"}


def test_a_late_copy_of_a_beat_changes_nothing(log: Log) -> None:
    idle = log.beat("b", STANDBY)
    log.append(idle)
    log.append(log.beat("b", LEADER))
    log.append(idle)
    assert log.leaders() == {"b"}


def test_a_gate_that_began_to_read_later_agrees_after_the_next_beat_of_a_leader(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    crossed = log.beat("b", LEADER, after=log.offset - 1)
    log.gates["c"] = PartitionLeadership("c", log.now)
    log.append(crossed)  # Only who has read the beat before it knows that it came too late.
    assert log.leaders() == {"a", "b"}
    log.append(log.beat("a", LEADER))
    assert log.leaders() == {"a"}


def test_a_silent_leader_is_replaced(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    log.append(log.beat("b", STANDBY))
    b = log.gates["b"]
    log.now += TAKE_OVER_AFTER - 0.1
    assert b.next_beat(log.now, may_take=False) == STANDBY
    log.now += 0.1
    assert b.next_beat(log.now, may_take=False) == LEADER


def test_a_gate_that_is_behind_does_not_take_over(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    log.now += CURRENT_FOR
    assert log.gates["b"].next_beat(log.now, may_take=True) == STANDBY


def test_a_partition_that_is_let_go_is_taken_at_once(log: Log) -> None:
    for gate in ("a", "b"):
        log.append(log.beat(gate, STANDBY))
    log.append(log.beat("a", LEADER))
    a, b = log.gates["a"], log.gates["b"]
    assert b.next_beat(log.now, may_take=True) is None
    assert a.next_beat(log.now, may_take=True, let_go=True) == STANDBY
    log.append(log.beat("a", STANDBY))
    assert log.leaders() == {None}
    assert b.next_beat(log.now, may_take=False) is None
    assert b.next_beat(log.now, may_take=True) == LEADER
    assert a.next_beat(log.now, may_take=True, let_go=True) is None


def test_a_gate_that_stood_still_does_not_lead_until_it_has_read_its_beat(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    log.now += CURRENT_FOR
    assert log.is_leading() == []
    log.append(log.beat("a", LEADER))
    assert log.is_leading() == ["a"]


def test_a_gate_has_one_unread_beat(log: Log) -> None:
    a = log.gates["a"]
    assert a.next_beat(log.now, may_take=True) == STANDBY
    lost = log.beat("a", STANDBY)
    log.now += 9
    assert a.next_beat(log.now, may_take=True) is None
    a.on_connection_lost()
    assert a.next_beat(log.now, may_take=True) == STANDBY
    log.append(lost)
    assert not a.is_current(log.now)


def test_a_gate_whose_beat_was_removed_before_it_read_it_has_missed_records(log: Log) -> None:
    a = log.gates["a"]
    log.beat("a", STANDBY)  # It was confirmed, and retention takes it.
    log.now += REPEAT_AFTER - 1
    assert a.next_beat(log.now, may_take=True) is None
    log.now += 1
    assert a.next_beat(log.now, may_take=True) == STANDBY
    log.append(log.beat("a", STANDBY))
    assert a.has_missed


def test_a_gate_that_reads_late_has_missed_nothing(log: Log) -> None:
    first = log.beat("a", STANDBY)
    log.now += REPEAT_AFTER
    second = log.beat("a", STANDBY)
    log.append(first)
    log.append(second)
    assert not log.gates["a"].has_missed


def test_a_question_gets_a_beat_of_its_own_that_was_sent_after_it(log: Log) -> None:
    log.append(log.beat("a", LEADER))
    a = log.gates["a"]
    log.now += 0.1
    assert a.next_beat(log.now, may_take=True) is None
    assert a.next_beat(log.now, may_take=True, is_asked=True) == LEADER
    asked_at = log.now
    beat = log.beat("a", LEADER)
    # One beat is unread at a time, however many questions there are.
    assert a.next_beat(log.now, may_take=True, is_asked=True) is None
    assert a.proven_at is not None
    assert a.proven_at < asked_at
    log.now += 0.1
    log.append(beat)
    assert a.proven_at == asked_at


def test_a_gate_with_two_partitions_more_than_another_lets_one_go() -> None:
    assert partition_to_release("a", {0: "a", 1: "a", 2: "b"}, {"a", "b", "c"}) == 1
    assert partition_to_release("a", {0: "a", 1: "a", 2: "b"}, {"a", "b"}) is None
    assert partition_to_release("a", {0: "a", 1: "a", 2: None}, {"a", "b"}) is None
    assert partition_to_release("b", {0: "a", 1: "a", 2: "a"}, {"a", "b"}) is None
    assert may_take("c", {0: "a", 1: None}, {"a", "c"})
    assert not may_take("a", {0: "a", 1: None}, {"a", "c"})


# -- several gates and partitions, with pauses, kills and late copies


@dataclass
class Gate:
    """A gate with a place in each log."""

    name: str
    partitions: list[PartitionLeadership]
    places: list[int]
    frozen_until: float = 0.0
    is_stopping: bool = False
    unsent: list[tuple[float, int, Beat]] = field(default_factory=list)


class World:
    """Gates on eight partitions, each record a moment under way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.clock = 0
        self.logs: list[list[Beat]] = [[] for _ in range(8)]
        self.gates: list[Gate] = []
        self.names = 0
        self.led_at = [0.0] * len(self.logs)
        """When each partition had a leader last."""

    def start(self) -> None:
        self.names += 1
        name = f"g{self.names}"
        partitions = [PartitionLeadership(name, self.now) for _ in self.logs]
        # As with an index or a snapshot, it begins somewhere before the end.
        places = [max(len(log) - self.rng.randint(0, 5), 0) for log in self.logs]
        self.gates.append(Gate(name, partitions, places))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.02
            for gate in self.gates:
                for beat in [one for one in gate.unsent if one[0] <= self.now]:
                    gate.unsent.remove(beat)
                    self.logs[beat[1]].append(beat[2])
                if self.now >= gate.frozen_until:
                    self.step(gate)
            for number, names in enumerate(self.leading()):
                if names:
                    self.led_at[number] = self.now

    def step(self, gate: Gate) -> None:
        for number, leadership in enumerate(gate.partitions):
            for beat in self.logs[number][gate.places[number] :]:
                leadership.read(gate.places[number], beat, self.now)
                gate.places[number] += 1
        leaders = {number: one.leader for number, one in enumerate(gate.partitions)}
        alive = set.intersection(*(one.alive(self.now) for one in gate.partitions))
        release = partition_to_release(gate.name, leaders, alive)
        for number, leadership in enumerate(gate.partitions):
            leads = leadership.next_beat(
                self.now,
                may_take=may_take(gate.name, leaders, alive),
                let_go=gate.is_stopping or number == release,
            )
            if leads is not None:
                self.clock += 1
                leadership.sent(self.clock, self.now, leads=leads)
                beat = beat_of(gate.name, self.clock, gate.places[number] - 1, leads)
                gate.unsent.append((self.now + self.rng.uniform(0.002, 0.05), number, beat))

    def leading(self) -> list[list[str]]:
        return [
            [gate.name for gate in self.gates if gate.partitions[number].leads(self.now)]
            for number in range(len(self.logs))
        ]

    def check(self) -> None:
        leading = self.leading()
        assert all(len(names) == 1 for names in leading), leading
        counts = Counter({gate.name: 0 for gate in self.gates})
        counts.update(names[0] for names in leading)
        assert max(counts.values()) - min(counts.values()) <= 1, counts
        for number in range(len(self.logs)):
            assert len({gate.partitions[number].leader for gate in self.gates}) == 1


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 140))])
def test_after_any_disturbance_each_partition_has_one_leader_in_five_seconds(seed: int) -> None:
    world = World(seed)
    world.start()
    world.run(5)
    for _ in range(6):
        rng = world.rng
        match rng.choice(["start", "kill", "stop", "freeze", "late copies"]):
            case "start":
                world.start()
            case "kill" if len(world.gates) > 1:
                world.gates.remove(rng.choice(world.gates))
            case "stop" if len(world.gates) > 1:
                leaving = rng.choice(world.gates)
                leaving.is_stopping = True
                world.run(1)
                world.gates.remove(leaving)
                assert all(world.leading()), "a gate that stops hands over within a second"
            case "freeze":
                rng.choice(world.gates).frozen_until = world.now + rng.uniform(0, 8)
            case "late copies":
                log = rng.choice(world.logs)
                log += rng.sample(log[-40:], min(len(log), 3))
            case _:
                continue
        if any(gate.frozen_until < world.now for gate in world.gates):
            world.run(5)
            # A gate that has come back may be handed partitions at this moment.
            assert world.now - min(world.led_at) < 1, world.leading()
        world.run(20)
        world.check()


def test_a_gate_does_not_lead_on_a_new_connection_before_it_has_read_a_beat() -> None:
    """Its index may have been built anew meanwhile, as of an earlier record."""
    leadership = PartitionLeadership("mine", 0.0)
    leadership.sent(1, 0.0, leads=True)
    leadership.read(0, Beat(gate="mine", leads=True, clock=1, after=-1, count=0), 0.1)
    assert leadership.leads(0.2)
    leadership.on_connection_lost()
    assert not leadership.leads(0.2)
