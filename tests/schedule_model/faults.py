"""Planted faults of the schedule log: wrong folds and a wrong search for snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bide.schedules import fold as fold_module
from bide.schedules.entries import ScheduleAnswer, UnderWay, WaitingSchedule
from bide.schedules.fold import FoldResult, ScheduleFold
from bide.schedules.names import partition_of
from bide.schedules.records import AddSchedule, ChangeSchedule, Claim, ClaimedOccurrence, SnapshotChunk, Tick
from bide.schedules.requests import AppliedNumbers
from bide.schedules.snapshot import SnapshotSearch
from bide.schedules.state import LogPosition, ScheduleMemory

FAULTS = {
    "no-read-back": "deliver when the claim is sent, instead of when the log has decided",
    "before-due": "deliver what was claimed ahead at once, instead of when it is due",
    "claim-by-key": "a claim holds for whatever waits under the key",
    "claim-by-version": "a claim names the version, and not the occurrence",
    "claim-paused": "a claim holds for a schedule that was paused before it",
    "second-claim": "a claim of what is under way already counts again",
    "forget-undone": "a gate delivers only what it claimed itself",
    "stale-carry": "go on behind the end of the log after a snapshot, instead of behind the snapshot's position",
    "partial-snapshot": "use a snapshot of which chunks are missing",
    "snapshot-gap": "use a snapshot although records behind it were trimmed",
    "begin-anew": "begin empty in a trimmed log without a snapshot",
    "index-unchecked": "go on with an old index, although the records behind it were trimmed",
    "not-current": "act without having read one's own beat a short while ago",
    "no-count": "do not compare counts, so that a reader overtaken by retention goes on",
    "no-room": "applications append without limit while nothing is carried",
    "greedy-gate": "gates write on although nothing is carried",
    "room-exceeded": "gates leave too little of the retention for applications and for late copies",
    "beats-awaited": "wait for ever for a beat that retention took before it was read back",
    "beats-unread": "gates send beats before they have read the last one back, and fill the log while they lag",
    "trim-early": "free the room before the snapshot is complete",
    "sessions-not-carried": "leave applied requests out of snapshots",
    "repeats": "apply a repeated request again",
    "repeats-by-maximum": "take a request for a repeated one if a later one came before it",
    "repeats-answered-anew": "answer a repeated request by the present state",
    "repeats-forgotten": "forget sessions after one tick",
    "ticks-race": "gates tick at once, and every tick counts",
    "forged": "believe claims by whatever exchange they came",
    "stray-keys": "apply operations on keys of other partitions",
    "own-calendar": "each gate computes the next occurrence by its own time zone data",
    "occurrence-by-key": "ids of occurrences are made of key and time",
    "message-by-key": "deliver the message that waits under the key at that time",
    "wall-clock": "trust the wall clock after a step",
    "blocking": "try the first occurrence until its target takes it",
    "drop-fifth": "report every fifth occurrence without delivering it",
    "filter-ignores-due": "a filter does not look at the due time",
}


def fold(fault: str | None, state: ScheduleMemory, partition: int, zone_error: int) -> Any:
    """The fold with a fault."""
    kind = _FOLDS.get(fault or "", ScheduleFold)
    made = kind(state, partition)
    made.zone_error = zone_error  # type: ignore[attr-defined]  # an attribute of the faults
    made.claimed_here = set()  # type: ignore[attr-defined]  # an attribute of the faults
    return made


class ClaimByKey(ScheduleFold):
    """``claim-by-key``."""

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        found = self.state.waiting(item.key)
        if found is not None:
            item = replace(item, version=found.version, nominal=found.nominal, due=found.due)
        return super()._claim_one(item)


class ClaimByVersion(ScheduleFold):
    """``claim-by-version``."""

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        found = self.state.waiting(item.key)
        if found is not None and found.version == item.version:
            item = replace(item, nominal=found.nominal, due=found.due)
        return super()._claim_one(item)


class ClaimPaused(ScheduleFold):
    """``claim-paused``: a pause renews the version, so the claim has to be let pass by the version before it too."""

    def __init__(self, state: Any, partition: int) -> None:
        super().__init__(state, partition)
        self.before: dict[str, str] = {}

    def _change_one(self, found: WaitingSchedule, record: ChangeSchedule) -> FoldResult:
        if record.action == "pause":
            self.before[found.key] = found.version
        return super()._change_one(found, record)

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        found = self.state.waiting(item.key)
        if found is not None and found.is_paused and self.before.get(item.key) == item.version:
            self.state.put(replace(found, is_paused=False))
            item = replace(item, version=found.version)
        return super()._claim_one(item)


class SecondClaim(ScheduleFold):
    """``second-claim``: what a claim finds gone counts as claimed by it, if it was cancelled or moved since."""

    def __init__(self, state: Any, partition: int) -> None:
        super().__init__(state, partition)
        self.seen: dict[tuple[str, str], WaitingSchedule] = {}

    def _add(self, record: AddSchedule) -> FoldResult:
        applied = super()._add(record)
        found = self.state.waiting(record.key)
        if found is not None:
            self.seen[found.key, found.version] = found
        return applied

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        applied = super()._claim_one(item)
        before = self.seen.pop((item.key, item.version), None)
        if not applied.claimed and not applied.ended and before is not None and self.state.waiting(item.key) is None:
            self.state.put(fold_module._under_way(before, before.occurrence))
        return applied


class ForgetUndone(ScheduleFold):
    """``forget-undone``: it notes whose claim it was."""

    claimed_here: set[tuple[str, str]]

    def _claim(self, record: Claim) -> FoldResult:
        applied = super()._claim(record)
        self.claimed_here |= {(record.gate, one) for one in applied.claimed}
        return applied


class Repeats(ScheduleFold):
    """``repeats``."""

    def _operation(self, record: AddSchedule | ChangeSchedule) -> FoldResult:
        session = self.state.session(record.request.session)
        if session is not None:
            self.state.put(replace(session, applied=AppliedNumbers()))
        return super()._operation(record)


class RepeatsByMaximum(ScheduleFold):
    """``repeats-by-maximum``."""

    def _operation(self, record: AddSchedule | ChangeSchedule) -> FoldResult:
        session = self.state.session(record.request.session)
        if session is not None and session.applied.ends:
            self.state.put(replace(session, applied=AppliedNumbers((1,), (session.applied.ends[-1],))))
        return super()._operation(record)


class RepeatsAnsweredAnew(ScheduleFold):
    """``repeats-answered-anew``."""

    def _operation(self, record: AddSchedule | ChangeSchedule) -> FoldResult:
        applied = super()._operation(record)
        if applied.is_repeat and isinstance(record, ChangeSchedule) and record.key is not None:
            found = self.state.waiting(record.key)
            anew = (
                self._missing(record.key) if found is None else ScheduleAnswer(outcome="changed", version=found.version)
            )
            return replace(applied, answer=anew)
        return applied


class RepeatsForgotten(ScheduleFold):
    """``repeats-forgotten``."""

    def _tick(self, record: Tick) -> None:
        super()._tick(record)
        self.state.forget(sessions=record.number - 1, others=record.number - 1)


class TicksRace(ScheduleFold):
    """``ticks-race``."""

    def _tick(self, record: Tick) -> None:
        super()._tick(replace(record, number=self.state.position.tick + 1))


class StrayKeys(ScheduleFold):
    """``stray-keys``."""

    def _operation(self, record: AddSchedule | ChangeSchedule) -> FoldResult:
        if record.key is not None:
            self.partition = partition_of(record.key)
        return super()._operation(record)


class OwnCalendar(ScheduleFold):
    """``own-calendar``."""

    zone_error: int

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        found = self.state.waiting(item.key)
        if found is not None and found.recurrence is not None:
            following = found.nominal + found.recurrence["ms"] + self.zone_error
            own = following if following <= found.recurrence["last"] else None
            item = replace(item, next_nominal=own, next_due=own)
        return super()._claim_one(item)


class OccurrenceByKey(ScheduleFold):
    """``occurrence-by-key``: what was under way or done at that time of the key is not delivered again."""

    def __init__(self, state: Any, partition: int) -> None:
        super().__init__(state, partition)
        self.known: set[tuple[str, int]] = set()

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        applied = super()._claim_one(item)
        for one in applied.claimed:
            found = self.state.under_way(one)
            assert found is not None
            if found.is_recurring and (found.key, found.nominal // 50) in self.known:
                self.state.remove(found)
            self.known.add((found.key, found.nominal // 50))
        return applied


class FilterIgnoresDue(ScheduleFold):
    """``filter-ignores-due``."""

    def _change_all(self, record: ChangeSchedule) -> FoldResult:
        assert record.filter is not None
        return super()._change_all(replace(record, filter=replace(record.filter, due_from=None, due_before=None)))


class PartialSearch(SnapshotSearch):
    """``partial-snapshot``."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: list[SnapshotChunk] = []

    def add(self, chunk: SnapshotChunk) -> None:
        if self.latest and self.latest[0].cycle != chunk.cycle:
            self.latest = []
        self.latest.append(chunk)

    def result(self) -> ScheduleMemory | None:
        if not self.latest:
            return None
        first = self.latest[0]
        state = ScheduleMemory(position=LogPosition(offset=first.as_of, count=first.count, tick=first.tick))
        for chunk in self.latest:
            for entry in chunk.entries:
                if not isinstance(entry, UnderWay) or state.under_way(entry.occurrence) is None:
                    state.put(entry)
        return state


_FOLDS: dict[str, type[ScheduleFold]] = {
    "claim-by-key": ClaimByKey,
    "claim-by-version": ClaimByVersion,
    "claim-paused": ClaimPaused,
    "second-claim": SecondClaim,
    "forget-undone": ForgetUndone,
    "repeats": Repeats,
    "repeats-by-maximum": RepeatsByMaximum,
    "repeats-answered-anew": RepeatsAnsweredAnew,
    "repeats-forgotten": RepeatsForgotten,
    "ticks-race": TicksRace,
    "stray-keys": StrayKeys,
    "own-calendar": OwnCalendar,
    "occurrence-by-key": OccurrenceByKey,
    "filter-ignores-due": FilterIgnoresDue,
}
