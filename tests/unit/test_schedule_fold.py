"""The rules of the fold of the schedule log, one at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from bide.schedules.encoding import decode, encode
from bide.schedules.entries import RememberedAnswer, ScheduleAnswer
from bide.schedules.fold import (
    ANSWER_TICKS,
    MAX_ANSWER_KEYS,
    MAX_ANSWER_UNDER_WAY,
    MAX_RANGES,
    SESSION_TICKS,
    FoldResult,
    ScheduleFold,
)
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import partition_of
from bide.schedules.records import (
    Action,
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
from bide.schedules.snapshot import CHUNK_BYTES, SnapshotSearch, cut
from bide.schedules.state import LogPosition, ScheduleMemory

KEY = "invoice:42"
DAILY = {"interval": 86_400_000, "catch_up": "last"}


class Log:
    """A log of one partition, and the state that follows from it."""

    def __init__(self) -> None:
        self.state = ScheduleMemory()
        self.fold = ScheduleFold(self.state, partition_of(KEY))
        self.offsets = count(0, 3)
        self.numbers = count(1)

    def read(self, record: ScheduleRecord | None, *, by_gate: bool = False) -> FoldResult:
        return self.fold.apply(next(self.offsets), record, by_gate=by_gate)

    def request(self) -> RequestId:
        return RequestId("a", next(self.numbers))

    def add(self, key: str = KEY, **changed: Any) -> AddSchedule:
        record = AddSchedule(
            request=self.request(), key=key, target="q:x", nominal=100, due=100, message=ScheduledMessage(b"\0\0", b"")
        )
        return replace(record, **changed)

    def change(self, action: Action, key: str | None = KEY, **changed: Any) -> ChangeSchedule:
        return replace(ChangeSchedule(request=self.request(), action=action, key=key), **changed)

    def claim(self, **changed: Any) -> FoldResult:
        found = self.state.waiting(KEY)
        assert found is not None
        item = ClaimedOccurrence(key=KEY, version=found.version, nominal=found.nominal, due=found.due)
        return self.read(Claim(gate="g", items=(replace(item, **changed),)), by_gate=True)

    def done(self, occurrence: str) -> FoldResult:
        ended = EndedOccurrence(occurrence=occurrence, outcome="delivered")
        return self.read(Done(gate="g", items=(ended,)), by_gate=True)

    def answer(self, record: ScheduleRecord) -> ScheduleAnswer:
        answer = self.read(record).answer
        assert answer is not None
        return answer


@pytest.fixture
def log() -> Log:
    return Log()


def test_cancel_before_the_claim_wins(log: Log) -> None:
    log.read(log.add())
    found = log.state.waiting(KEY)
    assert found is not None
    cancelled = log.read(log.change("cancel"))
    assert cancelled.answer == ScheduleAnswer(outcome="cancelled", version="a-1")
    assert [(one.occurrence, one.how) for one in cancelled.ended] == [("a-1", "cancelled")]
    item = ClaimedOccurrence(key=KEY, version=found.version, nominal=found.nominal, due=found.due)
    assert log.read(Claim(gate="g", items=(item,)), by_gate=True) == FoldResult()


def test_cancel_after_the_claim_is_too_late(log: Log) -> None:
    log.read(log.add())
    assert log.claim().claimed == ("a-1",)
    assert log.answer(log.change("cancel")) == ScheduleAnswer(outcome="too-late", under_way=("a-1",))
    assert [one.how for one in log.done("a-1").ended] == ["delivered"]
    assert log.answer(log.change("cancel")) == ScheduleAnswer(outcome="too-late", version="a-1")
    for number in range(1, ANSWER_TICKS + 1):
        log.read(Tick(number=number), by_gate=True)
    assert log.answer(log.change("cancel")).outcome == "not-found"


def test_a_replacement_supersedes_what_waits_and_not_what_is_under_way(log: Log) -> None:
    log.read(log.add())
    assert [one.how for one in log.read(log.add()).ended] == ["superseded"]
    log.claim()
    again = log.read(log.add())
    assert not again.ended
    assert again.answer == ScheduleAnswer(outcome="scheduled", version="a-3")


@pytest.mark.parametrize("action", ["move", "pause"])
def test_a_claim_of_what_was_changed_meanwhile_is_void(log: Log, action: Action) -> None:
    log.read(log.add())
    before = log.state.waiting(KEY)
    assert before is not None
    log.read(log.change(action, due=100 if action == "move" else None))
    item = ClaimedOccurrence(key=KEY, version=before.version, nominal=100, due=100)
    assert not log.read(Claim(gate="g", items=(item,)), by_gate=True).claimed


def test_two_claims_of_an_occurrence_count_once(log: Log) -> None:
    log.read(log.add(recurrence=DAILY))
    following = {"next_nominal": 200, "next_due": 205}
    assert log.claim(**following).claimed == ("a-1@100",)
    assert not log.claim(nominal=100, due=100, **following).claimed
    found = log.state.waiting(KEY)
    assert found is not None
    assert (found.nominal, found.due) == (200, 205)


def test_the_last_occurrence_ends_the_schedule(log: Log) -> None:
    log.read(log.add(recurrence=DAILY))
    log.claim()
    assert log.state.waiting(KEY) is None


def test_a_skipped_occurrence_is_not_delivered(log: Log) -> None:
    log.read(log.add(recurrence=DAILY))
    skipped = log.claim(skip=True, next_nominal=200, next_due=200)
    assert not skipped.claimed
    assert [one.how for one in skipped.ended] == ["skipped"]


def test_cancelling_a_recurring_schedule_names_what_is_under_way(log: Log) -> None:
    log.read(log.add(recurrence=DAILY))
    log.claim(next_nominal=200, next_due=200)
    assert log.answer(log.change("cancel")) == ScheduleAnswer(
        outcome="cancelled", version="a-1", under_way=("a-1@100",)
    )


def test_run_now_delivers_a_single_message_at_once_and_a_recurring_one_in_between(log: Log) -> None:
    log.read(log.add())
    assert log.read(log.change("run-now")).claimed == ("a-1",)
    assert log.state.waiting(KEY) is None
    log.read(log.add(recurrence=DAILY))
    run = log.change("run-now")
    assert log.read(run).claimed == ("a-3!a-4",)
    assert not log.read(run).claimed
    assert log.state.waiting(KEY) is not None
    log.claim()
    under_way = {one.occurrence: one.is_run_now for one in log.state.under_way_of(KEY)}
    assert under_way == {"a-1": True, "a-3!a-4": True, "a-3@100": False}


def test_a_condition_is_compared_with_the_version_that_waits(log: Log) -> None:
    assert log.answer(log.add(if_version="a-9")).outcome == "changed"
    log.read(log.add())
    assert log.answer(log.add(if_absent=True)) == ScheduleAnswer(outcome="exists", version="a-2")
    assert log.answer(log.change("cancel", if_version="a-1")) == ScheduleAnswer(outcome="changed", version="a-2")
    assert log.answer(log.change("cancel", if_version="a-2")).outcome == "cancelled"
    assert log.answer(log.add(if_absent=True)).outcome == "scheduled"


def test_a_repeated_request_changes_nothing_and_is_answered_alike(log: Log) -> None:
    add, cancel = log.add(), log.change("cancel")
    log.read(add)
    first = log.read(cancel)
    log.read(log.add())
    again = log.read(cancel)
    assert again.is_repeat
    assert again.answer == first.answer
    assert log.state.waiting(KEY) is not None
    repeated = log.read(add)
    assert repeated.is_repeat
    assert repeated.answer == ScheduleAnswer(outcome="scheduled", version="a-1")


def test_a_request_that_was_lost_and_repeated_after_a_later_one_is_new(log: Log) -> None:
    first, second = log.add(), log.change("pause")
    log.read(second)
    assert not log.read(first).is_repeat
    assert log.state.waiting(KEY) is not None


def test_an_answer_that_was_forgotten_is_not_made_up(log: Log) -> None:
    cancel = log.change("cancel")
    log.read(cancel)
    for number in range(1, ANSWER_TICKS + 1):
        log.read(Tick(number=number), by_gate=True)
    assert log.answer(cancel).outcome == "forgotten"


def test_a_session_that_leaves_out_numbers_is_ignored_in_the_end(log: Log) -> None:
    for number in range(1, 2 * MAX_RANGES, 2):
        log.read(log.add(request=RequestId("b", number)))
    assert log.read(log.add(request=RequestId("b", 2 * MAX_RANGES + 1))) == FoldResult()
    assert not log.read(log.add(request=RequestId("b", 2))).is_repeat


def test_sessions_are_forgotten_after_a_day_of_ticks(log: Log) -> None:
    add = log.add()
    log.read(add)
    for number in range(1, SESSION_TICKS):
        log.read(Tick(number=number), by_gate=True)
        log.read(Tick(number=number), by_gate=True)
    assert log.read(add).is_repeat
    log.read(Tick(number=SESSION_TICKS), by_gate=True)
    assert not log.read(add).is_repeat


def test_a_filter_is_applied_to_all_that_wait(log: Log) -> None:
    keys = [key for key in (f"k{one}" for one in range(99)) if partition_of(key) == partition_of(KEY)][:3]
    for key, due in zip(keys, (100, 200, 300), strict=True):
        log.read(log.add(key, due=due))
    applied = log.read(log.change("cancel", None, filter=ScheduleFilter(prefix="k", due_from=100, due_before=300)))
    assert applied.answer == ScheduleAnswer(outcome="cancelled", count=2, keys=tuple(sorted(keys[:2])))
    assert [one.key for one in log.state.select(ScheduleFilter())] == keys[2:]


@pytest.mark.parametrize("kind", ["claim", "done", "tick", "snapshot", "beat"])
def test_records_of_gates_by_another_exchange_are_forged(log: Log, kind: str) -> None:
    log.read(log.add())
    log.claim()
    log.read(log.add())
    item = ClaimedOccurrence(key=KEY, version="a-2", nominal=100, due=100)
    records: dict[str, ScheduleRecord] = {
        "claim": Claim(gate="g", items=(item,)),
        "done": Done(gate="g", items=(EndedOccurrence(occurrence="a-1", outcome="delivered"),)),
        "tick": Tick(number=1),
        "snapshot": SnapshotChunk(cycle="c", as_of=0, count=0, tick=9, number=0, is_last=True, entries=()),
        "beat": Beat(gate="g", clock=0, after=0, count=0),
    }
    before = list(log.state.entries())
    assert log.read(records[kind]) == FoldResult()
    assert list(log.state.entries()) == before
    assert log.state.position.tick == 0


def test_operations_on_keys_of_other_partitions_and_garbage_change_nothing(log: Log) -> None:
    stray = next(key for key in map(str, range(99)) if partition_of(key) != partition_of(KEY))
    for record in (log.add(stray), None):
        assert log.read(record) == FoldResult()
    assert log.read(log.add(), by_gate=True) == FoldResult()
    assert list(log.state.entries()) == []
    assert log.state.position.count == 3


def test_a_snapshot_gives_the_state_back(log: Log) -> None:
    for number in range(7):
        log.read(log.add(recurrence=DAILY if number % 2 else None))
        log.claim(next_nominal=200 + number, next_due=200 + number)
    chunks = list(cut("c", log.state.position, log.state.entries(), most=2))
    assert len(chunks) > 3
    search = SnapshotSearch()
    for chunk in [*chunks[:2], *chunks[:-1]]:
        search.add(chunk)
        assert search.result() is None
    search.add(chunks[-1])
    found = search.result()
    assert found is not None
    assert list(found.entries()) == list(log.state.entries())
    assert (found.position.offset, found.position.count) == (log.state.position.offset, log.state.position.count)


def test_the_latest_complete_snapshot_counts(log: Log) -> None:
    search = SnapshotSearch()
    for cycle, as_of, is_complete in (("a", 10, True), ("b", 30, False), ("c", 20, True), ("d", 15, True)):
        position = replace(log.state.position, offset=as_of)
        (chunk,) = cut(cycle, position, ())
        search.add(replace(chunk, is_last=is_complete))
    found = search.result()
    assert found is not None
    assert found.position.offset == 20


def test_a_large_message_has_a_chunk_for_itself(log: Log) -> None:
    """It may be as large as the broker takes, less a little for the record."""
    small = log.read(log.add())
    assert small.answer is not None
    found = log.state.waiting(KEY)
    assert found is not None
    large = replace(found, message=ScheduledMessage(b"\0\0", bytes(3 * CHUNK_BYTES)))
    chunks = list(cut("c", log.state.position, [found, large, large, found, found]))
    assert [len(chunk.entries) for chunk in chunks] == [1, 1, 1, 2]


def test_no_chunk_is_too_long_to_be_read(log: Log) -> None:
    """An application may send recurrences of 16 long fields, with characters that are long in JSON."""
    long = {f"{number:x}" + "\1" * 254: "\1" * 255 for number in range(16)}
    log.read(log.add(recurrence=long, routing_key="\1" * 255))
    found = log.state.waiting(KEY)
    assert found is not None
    for chunk in cut("c", log.state.position, [found] * 600):
        assert decode(encode(chunk)) == chunk


def test_the_answer_to_a_filter_fits_in_a_chunk() -> None:
    keys = tuple('"' * 250 + f"{number:05}" for number in range(MAX_ANSWER_KEYS))
    answer = RememberedAnswer(request="a-1", tick=0, answer=ScheduleAnswer(outcome="cancelled", keys=keys))
    (chunk,) = cut("c", LogPosition(), [answer])
    assert decode(encode(chunk)) == chunk


def test_an_answer_names_a_thousand_occurrences_under_way_at_most(log: Log) -> None:
    """A recurring schedule whose target refuses has more and more of them."""
    log.read(log.add(recurrence=DAILY))
    for _ in range(MAX_ANSWER_UNDER_WAY + 5):
        log.read(log.change("run-now"))
    cancelled = log.answer(log.change("cancel"))
    assert len(cancelled.under_way) == MAX_ANSWER_UNDER_WAY


def test_chunks_with_many_long_answers_can_be_read() -> None:
    answer = ScheduleAnswer(outcome="cancelled", under_way=("x" * 163,) * MAX_ANSWER_UNDER_WAY)
    answers = [RememberedAnswer(request=f"a-{number}", tick=0, answer=answer) for number in range(1, 120)]
    assert all(decode(encode(chunk)) == chunk for chunk in cut("c", LogPosition(), answers))
