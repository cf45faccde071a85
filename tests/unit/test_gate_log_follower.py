"""A gate notices records that retention has removed before it read them."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import NewerRecordError
from bide.gate.log_follower import LogFollower
from bide.schedules.encoding import encode
from bide.schedules.fold import ScheduleFold
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import RECORD_OVERHEAD, ScheduleNames, partition_of
from bide.schedules.records import AddSchedule, Beat, ScheduleFilter, SnapshotChunk, Tick
from bide.schedules.requests import RequestId
from bide.schedules.state import LogPosition, ScheduleMemory

NAMES = ScheduleNames()
KEY = "invoice:42"
PARTITION = partition_of(KEY)
MESSAGE = ScheduledMessage(b"\0\0", b"")
ADD = AddSchedule(request=RequestId("a", 1), key=KEY, target="q:x", nominal=1, due=1, message=MESSAGE)


def beat(after: int, count: int) -> bytes:
    return encode(Beat(gate="g", clock=0, after=after, count=count))


def chunk(number: int, *, is_last: bool, count: int = 2, cycle: str = "c") -> bytes:
    return encode(SnapshotChunk(cycle=cycle, as_of=1, count=count, tick=0, number=number, is_last=is_last, entries=()))


def follower(state: ScheduleMemory | None = None) -> LogFollower:
    return LogFollower(ScheduleFold(state or ScheduleMemory(), PARTITION), NAMES)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.data())
def test_a_count_agrees_for_what_was_read_and_for_nothing_else(steps: list[int], data: st.DataObject) -> None:
    """Offsets have gaps. A reader that was overtaken has counted less than others."""
    offsets = [sum(steps[:end]) - 1 for end in range(1, len(steps) + 1)]
    overtaken_at = data.draw(st.integers(0, len(offsets)))
    missed = data.draw(st.integers(0, len(offsets) - overtaken_at))
    read = offsets[:overtaken_at] + offsets[overtaken_at + missed :]
    reader = follower()
    for offset in read:
        reader.read(offset, NAMES.gates, b"")
    for place, offset in enumerate(offsets[: offsets.index(read[-1]) + 1] if read else []):
        reader.has_missed = False
        reader.read(10_000, NAMES.gates, beat(offset, place + 1))
        assert reader.has_missed == (missed > 0 and place >= overtaken_at)


def test_an_offset_that_was_not_read_does_not_agree() -> None:
    reader = follower()
    for offset in (0, 1, 5):
        reader.read(offset, NAMES.gates, b"")
    reader.read(6, NAMES.gates, beat(3, 3))
    assert reader.has_missed


def test_a_beat_from_before_the_index_says_nothing() -> None:
    reader = follower(ScheduleMemory(position=LogPosition(offset=50, count=40)))
    reader.read(51, NAMES.gates, beat(49, 7))
    assert not reader.has_missed
    reader.read(52, NAMES.gates, beat(51, 41))
    assert not reader.has_missed
    reader.read(53, NAMES.gates, beat(51, 42))
    assert reader.has_missed


def test_only_records_by_their_own_exchange_are_applied() -> None:
    state = ScheduleMemory()
    reader = follower(state)
    reader.read(0, "other", encode(ADD))
    reader.read(1, NAMES.gates, encode(ADD))
    reader.read(2, NAMES.operations, encode(Tick(number=1)))
    reader.read(3, NAMES.operations, beat(77, 77))
    assert not reader.has_missed
    assert (state.select(ScheduleFilter()), state.position.tick) == ([], 0)
    body = encode(ADD)
    answer = reader.read(4, NAMES.operations, body).result.answer
    assert answer is not None
    assert answer.outcome == "scheduled"
    assert state.position == LogPosition(offset=4, count=5, checksum=zlib.crc32(body), size=state.position.size)


def test_a_snapshot_carries_what_was_read_before_it() -> None:
    state = ScheduleMemory()
    reader = follower(state)
    for offset in range(9):
        reader.read(offset, NAMES.operations, bytes(1_000_000))
    assert (state.position.size, state.position.carried_size) == (9 * (1_000_000 + RECORD_OVERHEAD), 0)
    reader.read(9, NAMES.gates, chunk(0, is_last=True, count=2))
    assert state.position.carried_size == 2 * (1_000_000 + RECORD_OVERHEAD)
    # Of another gate, and from before this gate began to read: how much it carries is not known.
    later = follower(state)
    later.read(10, NAMES.gates, chunk(0, is_last=True, count=4, cycle="other"))
    assert (state.position.carried, state.position.carried_size) == (4, 2 * (1_000_000 + RECORD_OVERHEAD))


def test_a_snapshot_is_complete_with_all_its_chunks() -> None:
    state = ScheduleMemory()
    reader = follower(state)
    reader.read(0, NAMES.operations, b"")
    reader.read(1, NAMES.operations, b"")
    bodies = [chunk(0, is_last=False), chunk(0, is_last=False), chunk(2, is_last=True), chunk(1, is_last=False)]
    assert [reader.read(2 + place, NAMES.gates, body).completed for place, body in enumerate(bodies)] == [None] * 4
    assert reader.read(6, NAMES.gates, chunk(2, is_last=True)).completed == "c"
    assert (state.position.snapshot, state.position.carried) == (2, 2)
    reader.read(7, NAMES.gates, chunk(0, is_last=True, count=1, cycle="older"))
    assert (state.position.snapshot, state.position.carried) == (2, 2)
    assert reader.read(8, NAMES.operations, chunk(0, is_last=True, cycle="d")).completed is None


@pytest.mark.parametrize("exchange", [NAMES.operations, NAMES.gates])
def test_a_record_of_a_later_release_is_not_counted(exchange: str) -> None:
    state = ScheduleMemory()
    newer = encode(ADD).replace(b'{"v":1', b'{"v":2')
    with pytest.raises(NewerRecordError):
        follower(state).read(0, exchange, newer)
    assert state.position == replace(LogPosition(), offset=-1)
    follower(state).read(0, "other", newer)
    assert state.position.count == 1
