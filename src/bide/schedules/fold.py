"""The fold of the schedule log: the state after a record, from the state before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from bide.schedules.entries import (
    AnswerOutcome,
    FinishedKey,
    RememberedAnswer,
    ScheduleAnswer,
    ScheduleSession,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.names import partition_of
from bide.schedules.records import (
    AddSchedule,
    Beat,
    ChangeSchedule,
    Claim,
    ClaimedOccurrence,
    Done,
    EndedOccurrence,
    Operation,
    ScheduleRecord,
    SnapshotChunk,
    Tick,
)
from bide.schedules.state import ScheduleState

SESSION_TICKS: Final = 24
"""A session is forgotten after this many ticks without a request."""

ANSWER_TICKS: Final = 2
"""Answers and finished keys are forgotten after this many ticks."""

MAX_ANSWER_KEYS: Final = 20_000
MAX_ANSWER_UNDER_WAY: Final = 1_000

MAX_RANGES: Final = 1_000
"""The maximum number of ranges of applied numbers of a session. A client begins a new session long before. Operations
beyond the limit are ignored, so that a session with many gaps cannot fill the memory of gates."""

Ending = Literal["delivered", "undeliverable", "cancelled", "superseded", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OccurrenceEnd:
    """The end of an occurrence by a record, for taps, audit and metrics."""

    key: str
    occurrence: str
    how: Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldResult:
    """The result of a record.

    Attributes:
        answer: for the sender of an operation; the first answer again if it was repeated. None for records of gates,
            and for operations on keys of other partitions.
        is_repeat: whether the operation was applied before, so that nothing changed.
        ended: occurrences that ended.
        claimed: occurrences that are to be delivered from now on.
    """

    answer: ScheduleAnswer | None = None
    is_repeat: bool = False
    ended: tuple[OccurrenceEnd, ...] = ()
    claimed: tuple[str, ...] = ()


class ScheduleFold:
    """Applies the records of one partition to a state, in the order of the log.

    It reads no clock and no calendar, and decides by the records alone, so that all gates agree. A change of its rules
    needs a new version of the records.

    Args:
        partition: the number of the partition.
    """

    def __init__(self, state: ScheduleState, partition: int) -> None:
        self.state = state
        self.partition = partition

    def apply(self, offset: int, record: ScheduleRecord | None, *, by_gate: bool) -> FoldResult:
        """Apply the next record.

        Args:
            offset: its offset, greater than that of the record before.
            record: the record; None if it cannot be decoded, which changes nothing.
            by_gate: whether it came through the exchange of the gates. A claim, or another record of gates, that came
                from an application is forged, and is ignored.
        """
        position = self.state.position
        position.offset, position.count = offset, position.count + 1
        match record:
            case AddSchedule() | ChangeSchedule():
                return FoldResult() if by_gate else self._operation(record)
            case Claim() if by_gate:
                return self._claim(record)
            case Done() if by_gate:
                return self._done(record)
            case Tick() if by_gate:
                self._tick(record)
            case Beat() | SnapshotChunk() | Claim() | Done() | Tick() | None:
                pass
            case _:
                assert_never(record)
        return FoldResult()

    # -- operations of applications

    def _operation(self, record: Operation) -> FoldResult:
        if record.key is not None and partition_of(record.key) != self.partition:
            return FoldResult()
        state, request = self.state, record.request
        session = state.session(request.session) or ScheduleSession(session=request.session)
        if request.number in session.applied:
            return FoldResult(answer=self._answer_again(record), is_repeat=True)
        tick, applied_numbers = state.position.tick, session.applied.including(request.number)
        if len(applied_numbers.starts) > MAX_RANGES:
            return FoldResult()
        state.put(replace(session, applied=applied_numbers, tick=tick))
        applied = self._add(record) if isinstance(record, AddSchedule) else self._change(record)
        assert applied.answer is not None
        if not _is_unconditional(record):
            state.put(RememberedAnswer(request=str(request), tick=tick, answer=applied.answer))
        return applied

    def _answer_again(self, record: Operation) -> ScheduleAnswer:
        known = self.state.answer(str(record.request))
        if known is not None:
            return known.answer
        if _is_unconditional(record):
            return ScheduleAnswer(outcome="scheduled", version=str(record.request))
        return ScheduleAnswer(outcome="forgotten")

    def _add(self, record: AddSchedule) -> FoldResult:
        found = self.state.waiting(record.key)
        if record.if_absent and found is not None:
            return FoldResult(answer=ScheduleAnswer(outcome="exists", version=found.version))
        if record.if_version is not None and (found is None or found.version != record.if_version):
            return FoldResult(answer=self._changed(found))
        version = str(record.request)
        self.state.put(
            WaitingSchedule(
                key=record.key,
                id=version,
                version=version,
                target=record.target,
                routing_key=record.routing_key,
                nominal=record.nominal,
                due=record.due,
                recurrence=record.recurrence,
                message=record.message,
            )
        )
        ended = () if found is None else (_ended(found, "superseded"),)
        return FoldResult(answer=ScheduleAnswer(outcome="scheduled", version=version), ended=ended)

    def _change(self, record: ChangeSchedule) -> FoldResult:
        if record.filter is not None:
            return self._change_all(record)
        assert record.key is not None
        found = self.state.waiting(record.key)
        if record.if_version is not None and found is not None and found.version != record.if_version:
            return FoldResult(answer=self._changed(found))
        if found is None:
            return FoldResult(answer=self._missing(record.key))
        applied = self._change_one(found, record)
        assert applied.answer is not None
        return replace(applied, answer=replace(applied.answer, under_way=self._under_way(record.key)))

    def _change_all(self, record: ChangeSchedule) -> FoldResult:
        assert record.filter is not None
        parts, keys = list[FoldResult](), list[str]()
        for one in self.state.select(record.filter):
            parts.append(self._change_one(one, record))
            if len(keys) < MAX_ANSWER_KEYS:
                keys.append(one.key)
        return FoldResult(
            answer=ScheduleAnswer(outcome=_DONE[record.action], count=len(parts), keys=tuple(keys)),
            ended=tuple(end for one in parts for end in one.ended),
            claimed=tuple(claimed for one in parts for claimed in one.claimed),
        )

    def _change_one(self, found: WaitingSchedule, record: ChangeSchedule) -> FoldResult:
        version = str(record.request)
        ends_or_stays = record.action in ("cancel", "run-now")
        answer = ScheduleAnswer(outcome=_DONE[record.action], version=found.version if ends_or_stays else version)
        match record.action:
            case "cancel":
                self.state.remove(found)
                if (finished := self.state.finished(found.key)) is not None:
                    self.state.remove(finished)
                return FoldResult(answer=answer, ended=(_ended(found, "cancelled"),))
            case "move":
                assert record.due is not None
                self.state.put(replace(found, version=version, due=record.due))
            case "pause":
                self.state.put(replace(found, version=version, is_paused=True))
            case "resume":
                resumed_at = record.at if found.is_paused else found.resumed_at
                self.state.put(replace(found, version=version, is_paused=False, resumed_at=resumed_at))
            case "run-now":
                return replace(self._run_now(found, version), answer=answer)
        return FoldResult(answer=answer)

    def _run_now(self, found: WaitingSchedule, version: str) -> FoldResult:
        """Claim a single message now instead of later, or an additional occurrence of a recurring schedule."""
        if found.recurrence is None:
            self.state.remove(found)
            occurrence = found.occurrence
        else:
            occurrence = f"{found.id}!{version}"
        self.state.put(_under_way(found, occurrence, is_run_now=True))
        return FoldResult(claimed=(occurrence,))

    def _changed(self, found: WaitingSchedule | None) -> ScheduleAnswer:
        return ScheduleAnswer(outcome="changed", version=None if found is None else found.version)

    def _missing(self, key: str) -> ScheduleAnswer:
        under_way, finished = self._under_way(key), self.state.finished(key)
        if under_way or finished is not None:
            return ScheduleAnswer(
                outcome="too-late", version=None if finished is None else finished.version, under_way=under_way
            )
        return ScheduleAnswer(outcome="not-found")

    def _under_way(self, key: str) -> tuple[str, ...]:
        return tuple(sorted(one.occurrence for one in self.state.under_way_of(key))[:MAX_ANSWER_UNDER_WAY])

    # -- records of gates

    def _claim(self, record: Claim) -> FoldResult:
        parts = [self._claim_one(item) for item in record.items]
        return FoldResult(
            ended=tuple(end for one in parts for end in one.ended),
            claimed=tuple(claimed for one in parts for claimed in one.claimed),
        )

    def _claim_one(self, item: ClaimedOccurrence) -> FoldResult:
        found = self.state.waiting(item.key)
        seen = (item.version, item.nominal, item.due)
        if found is None or found.is_paused or (found.version, found.nominal, found.due) != seen:
            return FoldResult()
        if item.next_nominal is None or item.next_due is None:
            self.state.remove(found)
        else:
            self.state.put(replace(found, nominal=item.next_nominal, due=item.next_due))
        if item.skip:
            return FoldResult(ended=(_ended(found, "skipped"),))
        self.state.put(_under_way(found, found.occurrence))
        return FoldResult(claimed=(found.occurrence,))

    def _done(self, record: Done) -> FoldResult:
        return FoldResult(ended=tuple(end for item in record.items for end in self._done_one(item)))

    def _done_one(self, item: EndedOccurrence) -> list[OccurrenceEnd]:
        found = self.state.under_way(item.occurrence)
        if found is None:
            return []
        self.state.remove(found)
        if self.state.waiting(found.key) is None:
            self.state.put(FinishedKey(key=found.key, version=found.id, tick=self.state.position.tick))
        return [OccurrenceEnd(key=found.key, occurrence=found.occurrence, how=item.outcome)]

    def _tick(self, record: Tick) -> None:
        position = self.state.position
        if record.number == position.tick + 1:
            position.tick = record.number
            self.state.forget(sessions=record.number - SESSION_TICKS, others=record.number - ANSWER_TICKS)


_DONE: Final[dict[str, AnswerOutcome]] = {
    "cancel": "cancelled",
    "move": "moved",
    "pause": "paused",
    "resume": "resumed",
    "run-now": "running",
}


def _is_unconditional(record: Operation) -> bool:
    """Whether the answer is the same in every state, so that it need not be remembered."""
    return isinstance(record, AddSchedule) and not record.if_absent and record.if_version is None


def _ended(found: WaitingSchedule, how: Ending) -> OccurrenceEnd:
    return OccurrenceEnd(key=found.key, occurrence=found.occurrence, how=how)


def _under_way(found: WaitingSchedule, occurrence: str, *, is_run_now: bool = False) -> UnderWay:
    return UnderWay(
        occurrence=occurrence,
        key=found.key,
        id=found.id,
        target=found.target,
        routing_key=found.routing_key,
        nominal=found.nominal,
        due=found.due,
        is_recurring=found.recurrence is not None,
        is_run_now=is_run_now,
        message=found.message,
    )
