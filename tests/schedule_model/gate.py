"""A gate of a simulated schedule log: a sketch of the real one, on the real fold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from bide.errors import ScheduleRecordError
from bide.gate.log_follower import LogFollower, ReadRecord
from bide.schedules import snapshot
from bide.schedules.encoding import decode, encode
from bide.schedules.entries import UnderWay, WaitingSchedule
from bide.schedules.gate_clock import GateClock
from bide.schedules.names import ScheduleNames
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
from bide.schedules.snapshot import SnapshotSearch
from bide.schedules.state import LogPosition, ScheduleMemory
from tests.schedule_model import faults
from tests.schedule_model.broker import FRESH, OVERTAKEN, PARTITION, REPEAT_BEAT, TICK, Stored, World

NAMES = ScheduleNames()
EXCHANGES = {"operations": NAMES.operations, "gates": NAMES.gates}

NAP = 700
"""Milliseconds for which the first gate stands still in some histories, so that retention overtakes it."""

UNCOUNTED = tuple(fault for fault in OVERTAKEN if fault != "beats-awaited")
"""Faults with which a gate does not compare counts either: it would find each of them by its next look."""


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
        is_there = state is not None and any(one.offset == state.position.offset for one in log)
        if not is_there and self.w.fault != "index-unchecked":
            state = None
        if state is None:
            state = self.rebuild()
        self.use(state)

    def rebuild(self) -> ScheduleMemory:
        log, fault = self.w.log, self.w.fault
        if not log or (log[0].offset == 0 and fault != "stale-carry"):
            return ScheduleMemory()
        search = SnapshotSearch() if fault != "partial-snapshot" else faults.PartialSearch()
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
        self.fold = faults.fold(self.w.fault, state, PARTITION, self.zone_error)
        self.follower = LogFollower(self.fold, NAMES)
        self.handled: set[str] = set()
        self.retry_at: dict[str, int] = {}
        self.ended: list[EndedOccurrence] = []
        self.unread: list[str] = []
        self.fenced_at = -FRESH
        self.beats: dict[int, int] = {}
        self.has_missed_beat = False
        self.cycle: tuple[str, int] | None = None
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
        exchange = EXCHANGES.get(one.exchange, one.exchange)
        if self.w.fault == "forged":
            is_operation = isinstance(read(one), AddSchedule | ChangeSchedule)
            exchange = EXCHANGES["operations" if is_operation else "gates"]
        found = self.follower.read(one.offset, exchange, one.body)
        record, answer = found.record, found.result.answer
        if exchange == EXCHANGES["gates"]:
            self.notice(found)
        if (self.follower.has_missed or self.has_missed_beat) and self.w.fault not in UNCOUNTED:
            self.use(self.rebuild())
            return
        if answer is not None and self.is_current and isinstance(record, AddSchedule | ChangeSchedule):
            self.w.answers[str(record.request)].append(answer)

    def notice(self, found: ReadRecord) -> None:
        """Look at a record of a gate."""
        match found.record:
            case Beat() as beat:
                if beat.gate == self.name and beat.clock in self.beats:
                    sent_at = self.beats.pop(beat.clock)
                    self.fenced_at = max(self.fenced_at, sent_at)
                    self.has_missed_beat = any(other < sent_at for other in self.beats.values())
                if beat.gate != self.name:
                    self.clock.hear(self.wall, beat.clock)
            case Tick():
                self.ticked_at = self.w.now
            case _:
                if self.cycle is not None and self.cycle[0] == found.completed:
                    self.free_room()

    def free_room(self) -> None:
        assert self.cycle is not None
        # The queue can only be purged as a whole, so what came after the snapshot has to be little.
        if self.state.position.count - self.cycle[1] < self.w.retention // 8 or self.w.fault == "trim-early":
            self.w.reservations = 0
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
        if self.is_stopped or (self.w.has_naps and self is self.w.gates[0] and self.w.now // NAP % 2):
            return
        self.now()
        if self.uncarried > self.room:
            self.read()
            return
        if self.chunks:
            self.publish(self.chunks.pop(0))
            if self.w.rng.random() < self.w.crashes_in_carry:
                self.crash()
            return
        sent = [] if self.w.fault == "beats-unread" else self.beats.values()
        is_quiet = self.w.now - max([self.fenced_at, *sent]) > FRESH // 2
        if is_quiet and self.may_beat:
            self.beat()
        if self.uncarried > self.w.retention // 4 and self.cycle is None and self.is_current:
            self.carry()
            return
        if self.uncarried > self.w.retention // 2 and self.w.fault != "greedy-gate":
            self.read()
            return
        if self.w.rng.random() < 0.45 or not self.is_current:
            for _ in range(self.w.rng.randint(1, 20)):
                self.read()
        else:
            self.w.rng.choice([self.claim, self.claim, self.deliver, self.deliver, self.report, self.tick, self.read])()

    @property
    def room(self) -> int:
        """Records that are not carried, above which it writes nothing: applications may append a quarter more."""
        eighths = {"greedy-gate": 10**6, "room-exceeded": 7}.get(self.w.fault or "", 5)
        return self.w.retention * eighths // 8

    @property
    def may_beat(self) -> bool:
        """One beat at a time is unread. But retention may have taken it, which the next one shows when it is read."""
        if not self.beats or self.w.fault == "beats-unread":
            return True
        return self.w.fault != "beats-awaited" and self.w.now - max(self.beats.values()) > REPEAT_BEAT

    def beat(self) -> None:
        clock = self.wall
        self.beats.setdefault(clock, self.w.now)
        position = self.state.position
        self.publish(Beat(gate=self.name, leads=True, clock=clock, after=position.offset, count=position.count))

    def claim(self) -> None:
        now, items = self.now(), list[ClaimedOccurrence]()
        for one in self.state.select(ScheduleFilter()):
            token = (one.key, one.version, one.due)
            is_due = one.due <= now + self.w.ahead and not one.is_paused
            if is_due and self.claims_sent.get(token, -200) < self.w.now - 100:
                self.claims_sent[token] = self.w.now
                items.append(self.item(one))
        if not items:
            return
        self.publish(Claim(gate=self.name, items=tuple(items)))
        if self.w.fault == "no-read-back":
            for item in items:
                found = self.state.waiting(item.key)
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
        now = self.now()
        if self.w.fault != "before-due":
            going = [one for one in going if may_send(self.state._under_way[one], now)]
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
        self.chunks = list(snapshot.cut(name, position, entries, most=self.w.chunk_entries))
        self.cycle = (name, position.count)
        if self.w.fault == "trim-early":
            self.free_room()
            position.carried = position.count

    def crash(self) -> None:
        """Begin again: with the index as it is, with an old copy of it, or without one."""
        self.w.break_connection(self.publisher)
        for exchange, body in self.publisher.flying:
            if self.w.rng.random() < 0.5:
                self.w.limbo.append((self.w.now + self.w.rng.choice([0, 10, 100, 1500]), exchange, body))
        self.publisher.flying = []
        self.clock, self.clock_error = GateClock(), 0
        self.now()
        self.subscribe(self.w.rng.choice([None, copy(self.state), *self.saved]))

    def save(self) -> None:
        self.saved = [*self.saved[-2:], copy(self.state)]


def may_send(one: UnderWay, now: int) -> bool:
    return one.is_run_now or one.due <= now


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
