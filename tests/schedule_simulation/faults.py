"""Faults planted in the real gate and the real client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

from bide.amqp.connection import Connection
from bide.client.schedule_room import ScheduleRoom
from bide.gate import partition_index
from bide.gate.delivery_queue import DeliveryQueue, OccurrenceHead
from bide.gate.leadership import PartitionLeadership
from bide.gate.log_follower import LogFollower
from bide.gate.log_reader import LogReader, LogRecord
from bide.gate.log_rebuild import LogOpener
from bide.gate.partition_index import AppliedRecords, PartitionIndex
from bide.gate.partition_session import PartitionSession
from bide.gate.publisher import GatePublisher
from bide.gate.room import LogRoom
from bide.gate.scheduled_delivery import DeliveryRules, ScheduledDelivery
from bide.gate.snapshot_finder import FoundSnapshot
from bide.gate.snapshot_writer import SnapshotWriter
from bide.gate.spread import GateTime
from bide.schedules import snapshot
from bide.schedules.encoding import decode
from bide.schedules.entries import RememberedAnswer, ScheduleSession, StateEntry
from bide.schedules.fold import FoldResult, ScheduleFold
from bide.schedules.records import Claim, ClaimedOccurrence, SnapshotChunk, Tick
from bide.schedules.state import LogPosition, ScheduleState
from tests.schedule_model import faults as model

IN_FOLD = (
    *("claim-by-key", "claim-by-version", "claim-paused", "second-claim", "repeats", "repeats-by-maximum"),
    *("repeats-answered-anew", "repeats-forgotten", "ticks-race", "stray-keys", "occurrence-by-key"),
    "filter-ignores-due",
)
"""Faults of the fold that the model has, too."""

FAULTS = {
    "no-read-back": "deliver what was claimed before the claim was read back",
    "before-due": model.FAULTS["before-due"],
    "second-claim": model.FAULTS["second-claim"],
    "claim-by-key": model.FAULTS["claim-by-key"],
    "claim-by-version": model.FAULTS["claim-by-version"],
    "claim-paused": model.FAULTS["claim-paused"],
    "forget-undone": model.FAULTS["forget-undone"],
    "late-claim": "a leader looks for what is under way when it takes over, and not at claims that land later",
    "message-by-key": model.FAULTS["message-by-key"],
    "stale-carry": model.FAULTS["stale-carry"],
    "no-count": model.FAULTS["no-count"],
    "not-current": model.FAULTS["not-current"],
    "trim-early": model.FAULTS["trim-early"],
    "no-room": model.FAULTS["no-room"],
    "repeats": model.FAULTS["repeats"],
    "repeats-by-maximum": model.FAULTS["repeats-by-maximum"],
    "repeats-answered-anew": model.FAULTS["repeats-answered-anew"],
    "wall-clock": model.FAULTS["wall-clock"],
    "drop-fifth": model.FAULTS["drop-fifth"],
    "forged": model.FAULTS["forged"],
    **{
        fault: model.FAULTS[fault]
        for fault in (
            *("partial-snapshot", "index-unchecked", "sessions-not-carried", "repeats-forgotten", "ticks-race"),
            *("stray-keys", "own-calendar", "occurrence-by-key", "blocking", "filter-ignores-due"),
        )
    },
}


def plant(fault: str | None, stack: ExitStack) -> None:
    """Plant a fault until the stack is closed."""
    if fault is None:
        return
    if fault in IN_FOLD:
        stack.enter_context(patch.object(partition_index, "ScheduleFold", model._FOLDS[fault]))
    for owner, name, made in _PATCHES.get(fault, list)():
        stack.enter_context(patch.object(owner, name, made))


_Patches = list[tuple[Any, str, Any]]

_RACING_TICK = 0.5
"""Seconds between the ticks of a gate that believes that all of them count."""


def _no_read_back() -> _Patches:
    original = PartitionIndex._planned

    def planned(self: PartitionIndex, due: Sequence[Any], now: int) -> bytes | None:
        body = original(self, due, now)
        if body is not None:
            record = decode(body)
            assert isinstance(record, Claim)
            with self._index.batch():
                self._follower._fold._claim(record)
        return body

    return [(PartitionIndex, "_planned", planned), *_looking_at_under_way()]


def _looking_at_under_way() -> _Patches:
    """After each batch, deliver everything that is under way by the index."""
    original = PartitionIndex._apply

    def apply(self: PartitionIndex, records: Sequence[Any], *rest: Any) -> AppliedRecords:
        applied = original(self, records, *rest)
        applied.claimed = self._index.state.under_way_heads()
        return applied

    return [(PartitionIndex, "_apply", apply)]


def _before_due() -> _Patches:
    original = DeliveryQueue.add

    def add(self: DeliveryQueue, occurrences: Iterable[OccurrenceHead]) -> None:
        original(self, [one._replace(due=0) for one in occurrences])

    return [(DeliveryQueue, "add", add)]


def _own_claims_only(*, at_takeover: bool) -> _Patches:
    original = PartitionIndex._apply

    def apply(self: PartitionIndex, records: Sequence[Any], *rest: Any) -> AppliedRecords:
        applied = original(self, records, *rest)
        own = b'"gate":"%s"' % self._gate.encode()
        if not any(own in one.body and b'"kind":"claim"' in one.body for one in records):
            applied.claimed = []
        return applied

    async def nothing(self: PartitionIndex) -> list[OccurrenceHead]:
        return []

    found: _Patches = [(PartitionIndex, "_apply", apply)]
    return found if at_takeover else [*found, (PartitionIndex, "under_way", nothing)]


def _message_by_key() -> _Patches:
    original = DeliveryRules.delivery

    async def deliveries(
        self: PartitionIndex, occurrences: Sequence[str], rules: DeliveryRules
    ) -> list[ScheduledDelivery]:
        def find() -> list[ScheduledDelivery]:
            results = []
            for one in occurrences:
                entry = self._index.state.under_way(one)
                if entry is None:
                    continue
                newer = self._index.state.waiting(entry.key)
                results.append(original(rules, entry if newer is None else replace(entry, message=newer.message)))
            return results

        return await self._thread.run(find)

    return [(PartitionIndex, "deliveries", deliveries)]


def _stale_carry() -> _Patches:
    original = LogOpener._rebuild

    async def rebuild(self: LogOpener) -> None:
        end, _ = await self._end()
        await original(self)
        if self._index.position.offset >= 0 or self._index.position.snapshot is not None:
            with self._index._index.batch() as state:
                state.position.offset = end
            self._index._begin()

    return [(LogOpener, "_rebuild", rebuild)]


def _trim_early() -> _Patches:
    original = PartitionIndex._begin_snapshot

    def begin(self: PartitionIndex, cycle: str) -> LogPosition:
        position = original(self, cycle)
        with self._index.batch() as state:
            state.position.carried, state.position.carried_size = state.position.count, state.position.size
        return position

    async def step(self: SnapshotWriter, now: float) -> None:
        before = self._cycle
        await step_before(self, now)
        if self._cycle not in (None, before):
            async with await self._connection.channel() as channel:
                await channel.purge_queue(self._queue)

    step_before = SnapshotWriter.step
    return [(PartitionIndex, "_begin_snapshot", begin), (SnapshotWriter, "step", step)]


def _drop_fifth() -> _Patches:
    original = GatePublisher.deliver

    def deliver(self: GatePublisher, delivery: ScheduledDelivery, on_result: Callable[..., None]) -> None:
        if sum(delivery.entry.occurrence.encode()) % 5:
            original(self, delivery, on_result)
        else:
            self.connection.loop.call_soon(on_result, delivery, None)

    return [(GatePublisher, "deliver", deliver)]


def _forged() -> _Patches:
    original = LogFollower.apply

    def apply(self: LogFollower, offset: int, exchange: str, body: bytes, record: Any) -> Any:
        is_forged = body.startswith((b'{"v":1,"kind":"claim"', b'{"v":1,"kind":"done"'))
        return original(self, offset, self._names.gates if is_forged else exchange, body, record)

    return [(LogFollower, "apply", apply)]


def _partial_snapshot() -> _Patches:
    return [(FoundSnapshot, "is_complete", property(lambda self: True))]


_UNCOUNTED: _Patches = [(LogFollower, "_compare", lambda self, offset, count: None)]


def _index_unchecked() -> _Patches:
    async def behind(self: LogOpener, position: LogPosition) -> tuple[LogReader, list[LogRecord]]:
        return await LogReader.open(self._connection, self._log, position.offset + 1), []

    return [(LogOpener, "_behind", behind), *_UNCOUNTED]


def _sessions_not_carried() -> _Patches:
    original = snapshot.cut

    def cut(
        cycle_name: str, position: LogPosition, entries: Iterable[StateEntry], **options: int
    ) -> Iterator[SnapshotChunk]:
        kept = (one for one in entries if not isinstance(one, ScheduleSession | RememberedAnswer))
        return original(cycle_name, position, kept, **options)

    return [(snapshot, "cut", cut)]


def _ticks_race() -> _Patches:
    def tick(self: PartitionSession, now: float) -> None:
        if now - self._gate.ticked_at >= _RACING_TICK:
            self._gate.ticked_at = now
            self._append(Tick(number=self._index.position.tick + 1))

    return [(PartitionSession, "_tick", tick)]


def _own_calendar() -> _Patches:
    errors = cycle((0, 7))

    class OwnCalendar(ScheduleFold):
        def __init__(self, state: ScheduleState, partition: int) -> None:
            super().__init__(state, partition)
            self.error = next(errors)

        def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
            if item.next_nominal is not None and item.next_due is not None:
                nominal, due = item.next_nominal + self.error, item.next_due + self.error
                item = replace(item, next_nominal=nominal, next_due=due)
            return super()._claim_one(item)

    return [(partition_index, "ScheduleFold", OwnCalendar)]


def _blocking() -> _Patches:
    original = DeliveryQueue.take

    def take(self: DeliveryQueue, now: float, most: int) -> list[str]:
        if not self._refusals:
            return original(self, now, most)
        queued, turns = self._queued, self._turns
        self._queued, self._turns = {}, {}
        try:
            return original(self, now, most)
        finally:
            for target, rest in self._queued.items():
                queued.setdefault(target, deque()).extendleft(rest)
                turns[target] = None
            self._queued, self._turns = queued, turns

    return [(DeliveryQueue, "take", take)]


async def _take_nothing(self: ScheduleRoom, channel: Any, size: int) -> None:
    return


def _wall(self: GateTime, connection: Connection) -> int:
    return self.wall(connection)


_PATCHES: dict[str, Callable[[], _Patches]] = {
    "no-read-back": _no_read_back,
    "before-due": _before_due,
    "second-claim": _looking_at_under_way,
    "forget-undone": lambda: _own_claims_only(at_takeover=False),
    "late-claim": lambda: _own_claims_only(at_takeover=True),
    "message-by-key": _message_by_key,
    "stale-carry": _stale_carry,
    "no-count": lambda: [(LogFollower, "_compare", lambda self, offset, count: None)],
    "not-current": lambda: [(PartitionLeadership, "is_current", lambda self, now: True)],
    "trim-early": _trim_early,
    "no-room": lambda: [(ScheduleRoom, "take", _take_nothing), (LogRoom, "level", lambda self, position: "free")],
    "wall-clock": lambda: [(GateTime, "now", _wall)],
    "drop-fifth": _drop_fifth,
    "forged": _forged,
    "partial-snapshot": _partial_snapshot,
    "index-unchecked": _index_unchecked,
    "sessions-not-carried": _sessions_not_carried,
    "ticks-race": _ticks_race,
    "own-calendar": _own_calendar,
    "blocking": _blocking,
}
