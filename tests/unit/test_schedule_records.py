"""Encoding and decoding of the records of the schedule log."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import InvalidNameError, NewerRecordError, ScheduleRecordError
from bide.schedules.encoding import VERSION, chunk_without_entries, decode, encode
from bide.schedules.entries import (
    ANSWER_OUTCOMES,
    OUTCOMES,
    FinishedKey,
    RememberedAnswer,
    ScheduleAnswer,
    ScheduleSession,
    StateEntry,
    UnderWay,
    WaitingSchedule,
)
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, ScheduleNames, check_key, partition_of
from bide.schedules.records import (
    ACTIONS,
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
from bide.schedules.requests import AppliedNumbers, RequestId
from bide.topology.validation import problems

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TIMES = st.integers(0, 2**45)
REQUESTS = st.builds(RequestId, st.from_regex(r"[0-9a-f]{1,20}", fullmatch=True), st.integers(1, 2**40))
MESSAGES = st.builds(ScheduledMessage, st.binary(min_size=2, max_size=30), st.binary(max_size=60))
RECURRENCES = st.none() | st.fixed_dictionaries({"cron": TEXTS, "jitter": st.integers(-5, 5)})
ADDS = st.builds(
    AddSchedule,
    request=REQUESTS,
    key=st.text(st.characters(codec="utf-8", min_codepoint=32), min_size=1, max_size=20),
    target=TEXTS,
    routing_key=TEXTS | st.just(""),
    nominal=TIMES,
    due=TIMES,
    recurrence=RECURRENCES,
    if_absent=st.booleans(),
    if_version=st.none() | TEXTS,
    message=MESSAGES,
)
FILTERS = st.builds(
    ScheduleFilter,
    prefix=TEXTS | st.just(""),
    target=st.none() | TEXTS,
    due_from=st.none() | TIMES,
    due_before=st.none() | TIMES,
)


@st.composite
def changes(draw: st.DrawFn) -> ChangeSchedule:
    action, chosen = draw(st.sampled_from(ACTIONS)), draw(st.none() | FILTERS)
    return ChangeSchedule(
        request=draw(REQUESTS),
        action=action,
        key=draw(TEXTS) if chosen is None else None,
        filter=chosen,
        due=draw(TIMES) if action == "move" else None,
        at=draw(TIMES) if action == "resume" else None,
        if_version=draw(st.none() | TEXTS) if chosen is None else None,
    )


@st.composite
def claimed(draw: st.DrawFn) -> ClaimedOccurrence:
    following = draw(st.none() | st.tuples(TIMES, TIMES))
    return ClaimedOccurrence(
        key=draw(TEXTS),
        version=draw(TEXTS),
        nominal=draw(TIMES),
        due=draw(TIMES),
        skip=draw(st.booleans()),
        next_nominal=following and following[0],
        next_due=following and following[1],
    )


@st.composite
def numbers(draw: st.DrawFn) -> AppliedNumbers:
    found = AppliedNumbers()
    for one in draw(st.lists(st.integers(1, 30))):
        found = found.including(one)
    return found


ENTRIES: st.SearchStrategy[StateEntry] = st.one_of(
    st.builds(
        WaitingSchedule,
        key=TEXTS,
        id=TEXTS,
        version=TEXTS,
        target=TEXTS,
        routing_key=TEXTS | st.just(""),
        nominal=TIMES,
        due=TIMES,
        recurrence=RECURRENCES,
        is_paused=st.booleans(),
        resumed_at=st.none() | TIMES,
        message=MESSAGES,
    ),
    st.builds(
        UnderWay,
        occurrence=TEXTS,
        key=TEXTS,
        id=TEXTS,
        target=TEXTS,
        routing_key=TEXTS | st.just(""),
        nominal=TIMES,
        due=TIMES,
        is_recurring=st.booleans(),
        is_run_now=st.booleans(),
        message=MESSAGES,
    ),
    st.builds(FinishedKey, key=TEXTS, version=TEXTS, tick=TIMES),
    st.builds(ScheduleSession, session=TEXTS, applied=numbers(), tick=TIMES),
    st.builds(
        RememberedAnswer,
        request=TEXTS,
        tick=TIMES,
        answer=st.builds(
            ScheduleAnswer,
            outcome=st.sampled_from(ANSWER_OUTCOMES),
            version=st.none() | TEXTS,
            under_way=st.lists(TEXTS, max_size=3).map(tuple),
            count=st.integers(0, 10**9),
            keys=st.lists(TEXTS, max_size=3).map(tuple),
        ),
    ),
)
CHUNKS = st.builds(
    SnapshotChunk,
    cycle=TEXTS,
    as_of=st.integers(-1, 2**40),
    count=TIMES,
    tick=TIMES,
    number=TIMES,
    is_last=st.booleans(),
    entries=st.lists(ENTRIES, max_size=4).map(tuple),
)
RECORDS: st.SearchStrategy[ScheduleRecord] = st.one_of(
    ADDS,
    changes(),
    st.builds(Claim, gate=TEXTS, items=st.lists(claimed(), max_size=3).map(tuple)),
    st.builds(
        Done,
        gate=TEXTS,
        items=st.lists(st.builds(EndedOccurrence, occurrence=TEXTS, outcome=st.sampled_from(OUTCOMES))).map(tuple),
    ),
    st.builds(Tick, number=st.integers(1, 2**40)),
    st.builds(
        Beat,
        gate=TEXTS,
        leads=st.booleans(),
        clock=TIMES,
        after=st.integers(-1, 2**40),
        count=TIMES,
        snapshot=st.none() | TIMES,
    ),
    CHUNKS,
)

CANCEL = {"v": 1, "kind": "cancel", "request": "a-1", "key": "k"}


@given(RECORDS)
def test_what_is_written_is_read(record: ScheduleRecord) -> None:
    assert decode(encode(record)) == record


@given(RECORDS)
def test_a_chunk_is_recognized_without_its_entries(record: ScheduleRecord) -> None:
    found = chunk_without_entries(encode(record))
    if isinstance(record, SnapshotChunk) and not {'"', "\\"} & set(record.cycle) and min(map(ord, record.cycle)) >= 32:
        assert found == replace(record, entries=())
    else:
        assert found is None


def test_a_chunk_whose_name_cannot_be_read_is_not_recognized() -> None:
    body = encode(SnapshotChunk(cycle="c", as_of=0, count=1, tick=0, number=0, is_last=True, entries=()))
    assert chunk_without_entries(body) is not None
    assert chunk_without_entries(body.replace(b'"c"', b'"\xff"')) is None


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: b'{"v":1,"kind":"schedule",' + rest))
def test_other_bytes_are_refused_with_our_error(body: bytes) -> None:
    with pytest.raises(ScheduleRecordError):
        decode(body)


@given(RECORDS, st.data())
def test_a_damaged_record_is_refused_with_our_error_or_read(record: ScheduleRecord, data: st.DataObject) -> None:
    body = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(body))
    except ScheduleRecordError:
        return
    # It may become part of a snapshot.
    assert decode(encode(found)) == found


def line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize(
    "changed",
    [
        {"key": None},
        {"key": 5},
        {"key": "x" * 256},
        {"key": "\ud800"},
        {"key": ""},
        {"more": 1},
        {"request": "no number"},
        {"request": "a-0"},
        {"request": "a-1\n"},
        {"request": "a-01"},
        {"kind": "none"},
        {"filter": {}},
        {"due": 5},
        {"at": 5},
        {"if_version": 5},
        {"kind": "move"},
        {"kind": "move", "due": -1},
        {"kind": "move", "due": True},
        {"kind": "move", "due": 2**63},
        {"kind": "move", "due": 1.5},
        {"kind": "resume"},
        {"filter": [], "key": None},
    ],
)
def test_a_field_that_is_wrong_is_refused(changed: dict[str, Any]) -> None:
    assert isinstance(decode(line(CANCEL)), ChangeSchedule)
    with pytest.raises(ScheduleRecordError):
        decode(line({**CANCEL, **changed}))


@pytest.mark.parametrize(
    "body", [b'{"v":1' + b"[" * 100_000 + b"\n", b'{"v":' + b"1" * 5000 + b"}\n", b'{"v":1}', b'{"v":0}\n']
)
def test_a_hostile_body_is_refused(body: bytes) -> None:
    with pytest.raises(ScheduleRecordError):
        decode(body)


@pytest.mark.parametrize(
    "every",
    ['{"a":NaN}', '{"a":1e999}', '{"a":1.5}', r'{"a":"\ud800"}', r'{"\ud800":1}', '{"a":{}}', '{"a":true}', "[]"],
)
def test_a_recurrence_that_could_not_be_written_again_is_refused(every: str) -> None:
    head = '{"v":1,"kind":"schedule","request":"a-1","key":"k","to":"q:x","nominal":1,"due":1,"message":[2,0],"every":'
    with pytest.raises(ScheduleRecordError):
        decode(f"{head}{every}}}\n\0\0".encode())
    decode(f'{head}{{"a":1}}}}\n\0\0'.encode())


@pytest.mark.parametrize("key", ["a\0", "a\nb", "\x1f"])
def test_a_key_with_a_control_character_is_refused(key: str) -> None:
    """It is six times as long in JSON, and an answer lists 20,000 keys."""
    record = AddSchedule(
        request=RequestId("a", 1), key=key, target="q:x", nominal=1, due=1, message=ScheduledMessage(b"\0\0", b"")
    )
    with pytest.raises(ScheduleRecordError, match="control"):
        decode(encode(record))
    with pytest.raises(InvalidNameError):
        check_key(key)


def test_bytes_too_few_or_too_many_are_refused() -> None:
    record = AddSchedule(
        request=RequestId("a", 1), key="k", target="q:x", nominal=1, due=1, message=ScheduledMessage(b"\0\0", b"body")
    )
    for body in (encode(record) + b"x", encode(record)[:-1]):
        with pytest.raises(ScheduleRecordError, match="bytes too"):
            decode(body)


def test_a_record_of_a_later_release_is_an_error_of_its_own() -> None:
    with pytest.raises(NewerRecordError, match="upgrade the gates"):
        decode(line({**CANCEL, "v": VERSION + 1}))


def test_a_message_keeps_its_properties() -> None:
    values = {
        "headers": {"list": [1, {"a": b"\xff"}], "none": None},
        "priority": 3,
        "message_id": "m",
        "expiration": "5",
    }
    message = ScheduledMessage.of(values, b"body")
    assert message.values == values
    with pytest.raises(ScheduleRecordError):
        _ = ScheduledMessage(b"\xff\xff", b"").values


@given(st.lists(st.integers(1, 60)))
def test_applied_numbers_are_a_set(given_numbers: list[int]) -> None:
    found = AppliedNumbers()
    for one in given_numbers:
        found = found.including(one)
    assert [one for one in range(62) if one in found] == sorted(set(given_numbers))
    assert len(found.starts) == len([one for one in set(given_numbers) if one - 1 not in given_numbers])


def test_keys_spread_over_the_partitions() -> None:
    counts = [0] * PARTITIONS
    for number in range(8000):
        counts[partition_of(f"invoice:{number}")] += 1
    assert min(counts) > 800


def test_a_key_that_does_not_fit_is_refused() -> None:
    assert check_key("k" * 255) == "k" * 255
    for key in ("", "k" * 256, "\ud800", None):
        with pytest.raises(InvalidNameError):
            check_key(key)


def test_the_topology_has_one_log_for_each_partition() -> None:
    names = ScheduleNames()
    topology = names.topology()
    assert problems(topology, release=(3, 10)) == []
    assert [names.log(0), names.log(7)] == ["bide.v1.schedule.0", "bide.v1.schedule.7"]
    assert len([one for one in topology.queues if one.type == "stream"]) == PARTITIONS
