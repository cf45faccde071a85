"""The broker, the connections and the clients of a simulated schedule log."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bide.schedules.encoding import encode
from bide.schedules.entries import ScheduleAnswer
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import partition_of
from bide.schedules.records import (
    Action,
    AddSchedule,
    ChangeSchedule,
    Claim,
    ClaimedOccurrence,
    Done,
    EndedOccurrence,
    ScheduleFilter,
    ScheduleRecord,
    Tick,
)
from bide.schedules.requests import RequestId

if TYPE_CHECKING:
    from tests.schedule_model.gate import Gate

PARTITION = 3
KEYS = [key for key in (f"k{number}" for number in range(99)) if partition_of(key) == PARTITION][:3]
STRAY = next(key for key in (f"s{number}" for number in range(99)) if partition_of(key) != PARTITION)
TARGETS = ("q:open", "q:open", "q:open", "q:slow", "q:stuck", "q:gone")
"""``slow`` refuses twice, ``stuck`` always, ``gone`` does not exist."""

_ACTIONS: tuple[Action, ...] = ("cancel", "cancel", "move", "pause", "resume", "run-now")

SEGMENT = 10
RESERVATION = 5
FRESH = 150
"""Milliseconds for which a beat that was read back keeps a gate current."""

REPEAT_BEAT = 500
"""Milliseconds after which a gate sends a beat although the last one is unread."""

TICK = 400

AHEAD = 150
"""Milliseconds before its due time from which on a gate claims a schedule, in half of the histories."""

OVERTAKEN = ("no-count", "snapshot-gap", "begin-anew", "index-unchecked", "beats-awaited")
"""Faults that show when retention overtakes a gate: with them, the first gate stands still in every history."""


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
        self.retention, self.chunk_entries = self.rng.choice([(150, 40), (240, 40), (400, 4)])
        self.crashes = self.rng.choice([0.005, 0.005, 0.015])
        self.crashes_in_carry = self.rng.choice([0, 0, 0.7])
        self.log: list[Stored] = []
        self.history: list[tuple[str, bytes]] = []
        self.next_offset = 0
        self.publishers: list[Publisher] = []
        self.limbo: list[tuple[int, str, bytes]] = []
        self.reservations = 0
        self.answers: defaultdict[str, list[ScheduleAnswer]] = defaultdict(list)
        self.delivered: list[tuple[str, bytes, int]] = []
        self.refusals: Counter[str] = Counter()
        self.gates: list[Gate] = []
        self.clients = [SimulatedClient(self.publisher(f"c{one}"), f"s{one}") for one in range(3)]
        self.problems: list[str] = []
        self.versions: list[str] = []
        self.gate_names = 0
        self.ahead = AHEAD if random.Random(-3 - seed).random() < 0.5 else 0
        self.has_naps = random.Random(-1 - seed).random() < (1 if fault in OVERTAKEN else 0.2)

    def publisher(self, name: str) -> Publisher:
        made = Publisher(name)
        self.publishers.append(made)
        return made

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
                self.limbo.append((self.now + self.rng.choice([0, 10, 100, 1500]), exchange, body))
        publisher.flying = publisher.unconfirmed + publisher.flying
        publisher.unconfirmed = []

    def leave_limbo(self) -> None:
        for one in list(self.limbo):
            if one[0] <= self.now:
                self.limbo.remove(one)
                self.append(one[1], one[2])

    def trim(self) -> None:
        if len(self.log) > self.retention:
            del self.log[: len(self.log) - self.retention + self.rng.randint(0, SEGMENT)]

    # -- applications

    def has_room(self, client: SimulatedClient) -> bool:
        """Whether the client may append one record more; a new reservation lasts for a few."""
        if client.room == 0:
            if self.reservations >= self.retention // 4 // RESERVATION and self.fault != "no-room":
                return False
            self.reservations += 1
            client.room = RESERVATION
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
            action: Action = rng.choice(_ACTIONS)
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
            forgeries: list[ScheduleRecord] = [
                Claim(gate="g1", items=(item,)),
                Done(gate="g1", items=(ended,)),
                Tick(number=1),
            ]
            forged = rng.choice(forgeries)
            client.publisher.send(rng.choice(["operations", "other"]), encode(forged))

    def repeat(self, client: SimulatedClient) -> None:
        """Ask again for an answer that did not come."""
        for request, (since, body) in list(client.unanswered.items()):
            if self.answers[request] and self.rng.random() < 0.8:
                del client.unanswered[request]
            elif self.now - since > 400 and not client.publisher.flying and self.has_room(client):
                client.publisher.send("operations", body)
                client.unanswered[request] = (self.now, body)
