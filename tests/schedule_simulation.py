"""Random exploration of a schedule log: clients, gates and the broker's retention, in any order, with planted faults.

usage: python -m tests.schedule_simulation [runs] [first seed] [--fault NAME]

The gates use the fold, the records and the snapshots of ``bide.schedules``; the rest of them is a sketch of the gate to come.
``schedule_judge`` reads the whole history afterwards. Each step does one thing at random: a client sends an operation, or
repeats one; a record lands in the log; a connection breaks, so that what was not confirmed is sent again while the old
copies may still land; a gate reads one record, claims, delivers, reports, carries, crashes, starts from an old index, or
stands still; retention trims; a gate's clock is stepped.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bide.errors import ScheduleRecordError
from bide.schedules import snapshot
from bide.schedules.encoding import decode, encode
from bide.schedules.entries import ScheduleAnswer, WaitingSchedule
from bide.schedules.fold import ScheduleFold
from bide.schedules.gate_clock import GateClock
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.records import (
    AddSchedule,
    Beat,
    ChangeSchedule,
    Claim,
    ClaimedOccurrence,
    Done,
    EndedOccurrence,
    ScheduleFilter,
    ScheduleRecord,
    SnapshotChunk,
    Tick,
)
from bide.schedules.requests import RequestId
from bide.schedules.snapshot import SnapshotSearch
from bide.schedules.state import LogPosition, ScheduleMemory
from tests import schedule_faults
from tests.schedule_judge import Verdict, judge

PARTITION = 3
KEYS = [key for key in (f"k{number}" for number in range(99)) if partition_of(key) == PARTITION][:3]
STRAY = next(key for key in (f"s{number}" for number in range(99)) if partition_of(key) != PARTITION)
TARGETS = ("q:open", "q:open", "q:open", "q:slow", "q:stuck", "q:gone")
"""``slow`` refuses twice, ``stuck`` always, ``gone`` does not exist."""

RETENTION = 500
SEGMENT = 20
TICKET = 5
TICKETS = RETENTION // 4 // TICKET
FRESH = 150
"""Milliseconds for which a beat that was read back keeps a gate current."""

TICK = 400


@dataclass(slots=True)
class Stored:
    """A record in the log."""

    offset: int
    exchange: str
    body: bytes


@dataclass(slots=True)
class Publisher:
    """A connection that publishes: in order, and again what was not confirmed when it breaks."""

    name: str
    flying: list[tuple[str, bytes]] = field(default_factory=list)
    unconfirmed: list[tuple[str, bytes]] = field(default_factory=list)

    def send(self, exchange: str, body: bytes) -> None:
        self.flying.append((exchange, body))


@dataclass(slots=True)
class SimulatedClient:
    """An application with one session."""

    publisher: Publisher
    session: str
    number: int = 0
    room: int = 0
    unanswered: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """The request: when it was sent last, and the record."""

    def request(self) -> RequestId:
        self.number += 1
        return RequestId(self.session, self.number)


class World:
    """The broker, the time, and everyone on it."""

    def __init__(self, seed: int, fault: str | None) -> None:
        self.rng = random.Random(seed)
        self.fault = fault
        self.now = 1_000_000
        self.log: list[Stored] = []
        self.history: list[tuple[str, bytes]] = []
        self.next_offset = 0
        self.publishers: list[Publisher] = []
        self.limbo: list[tuple[int, str, bytes]] = []
        self.tickets = 0
        self.answers: defaultdict[str, list[ScheduleAnswer]] = defaultdict(list)
        self.delivered: list[tuple[str, bytes, int]] = []
        self.refusals: Counter[str] = Counter()
        self.gates: list[Gate] = []
        self.clients = [SimulatedClient(self.publisher(f"c{one}"), f"s{one}") for one in range(3)]
        self.problems: list[str] = []
        self.versions: list[str] = []
        self.gate_names = 0
        self.add_gate(None)

    def publisher(self, name: str) -> Publisher:
        made = Publisher(name)
        self.publishers.append(made)
        return made

    def add_gate(self, state: ScheduleMemory | None) -> None:
        self.gate_names += 1
        self.gates.append(Gate(self, f"g{self.gate_names}", state))

    # -- the broker

    def append(self, exchange: str, body: bytes) -> None:
        # A stream keeps records of its own, too: offsets have gaps.
        self.next_offset += 2 if self.rng.random() < 0.1 and self.log else 0
        self.log.append(Stored(self.next_offset, exchange, body))
        self.next_offset += 1
        self.history.append((exchange, body))

    def land(self) -> bool:
        """Append the next record of one connection, and confirm it unless that gets lost."""
        ready = [one for one in self.publishers if one.flying]
        if not ready:
            return False
        publisher = self.rng.choice(ready)
        record = publisher.flying.pop(0)
        self.append(*record)
        publisher.unconfirmed.append(record)
        return True

    def confirm(self) -> None:
        for one in self.publishers:
            if one.unconfirmed and self.rng.random() < 0.7:
                one.unconfirmed.clear()

    def break_connection(self, publisher: Publisher) -> None:
        """What was not confirmed is sent again. Old copies that were on their way may still land, in any place."""
        for exchange, body in publisher.flying:
            if self.rng.random() < 0.5:
                self.limbo.append((self.now + self.rng.randint(0, 1500), exchange, body))
        publisher.flying = publisher.unconfirmed + publisher.flying
        publisher.unconfirmed = []

    def leave_limbo(self) -> None:
        for one in list(self.limbo):
            if one[0] <= self.now:
                self.limbo.remove(one)
                self.append(one[1], one[2])

    def trim(self) -> None:
        if len(self.log) > RETENTION:
            del self.log[: len(self.log) - RETENTION + self.rng.randint(0, SEGMENT)]

    # -- applications

    def has_room(self, client: SimulatedClient) -> bool:
        """Whether the client may append one record more; a new ticket lasts for a few."""
        if client.room == 0:
            if self.tickets >= TICKETS and self.fault != "no-room":
                return False
            self.tickets += 1
            client.room = TICKET
        client.room -= 1
        return True

    def send(self, client: SimulatedClient, record: AddSchedule | ChangeSchedule) -> None:
        if not self.has_room(client):
            return
        body = encode(record)
        client.publisher.send("operations", body)
        if record.key != STRAY:
            client.unanswered[str(record.request)] = (self.now, body)
        self.versions.append(str(record.request))

    def operate(self, client: SimulatedClient) -> None:
        rng = self.rng
        key = rng.choice(KEYS) if rng.random() < 0.97 else STRAY
        version = rng.choice(self.versions[-4:]) if self.versions and rng.random() < 0.15 else None
        roll = rng.random()
        if roll < 0.5:
            self.send(client, self._schedule(client, key, version))
        elif roll < 0.9:
            action = rng.choice(["cancel", "cancel", "move", "pause", "resume", "run-now"])
            chosen = None
            if rng.random() < 0.15:
                chosen = ScheduleFilter(
                    prefix=rng.choice(["", "k", key]),
                    target=rng.choice([None, "q:open"]),
                    due_before=rng.choice([None, self.now + 300]),
                )
            self.send(
                client,
                ChangeSchedule(
                    request=client.request(),
                    action=action,
                    key=None if chosen else key,
                    filter=chosen,
                    due=self.now + rng.randint(0, 800) if action == "move" else None,
                    at=self.now if action == "resume" else None,
                    if_version=None if chosen else version,
                ),
            )
        elif not self.has_room(client):
            return
        elif roll < 0.93:
            self.forge(client)
        else:
            client.publisher.send(rng.choice(["operations", "other"]), rng.choice([b"", b"\xff{", b'{"v":1}\n']))

    def _schedule(self, client: SimulatedClient, key: str, version: str | None) -> AddSchedule:
        rng = self.rng
        request, due = client.request(), self.now + rng.randint(0, 600)
        every = {"ms": rng.randint(30, 200), "last": due + rng.randint(0, 800)} if rng.random() < 0.25 else None
        return AddSchedule(
            request=request,
            key=key,
            target=rng.choice(TARGETS),
            nominal=due,
            due=due,
            recurrence=every,
            if_absent=version is None and rng.random() < 0.15,
            if_version=version,
            message=ScheduledMessage(b"\0\0", str(request).encode()),
        )

    def forge(self, client: SimulatedClient) -> None:
        """An application pretends to be a gate: by the exchange that it may write to, or by one that it made itself."""
        rng = self.rng
        found = [one for gate in self.gates for one in gate.state.select(ScheduleFilter())]
        if found:
            one = rng.choice(found)
            item = ClaimedOccurrence(key=one.key, version=one.version, nominal=one.nominal, due=one.due)
            ended = EndedOccurrence(occurrence=one.occurrence, outcome="delivered")
            forged = rng.choice([Claim(gate="g1", items=(item,)), Done(gate="g1", items=(ended,)), Tick(number=1)])
            client.publisher.send(rng.choice(["operations", "other"]), encode(forged))

    def repeat(self, client: SimulatedClient) -> None:
        """Ask again for an answer that did not come."""
        for request, (since, body) in list(client.unanswered.items()):
            if self.answers[request] and self.rng.random() < 0.8:
                del client.unanswered[request]
            elif self.now - since > 400 and not client.publisher.flying and self.has_room(client):
                client.publisher.send("operations", body)
                client.unanswered[request] = (self.now, body)


class Gate:
    """A gate that believes itself to be the leader: nothing but the log decides."""

    def __init__(self, world: World, name: str, state: ScheduleMemory | None) -> None:
        self.w, self.name = world, name
        self.publisher = world.publisher(name)
        self.clock = GateClock()
        self.clock_error = 0
        self.saved: list[ScheduleMemory] = []
        self.zone_error = world.rng.choice([0, 7])
        self.is_stopped = False
        self.now()
        self.subscribe(state)

    def subscribe(self, state: ScheduleMemory | None) -> None:
        """Begin with an index, if its last record is still in the log, else with the latest complete snapshot."""
        log = self.w.log
        if state is not None and self.w.fault != "index-unchecked":
            if not any(one.offset == state.position.offset for one in log):
                state = None
        if state is None:
            state = self.rebuild()
        self.use(state)

    def rebuild(self) -> ScheduleMemory:
        log, fault = self.w.log, self.w.fault
        if not log or (log[0].offset == 0 and fault != "stale-carry"):
            return ScheduleMemory()
        search = SnapshotSearch() if fault != "partial-snapshot" else schedule_faults.PartialSearch()
        for one in log:
            if one.exchange == "gates" and isinstance(record := read(one), SnapshotChunk):
                search.add(record)
        state = search.result()
        if state is None or (state.position.offset < log[0].offset and fault != "snapshot-gap"):
            if fault == "begin-anew":
                return ScheduleMemory(position=LogPosition(offset=log[0].offset - 1))
            self.is_stopped = log[0].offset > 0
            return ScheduleMemory()
        if fault == "stale-carry":
            state.position.offset = log[-1].offset
        return state

    def use(self, state: ScheduleMemory) -> None:
        self.state = state
        self.fold = schedule_faults.fold(self.w.fault, state, PARTITION, self.zone_error)
        self.counts = {state.position.offset: state.position.count}
        self.handled: set[str] = set()
        self.retry_at: dict[str, int] = {}
        self.ended: list[EndedOccurrence] = []
        self.unread: list[str] = []
        self.fenced_at = -FRESH
        self.beats: dict[int, int] = {}
        self.search: defaultdict[str, set[int]] = defaultdict(set)
        self.cycle: tuple[str, int, int] | None = None
        self.chunks: list[SnapshotChunk] = []
        self.ticked_at = self.w.now
        self.claims_sent: dict[tuple[str, str, int], int] = {}

    # -- the log

    @property
    def has_read_all(self) -> bool:
        return not self.w.log or self.state.position.offset >= self.w.log[-1].offset

    @property
    def is_current(self) -> bool:
        return self.w.fault == "not-current" or self.w.now - self.fenced_at < FRESH

    def read(self) -> None:
        offset = self.state.position.offset
        log = self.w.log
        if self.has_read_all:
            return
        if log[0].offset > offset:
            one = log[0]  # retention may have overtaken this reader, and the broker does not say so
        else:
            low, high = 0, len(log)
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if log[middle].offset <= offset else (low, middle)
            one = log[low]
        record = read(one)
        by_gate = one.exchange == "gates" or self.w.fault == "forged"
        known = record if one.exchange in ("operations", "gates") or self.w.fault == "forged" else None
        applied = self.fold.apply(one.offset, known, by_gate=by_gate and not isinstance(record, AddSchedule | ChangeSchedule))
        self.counts[one.offset] = self.state.position.count
        if by_gate and not self.follow(one.offset, record):
            self.use(self.rebuild())
            return
        if applied.answer is not None and self.is_current and isinstance(record, AddSchedule | ChangeSchedule):
            self.w.answers[str(record.request)].append(applied.answer)

    def follow(self, offset: int, record: ScheduleRecord | None) -> bool:
        """Look at a record of a gate; False if records before it are missing."""
        match record:
            case Beat():
                if record.gate == self.name and record.clock in self.beats:
                    self.fenced_at = max(self.fenced_at, self.beats.pop(record.clock))
                if record.gate != self.name:
                    self.clock.hear(self.wall, record.clock)
                return self.is_consistent(record.after, record.count)
            case SnapshotChunk():
                if not self.is_consistent(record.as_of, record.count):
                    return False
                self.search[record.cycle].add(record.number)
                if record.is_last and len(self.search[record.cycle]) == record.number + 1:
                    self.state.position.carried = max(self.state.position.carried, record.count)
                    if self.cycle is not None and self.cycle[0] == record.cycle:
                        self.free_room()
            case Tick():
                self.ticked_at = self.w.now
        return True

    def is_consistent(self, offset: int, count: int) -> bool:
        if self.w.fault == "no-count" or offset < min(self.counts):
            return True
        return self.counts.get(offset) == count

    def free_room(self) -> None:
        assert self.cycle is not None
        _, since, tickets = self.cycle
        if self.state.position.count - since < RETENTION // 4:
            self.w.tickets = max(self.w.tickets - tickets, 0)
        self.cycle = None

    def publish(self, record: ScheduleRecord) -> None:
        self.publisher.send("gates", encode(record))

    @property
    def uncarried(self) -> int:
        return self.state.position.count - self.state.position.carried

    # -- work

    def now(self) -> int:
        """The time by which it claims."""
        held = self.clock.now(wall=self.wall, monotonic=self.w.now)
        return self.wall if self.w.fault == "wall-clock" else held

    @property
    def wall(self) -> int:
        return self.w.now + self.clock_error

    def step(self) -> None:
        if self.is_stopped:
            return
        self.now()
        room = RETENTION * 7 // 8 if self.w.fault != "greedy-gate" else 10**9
        if self.uncarried > room:
            self.read()
            return
        if self.chunks:
            self.publish(self.chunks.pop(0))
            return
        if self.w.now - max([self.fenced_at, *self.beats.values()]) > FRESH // 2:
            self.beat()
        if self.uncarried > RETENTION // 4 and self.cycle is None and self.is_current:
            self.carry()
            return
        if self.uncarried > RETENTION // 2 and self.w.fault != "greedy-gate":
            self.read()
            return
        if self.w.rng.random() < 0.45 or not self.is_current:
            for _ in range(self.w.rng.randint(1, 20)):
                self.read()
        else:
            self.w.rng.choice([self.claim, self.claim, self.deliver, self.deliver, self.report, self.tick, self.read])()

    def beat(self) -> None:
        clock = self.wall
        self.beats.setdefault(clock, self.w.now)
        position = self.state.position
        self.publish(Beat(gate=self.name, leads=True, clock=clock, after=position.offset, count=position.count))

    def claim(self) -> None:
        now, items = self.now(), list[ClaimedOccurrence]()
        for one in self.state.select(ScheduleFilter()):
            token = (one.key, one.version, one.due)
            if one.due <= now and not one.is_paused and self.claims_sent.get(token, -200) < self.w.now - 100:
                self.claims_sent[token] = self.w.now
                items.append(self.item(one))
        if not items:
            return
        self.publish(Claim(gate=self.name, items=tuple(items)))
        if self.w.fault == "no-read-back":
            for one in items:
                found = self.state.waiting(one.key)
                assert found is not None
                self.w.delivered.append((found.occurrence, found.message.body, self.w.now))

    def item(self, one: WaitingSchedule) -> ClaimedOccurrence:
        following = self.following(one)
        skip = one.resumed_at is not None and one.recurrence is not None and one.nominal < one.resumed_at
        return ClaimedOccurrence(
            key=one.key,
            version=one.version,
            nominal=one.nominal,
            due=one.due,
            skip=skip,
            next_nominal=following,
            next_due=following,
        )

    def following(self, one: WaitingSchedule) -> int | None:
        if one.recurrence is None:
            return None
        following: int = one.nominal + one.recurrence["ms"] + self.zone_error
        return following if following <= one.recurrence["last"] else None

    def deliver(self) -> None:
        going = sorted(self.state._under_way)
        if self.w.fault == "forget-undone":
            going = [one for one in going if (self.name, one) in self.fold.claimed_here]
        if self.w.fault != "blocking":
            going = [one for one in going if self.retry_at.get(one, 0) <= self.w.now]
        going = [one for one in going if one not in self.handled]
        if not going:
            return
        occurrence = going[0] if self.w.fault == "blocking" else self.w.rng.choice(going)
        found = self.state._under_way[occurrence]
        match found.target:
            case "q:slow" if self.w.refusals[occurrence] < 2:
                self.w.refusals[occurrence] += 1
                self.retry_at[occurrence] = self.w.now + 50
                return
            case "q:stuck":
                self.retry_at[occurrence] = self.w.now + 50
                return
            case "q:gone":
                self.ended.append(EndedOccurrence(occurrence=occurrence, outcome="undeliverable"))
            case _:
                if not (self.w.fault == "drop-fifth" and sum(occurrence.encode()) % 5 == 0):
                    body = found.message.body
                    if self.w.fault == "message-by-key" and (newer := self.state.waiting(found.key)):
                        body = newer.message.body
                    self.w.delivered.append((occurrence, body, self.w.now))
                self.ended.append(EndedOccurrence(occurrence=occurrence, outcome="delivered"))
        self.handled.add(occurrence)

    def report(self) -> None:
        if self.ended:
            count = self.w.rng.randint(1, len(self.ended))
            self.publish(Done(gate=self.name, items=tuple(self.ended[:count])))
            del self.ended[:count]

    def tick(self) -> None:
        if self.w.now - self.ticked_at > TICK or self.w.fault == "ticks-race":
            self.ticked_at = self.w.now
            self.publish(Tick(number=self.state.position.tick + 1))

    def carry(self) -> None:
        position = self.state.position
        name = f"{self.name}.{self.w.now}"
        entries = list(self.state.entries())
        if self.w.fault == "sessions-not-carried":
            entries = [one for one in entries if type(one).__name__ not in ("ScheduleSession", "RememberedAnswer")]
        self.chunks = list(snapshot.cut(name, position, entries))
        self.cycle = (name, position.count, self.w.tickets)
        if self.w.fault == "trim-early":
            self.free_room()
            position.carried = position.count

    def crash(self) -> None:
        """Begin again: with the index as it is, with an old copy of it, or without one."""
        self.w.break_connection(self.publisher)
        for exchange, body in self.publisher.flying:
            if self.w.rng.random() < 0.5:
                self.w.limbo.append((self.w.now + self.w.rng.randint(0, 1500), exchange, body))
        self.publisher.flying = []
        self.clock, self.clock_error = GateClock(), 0
        self.now()
        self.subscribe(self.w.rng.choice([None, copy(self.state), *self.saved]))

    def save(self) -> None:
        self.saved = [*self.saved[-2:], copy(self.state)]


def read(one: Stored) -> ScheduleRecord | None:
    try:
        return decode(one.body)
    except ScheduleRecordError:
        return None


def copy(state: ScheduleMemory) -> ScheduleMemory:
    return ScheduleMemory(
        position=replace(state.position),
        _waiting=dict(state._waiting),
        _under_way=dict(state._under_way),
        _of_key=defaultdict(list, {key: list(several) for key, several in state._of_key.items()}),
        _finished=dict(state._finished),
        _sessions=dict(state._sessions),
        _answers=dict(state._answers),
    )


def run(seed: int, fault: str | None = None) -> list[str]:
    """One exploration; what is wrong with it."""
    w = World(seed, fault)
    rng = w.rng
    busy = rng.randint(200, 2500)
    quiet_gates = rng.random() < 0.2
    is_calm = False
    for step in range(30_000):
        w.now += rng.randint(0, 4)
        roll = rng.random()
        if not is_calm and step > busy:
            is_calm = True
            calm(w)
        if roll < 0.12 and not is_calm:
            w.operate(rng.choice(w.clients))
        elif roll < 0.16:
            w.repeat(rng.choice(w.clients))
        elif roll < 0.40:
            for _ in range(rng.randint(1, 3)):
                w.land()
            w.leave_limbo()
            w.trim()
        elif roll < 0.43:
            w.confirm()
        elif roll < 0.436 and not is_calm:
            w.break_connection(rng.choice(w.publishers))
        elif roll < 0.445 and not is_calm:
            disturb(w)
        elif not (quiet_gates and not is_calm and step > 150):
            # Some gates are quick, some hardly ever run.
            rng.choice(w.gates[-3:] if rng.random() < 0.8 else w.gates).step()
        if is_calm and step % 100 == 0:
            w.now += 500
            if at_rest(w):
                return found(w, seed)
    return [*found(w, seed), f"seed {seed}: does not come to rest"]


def disturb(w: World) -> None:
    rng, gate = w.rng, w.rng.choice(w.gates)
    match rng.randint(0, 5):
        case 0:
            gate.crash()
        case 1 | 2:
            gate.save()
        case 3 if len(w.gates) < 4:
            w.add_gate(rng.choice([None, *gate.saved]))
        case 4:
            for one in w.gates:
                one.clock_error = 0
            gate.clock_error = rng.choice([0, 400, -300])
        case 5 if len(w.gates) > 1:
            # It is gone for good, and what it had sent may still land.
            w.break_connection(gate.publisher)
            gate.publisher.flying = []
            w.gates.remove(gate)


def calm(w: World) -> None:
    """The end begins: no more disturbances, and what is paused goes on."""
    for gate in w.gates:
        gate.clock_error = 0
    w.tickets = 0
    for key in KEYS:
        client = w.clients[0]
        w.send(client, ChangeSchedule(request=client.request(), action="resume", key=key, at=w.now))


def at_rest(w: World) -> bool:
    if any(one.flying for one in w.publishers if not one.name.startswith("g")) or w.limbo:
        return False
    if any(one.unanswered for one in w.clients):
        return False
    return all(
        gate.is_stopped
        or (gate.has_read_all or gate is not w.gates[-1])
        and not gate.state._waiting
        and all(one.target == "q:stuck" for one in gate.state._under_way.values())
        for gate in w.gates
    )


def found(w: World, seed: int) -> list[str]:
    verdict = judge(w.history, PARTITION, PARTITIONS)
    return [f"seed {seed}: {text}" for text in (*w.problems, *_wrong_answers(w, verdict), *_wrong_deliveries(w, verdict))]


def _wrong_answers(w: World, verdict: Verdict) -> Iterator[str]:
    for request, several in w.answers.items():
        expected = verdict.answers.get(request)
        for answer in several:
            if answer.outcome == "forgotten" and request in verdict.repeats:
                continue
            given: tuple[object, ...] = (answer.outcome, answer.version)
            if answer.keys or expected == (answer.outcome, ()):
                given = (answer.outcome, answer.keys)
            if answer.outcome in ("too-late", "not-found"):
                given = (answer.outcome,)
            if answer.outcome == "scheduled":
                given = (answer.outcome, request)
            if given != expected and not (given, expected) == (("not-found",), ("too-late",)):
                yield f"{request} is answered {given}, and the log says {expected}"


def _wrong_deliveries(w: World, verdict: Verdict) -> Iterator[str]:
    delivered = {one for one, _, _ in w.delivered}
    for occurrence, body, at in w.delivered:
        life = verdict.lives.get(occurrence)
        if life is None:
            yield f"{occurrence} was delivered, and the log does not know it"
        elif life.fate not in ("under way", "delivered", "undeliverable"):
            yield f"{occurrence} is {life.fate} by the log, and was delivered"
        elif at < life.due:
            yield f"{occurrence} was delivered {life.due - at} ms early"
        elif body != life.body:
            yield f"{occurrence} was delivered with the message of another"
    for occurrence, life in verdict.lives.items():
        if life.fate == "delivered" and occurrence not in delivered:
            yield f"{occurrence} is delivered by the log, and was not"
        elif life.fate == "waiting" or (life.fate == "under way" and life.target != "q:stuck"):
            yield f"{occurrence} never came"
        elif life.fate == "undeliverable" and life.target != "q:gone":
            yield f"{occurrence} is undeliverable, and its target exists"


if __name__ == "__main__":
    snapshot.CHUNK_ENTRIES = 12  # type: ignore[misc]
    chosen = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    runs, first = [*numbers, 1000, 0][:2] if len(numbers) != 1 else (numbers[0], 0)
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    bad = 0
    for seed in range(first, first + runs):
        lines = run(seed, chosen)
        bad += bool(lines)
        for line in lines:
            words = line.split(":", 1)[1].split()
            kinds[" ".join(one for one in words if not any(c.isdigit() for c in one))[:70]].append(line)
    print(f"{runs} runs, {bad} bad, {sum(map(len, kinds.values()))} violations", f"(fault: {chosen})" if chosen else "")
    for kind, lines in sorted(kinds.items(), key=lambda one: -len(one[1]))[:6]:
        print(f"  {len(lines)} x {kind} ... e.g. {lines[0]}")
