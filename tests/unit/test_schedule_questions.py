"""Answers to operations, and questions to gates: their encoding, and what fits on a page."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.errors import ScheduleRecordError
from bide.schedules.answers import decode_answer, encode_answer
from bide.schedules.entries import ANSWER_OUTCOMES, ScheduleAnswer, UnderWay, WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.questions import (
    MAX_PAGE,
    NO_MESSAGE,
    PAGE_BYTES,
    CountQuestion,
    KeyQuestion,
    PageQuestion,
    QuestionAnswer,
    ScheduleQuestion,
    TimelineQuestion,
    answer_for_key,
    answer_for_page,
    decode_question,
    decode_question_answer,
    encode_question,
    encode_question_answer,
)
from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import MAX_INTERVALS, TimeGrid, TimelineCount

TEXTS = st.text(st.characters(codec="utf-8", min_codepoint=32), min_size=1, max_size=20)
TIMES = st.integers(0, 2**45)
FILTERS = st.builds(
    ScheduleFilter,
    prefix=TEXTS | st.just(""),
    target=st.none() | TEXTS,
    due_from=st.none() | TIMES,
    due_before=st.none() | TIMES,
)
ANSWERS = st.builds(
    ScheduleAnswer,
    outcome=st.sampled_from(ANSWER_OUTCOMES),
    version=st.none() | TEXTS,
    under_way=st.lists(TEXTS, max_size=3).map(tuple),
    count=st.integers(0, 10**9),
    keys=st.lists(TEXTS, max_size=3).map(tuple),
)
QUESTIONS: st.SearchStrategy[ScheduleQuestion] = st.one_of(
    st.builds(KeyQuestion, key=TEXTS),
    st.builds(
        PageQuestion,
        filter=FILTERS,
        after=st.none() | TEXTS,
        limit=st.integers(1, MAX_PAGE),
        with_messages=st.booleans(),
        is_recurring=st.booleans(),
    ),
    st.builds(CountQuestion, filter=FILTERS, is_paused=st.booleans()),
    st.builds(
        TimelineQuestion,
        filter=FILTERS,
        grid=st.none()
        | st.builds(TimeGrid, start=TIMES, width=st.integers(1, 10**9), number=st.integers(1, MAX_INTERVALS)),
    ),
)


TIMELINE_COUNTS = st.builds(
    TimelineCount, target=TEXTS, interval=st.integers(-1, MAX_INTERVALS), count=TIMES, first=TIMES, last=TIMES
)


def schedule(key: str = "k", body: bytes = b"") -> WaitingSchedule:
    return WaitingSchedule(
        key=key,
        id="a-1",
        version="a-2",
        target="q:x",
        routing_key="",
        nominal=1,
        due=2,
        recurrence=None,
        message=ScheduledMessage.of({"message_id": "m"}, body),
    )


def occurrence(number: int, body: bytes = b"") -> UnderWay:
    return UnderWay(
        occurrence=f"a-1@{number}",
        key="k",
        id="a-1",
        target="q:x",
        routing_key="",
        nominal=number,
        due=number,
        is_recurring=True,
        message=ScheduledMessage.of({"message_id": "m"}, body),
    )


@given(ANSWERS)
def test_an_answer_is_read_as_it_was_written(answer: ScheduleAnswer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


@given(QUESTIONS)
def test_a_question_is_read_as_it_was_written(question: ScheduleQuestion) -> None:
    assert decode_question(encode_question(question)) == question


@given(
    st.lists(st.builds(schedule, TEXTS, st.binary(max_size=50)), max_size=3),
    st.lists(st.builds(occurrence, st.integers(0, 2**40), st.binary(max_size=50)), max_size=3),
    st.none() | st.integers(0, 2**40),
    st.none() | TEXTS,
    st.lists(TIMELINE_COUNTS, max_size=3),
)
def test_the_answer_to_a_question_is_read_as_it_was_written(
    waiting: list[WaitingSchedule],
    under_way: list[UnderWay],
    count: int | None,
    after: str | None,
    timeline: list[TimelineCount],
) -> None:
    answer = QuestionAnswer(
        waiting=tuple(waiting), under_way=tuple(under_way), count=count, after=after, timeline=tuple(timeline)
    )
    assert decode_question_answer(encode_question_answer(answer)) == answer


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: b'{"v":1,"ask":"page",' + rest))
def test_other_bytes_are_refused_with_our_error(body: bytes) -> None:
    for decode in (decode_answer, decode_question, decode_question_answer):
        with pytest.raises(ScheduleRecordError):
            decode(body)


def line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize(
    "changed",
    [
        {"v": 2},
        {"v": "1"},
        {"outcome": "none"},
        {"outcome": None},
        {"under_way": "x"},
        {"under_way": [1]},
        {"count": -1},
        {"keys": [""]},
        {"more": 1},
    ],
)
def test_a_wrong_field_of_an_answer_is_refused(changed: dict[str, Any]) -> None:
    answer = {"v": 1, "outcome": "cancelled"}
    decode_answer(line(answer))
    with pytest.raises(ScheduleRecordError):
        decode_answer(line({**answer, **changed}))


@pytest.mark.parametrize(
    "changed",
    [
        {"v": 2},
        {"ask": "none"},
        {"ask": "key"},
        {"ask": "count"},
        {"limit": 0},
        {"limit": MAX_PAGE + 1},
        {"limit": True},
        {"filter": None},
        {"filter": {"more": 1}},
        {"after": 5},
        {"with_messages": 1},
        {"key": "k"},
    ],
)
def test_a_wrong_field_of_a_question_is_refused(changed: dict[str, Any]) -> None:
    question = {"v": 1, "ask": "page", "filter": {}, "limit": 5}
    decode_question(line(question))
    with pytest.raises(ScheduleRecordError):
        decode_question(line({**question, **changed}))


def test_bytes_too_few_or_too_many_are_refused() -> None:
    answer = encode_question_answer(QuestionAnswer(waiting=(schedule(body=b"body"),)))
    for body in (answer[:-1], answer + b"x"):
        with pytest.raises(ScheduleRecordError, match="bytes too"):
            decode_question_answer(body)
    with pytest.raises(ScheduleRecordError, match="bytes too"):
        decode_question(encode_question(KeyQuestion(key="k")) + b"x")
    with pytest.raises(ScheduleRecordError, match="bytes too"):
        decode_answer(encode_answer(ScheduleAnswer(outcome="scheduled")) + b"x")


def test_only_schedules_and_occurrences_are_entries_of_an_answer() -> None:
    with pytest.raises(ScheduleRecordError, match="entries"):
        decode_question_answer(line({"v": 1, "entries": [{"is": "finished", "key": "k", "version": "a-1", "tick": 1}]}))


def test_a_page_ends_at_its_limit_and_names_the_last_key() -> None:
    found = [schedule(f"k{number}", b"body") for number in range(4)]
    question = PageQuestion(filter=ScheduleFilter(), limit=3)
    page = answer_for_page(question, found)
    assert [one.key for one in page.waiting] == ["k0", "k1", "k2"]
    assert page.after == "k2"
    assert {one.message for one in page.waiting} == {NO_MESSAGE}
    assert answer_for_page(question, found[:3]).after is None


def test_a_page_ends_where_its_messages_would_exceed_the_limit() -> None:
    question = PageQuestion(filter=ScheduleFilter(), limit=10, with_messages=True)
    found = [schedule("k0", bytes(PAGE_BYTES + 1)), schedule("k1", bytes(PAGE_BYTES // 2)), schedule("k2", b"body")]
    page = answer_for_page(question, found)
    assert (page.waiting, page.after) == ((found[0],), "k0")
    page = answer_for_page(replace(question, after="k0"), found[1:])
    assert (page.waiting, page.after) == (tuple(found[1:]), None)


def test_the_answer_for_a_key_keeps_the_first_message_and_those_that_fit() -> None:
    waiting, under_way = schedule(body=bytes(PAGE_BYTES)), [occurrence(1, b"body")]
    answer = answer_for_key(waiting, under_way)
    assert answer.waiting == (waiting,)
    assert answer.under_way == (replace(under_way[0], message=NO_MESSAGE),)
    assert answer_for_key(None, under_way) == QuestionAnswer(under_way=tuple(under_way))
