"""The state in SQLite, compared with the state in memory."""

from __future__ import annotations

import sqlite3
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bide.gate.index_schema import SCHEMA
from bide.gate.sqlite_state import SqliteState
from bide.schedules.entries import WaitingSchedule
from bide.schedules.fold import ScheduleFold
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import partition_of
from bide.schedules.records import (
    ACTIONS,
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
from bide.schedules.state import ScheduleMemory
from bide.schedules.timeline import TimeGrid, TimelineCount
from tests.examples import examples

PARTITION = 3
STEMS = ("a", "ab", "aé", "a\0", "a\ufffd", "a\U0010ffff", "\ud7ff", "\ue000", "\U0010ffff", "\U0010ffff\U0010ffff")
KEYS = [next(key for n in range(999) if partition_of(key := f"{stem}{n}") == PARTITION) for stem in STEMS]
TARGETS = ("q:x", "q:y", "x:z")
TIMES = st.integers(0, 20) | st.integers(0, 2**63 - 1)

REQUESTS = st.builds(RequestId, st.sampled_from("st"), st.integers(1, 9))
FILTERS = st.builds(
    ScheduleFilter,
    prefix=st.sampled_from(["", *STEMS]),
    target=st.none() | st.sampled_from(TARGETS),
    due_from=st.none() | TIMES,
    due_before=st.none() | TIMES,
)
ADDS = st.builds(
    AddSchedule,
    request=REQUESTS,
    key=st.sampled_from(KEYS),
    target=st.sampled_from(TARGETS),
    routing_key=st.sampled_from(["", "r"]),
    nominal=TIMES,
    due=TIMES,
    recurrence=st.none() | st.just({"interval": 5000, "catch_up": "last"}),
    if_absent=st.booleans(),
    message=st.builds(ScheduledMessage, st.binary(min_size=2, max_size=4), st.binary(max_size=9)),
)


@st.composite
def changes(draw: st.DrawFn) -> ChangeSchedule:
    action, chosen = draw(st.sampled_from(ACTIONS)), draw(st.none() | FILTERS)
    return ChangeSchedule(
        request=draw(REQUESTS),
        action=action,
        key=draw(st.sampled_from(KEYS)) if chosen is None else None,
        filter=chosen,
        due=draw(TIMES) if action == "move" else None,
        at=draw(TIMES) if action == "resume" else None,
    )


GRIDS = st.builds(
    TimeGrid, start=st.integers(0, 20) | st.integers(0, 2**62), width=st.integers(1, 9), number=st.integers(1, 5)
)
STEPS = st.lists(ADDS | changes() | st.sampled_from(["claim", "done", "tick"]), max_size=40)


def by_gate(step: str, state: ScheduleMemory, following: int | None) -> ScheduleRecord:
    """A record of a gate that takes effect in this state."""
    match step:
        case "claim":
            items = [
                ClaimedOccurrence(
                    key=one.key,
                    version=one.version,
                    nominal=one.nominal,
                    due=one.due,
                    next_nominal=following,
                    next_due=following,
                )
                for one in state.select(ScheduleFilter())[::2]
            ]
            return Claim(gate="g", items=tuple(items))
        case "done":
            going = [one for key in KEYS for one in state.under_way_of(key)][::2]
            return Done(
                gate="g",
                items=tuple(EndedOccurrence(occurrence=one.occurrence, outcome="delivered") for one in going),
            )
        case _:
            return Tick(number=state.position.tick + 1)


def database() -> SqliteState:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(SCHEMA)
    return SqliteState(connection)


def check_counts(memory: ScheduleMemory, stored: SqliteState, wanted: ScheduleFilter, grid: TimeGrid) -> None:
    """Compare the numbers of the schedules that match with those of the state in memory."""
    found = memory.select(wanted)
    cells: dict[tuple[str, int], list[int]] = {}
    for one in found:
        place = min(max((one.due - grid.start) // grid.width, -1), grid.number)
        cells.setdefault((one.target, place), []).append(one.due)
    expected = [
        TimelineCount(target=target, interval=interval, count=len(dues), first=min(dues), last=max(dues))
        for (target, interval), dues in cells.items()
    ]
    counted = list(stored.timeline(wanted, grid))
    assert sorted(counted, key=lambda one: (one.target, one.interval)) == sorted(
        expected, key=lambda one: (one.target, one.interval)
    )
    dues = [one.due for one in found]
    span = [(one.count, one.first, one.last) for one in stored.span(wanted)]
    assert span == ([(len(dues), min(dues), max(dues))] if dues else [])
    assert stored.number(wanted) == len(found)
    assert stored.number(wanted, is_paused=True) == sum(one.is_paused for one in found)
    assert stored.waiting_count == len(memory.select(ScheduleFilter()))


@examples(0.6)
@given(STEPS, st.data())
def test_the_same_records_give_the_same_state(steps: list[Any], data: st.DataObject) -> None:
    memory, stored = ScheduleMemory(), database()
    fold, other = ScheduleFold(memory, PARTITION), ScheduleFold(stored, PARTITION)
    for offset, step in enumerate(steps):
        is_gates = isinstance(step, str)
        record = by_gate(step, memory, data.draw(st.none() | TIMES)) if is_gates else step
        if data.draw(st.booleans()):
            stored.look_ahead(data.draw(st.lists(st.sampled_from(KEYS))))
        expected = fold.apply(offset, record, by_gate=is_gates)
        assert other.apply(offset, record, by_gate=is_gates) == expected
        if data.draw(st.integers(0, 9)) == 0:
            stored.flush()
    stored.flush()
    assert list(stored.entries()) == list(memory.entries())
    stored.reload()
    assert stored.position == memory.position


@examples(0.6)
@given(STEPS, st.integers(0, 40), FILTERS, GRIDS, st.data())
def test_changes_since_the_first_count_are_counted(
    steps: list[Any], first: int, wanted: ScheduleFilter, grid: TimeGrid, data: st.DataObject
) -> None:
    memory, stored = ScheduleMemory(), database()
    fold, other = ScheduleFold(memory, PARTITION), ScheduleFold(stored, PARTITION)
    for offset, step in enumerate(steps):
        if offset >= first:
            assert stored.waiting_count == len(memory.select(ScheduleFilter()))
        is_gates = isinstance(step, str)
        record = by_gate(step, memory, data.draw(st.none() | TIMES)) if is_gates else step
        if data.draw(st.booleans()):
            stored.look_ahead(data.draw(st.lists(st.sampled_from(KEYS))))
        for one in (fold, other):
            one.apply(offset, record, by_gate=is_gates)
    check_counts(memory, stored, wanted, grid)


@examples(0.6)
@given(st.lists(ADDS, max_size=20), FILTERS, st.integers(1, 4), TIMES)
def test_filters_pages_and_due_times_agree(
    adds: list[AddSchedule], wanted: ScheduleFilter, size: int, now: int
) -> None:
    memory, stored = ScheduleMemory(), database()
    for state in (memory, stored):
        fold = ScheduleFold(state, PARTITION)
        for offset, record in enumerate(adds):
            fold.apply(offset, record, by_gate=False)
    expected = memory.select(wanted)
    assert list(stored.select(wanted)) == expected
    pages, last = list[Any](), None
    while page := list(stored.page(wanted, after=last, limit=size)):
        pages += page
        last = page[-1].key
    assert pages == expected
    recurring = [one.key for one in expected if one.recurrence is not None]
    assert [one.key for one in stored.page(wanted, limit=99, is_recurring=True)] == recurring
    due = sorted(one.due for one in memory.select(ScheduleFilter()) if one.due <= now)
    assert [one.due for one in stored.due(now, limit=size)] == due[:size]
    assert stored.next_due() == min((one.due for one in memory.select(ScheduleFilter())), default=None)


def test_keys_of_any_number_are_looked_up() -> None:
    """SQLite before 3.32 takes 999 values in a query."""
    stored = database()
    message = ScheduledMessage(b"\0\0", b"")
    for key in ("0", "1999"):
        entry = WaitingSchedule(
            key=key,
            id="s-1",
            version="s-1",
            target="q:x",
            routing_key="",
            nominal=1,
            due=1,
            recurrence=None,
            message=message,
        )
        stored.put(entry)
    stored.look_ahead([str(one) for one in range(2000)])
    seen = list[str]()
    stored._sql.set_trace_callback(seen.append)
    assert stored.waiting("1000") is None
    assert not seen
    assert [stored.waiting(key) is not None for key in ("0", "1999")] == [True, True]


def with_paused(adds: list[AddSchedule], paused: set[str]) -> tuple[ScheduleMemory, SqliteState]:
    """States with schedules, of which those of some keys are paused."""
    memory, stored = ScheduleMemory(), database()
    records: list[ScheduleRecord] = [*adds]
    records += (
        ChangeSchedule(request=RequestId("pausing", number), action="pause", key=key)
        for number, key in enumerate(sorted(paused), 1)
    )
    for state in (memory, stored):
        fold = ScheduleFold(state, PARTITION)
        for offset, record in enumerate(records):
            fold.apply(offset, record, by_gate=False)
    return memory, stored


@examples(0.6)
@given(st.lists(ADDS, max_size=20), st.sets(st.sampled_from(KEYS)), FILTERS, GRIDS)
def test_each_schedule_that_matches_is_counted_in_its_interval(
    adds: list[AddSchedule], paused: set[str], wanted: ScheduleFilter, grid: TimeGrid
) -> None:
    memory, stored = with_paused(adds, paused)
    check_counts(memory, stored, wanted, grid)


def test_what_is_paused_is_not_due() -> None:
    stored = database()
    fold = ScheduleFold(stored, PARTITION)
    message = ScheduledMessage(b"\0\0", b"")
    add = AddSchedule(request=RequestId("s", 1), key=KEYS[0], target="q:x", nominal=5, due=5, message=message)
    fold.apply(0, add, by_gate=False)
    fold.apply(1, ChangeSchedule(request=RequestId("s", 2), action="pause", key=KEYS[0]), by_gate=False)
    assert (stored.due(9, limit=9), stored.next_due()) == ([], None)


def test_a_filter_is_answered_from_the_index_by_key() -> None:
    """A page of 100 among a million may not sort, nor read messages that it does not return."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    seen = list[str]()
    connection.set_trace_callback(seen.append)
    list(SqliteState(connection).page(ScheduleFilter(prefix="a", target="q:x", due_before=5), limit=100))
    connection.set_trace_callback(None)
    plan = " ".join(row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + seen[-1]))
    assert plan == "SEARCH waiting USING INDEX waiting_by_key (key>? AND key<?)"


def test_schedules_are_counted_without_reading_them_again() -> None:
    """A count of a million schedules by target would hold up the claims of its partition."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    stored, wanted = SqliteState(connection), ScheduleFilter(target="q:x", due_from=1, due_before=9)
    assert stored.waiting_count == 0
    message = ScheduledMessage(b"\0\0", b"")
    for number, key in enumerate(KEYS, 1):
        add = AddSchedule(request=RequestId("s", number), key=key, target="q:x", nominal=5, due=number, message=message)
        ScheduleFold(stored, PARTITION).apply(number, add, by_gate=False)
    seen = list[str]()
    connection.set_trace_callback(seen.append)
    assert stored.waiting_count == len(KEYS)
    assert stored.number(wanted) == 8
    assert [(one.first, one.last) for one in stored.span(wanted)] == [(1, 8)]
    found = [
        (one.interval, one.count) for one in stored.timeline(ScheduleFilter(), TimeGrid(start=2, width=3, number=2))
    ]
    assert found == [(-1, 1), (0, 3), (1, 3), (2, 3)]
    assert not seen


def test_messages_are_not_read_for_claims_and_lists_without_bodies_and_in_parts_for_filters() -> None:
    """A gate may hold more than fits into memory."""
    stored, count, size = database(), 40, 1_000_000
    fold = ScheduleFold(stored, PARTITION)
    keys = [key for key in (f"k{number:04}" for number in range(1000)) if partition_of(key) == PARTITION][:count]
    for number, key in enumerate(keys):
        message = ScheduledMessage(b"\0\0", bytes(size))
        request = RequestId("s", number + 1)
        add = AddSchedule(request=request, key=key, target="q:x", nominal=5, due=5, message=message)
        fold.apply(number, add, by_gate=False)
    tracemalloc.start()
    try:
        assert len(stored.due(9, limit=1000)) == count
        assert len(list(stored.page(ScheduleFilter(), limit=1000, with_messages=False))) == count
        move = ChangeSchedule(request=RequestId("s", 1000), action="move", filter=ScheduleFilter(), due=7)
        answer = fold.apply(count, move, by_gate=False).answer
        assert tracemalloc.get_traced_memory()[1] < count * size // 4
    finally:
        tracemalloc.stop()
    assert answer is not None
    assert (answer.count, list(answer.keys)) == (count, keys)
    moved = list(stored.select(ScheduleFilter()))
    assert {(one.due, len(one.message.body)) for one in moved} == {(7, size)}
