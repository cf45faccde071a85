"""Questions about schedules to the leading gate of a partition, and the answers.

A client publishes a question to the exchange for operations with the routing key ``queries.<partition>``, with
``reply_to`` and ``correlation_id``. The gate publishes the answer to ``reply_to`` with the same correlation id::

    {"v":1,"ask":"page","filter":{"prefix":"invoice:"},"after":"invoice:42","limit":100}\\n
    {"v":1,"entries":[{"is":"waiting","key":"invoice:43",...,"message":[31,512]}]}\\n<31 bytes><512 bytes>

A gate ignores a question that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from bide.schedules.answers import check_version
from bide.schedules.encoding import filter_fields, read_filter, read_key
from bide.schedules.entries import UnderWay, WaitingSchedule
from bide.schedules.entry_fields import EntryReader, EntryWriter
from bide.schedules.fields import RecordFields, read_head, write_head
from bide.schedules.message import ScheduledMessage
from bide.schedules.records import ScheduleFilter
from bide.schedules.timeline import TimeGrid, TimelineCount, read_counts, read_grid

VERSION: Final = 1

MAX_PAGE: Final = 1_000
"""Schedules on a page."""

PAGE_BYTES: Final = 4_000_000
"""Bytes of messages in an answer. A first message may be larger. Two messages of the largest size would
exceed the limit of the broker."""

NO_MESSAGE: Final = ScheduledMessage(bytes(2), b"")
"""Stands for a message that was left out: no properties and no body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuestion:
    """What waits under a key, and which of its occurrences are under way?"""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuestion:
    """Which schedules that wait match a filter? The answer is in the order of keys.

    Attributes:
        after: the last key of the page before; None for the first page.
        limit: the number of schedules, 1 to :data:`MAX_PAGE`. A page may have fewer.
        with_messages: whether the answer contains the messages.
        is_recurring: whether only recurring schedules match.
    """

    filter: ScheduleFilter
    after: str | None = None
    limit: int
    with_messages: bool = False
    is_recurring: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CountQuestion:
    """How many schedules that wait match a filter?

    Attributes:
        is_paused: count paused schedules only. Gates of earlier releases do not answer such a question.
    """

    filter: ScheduleFilter
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineQuestion:
    """How many schedules that wait match a filter, by target and time?

    Attributes:
        grid: the intervals of time; None for a single number of all targets and times.
    """

    filter: ScheduleFilter
    grid: TimeGrid | None


ScheduleQuestion = KeyQuestion | PageQuestion | CountQuestion | TimelineQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswer:
    """The answer to a question.

    Attributes:
        waiting: schedules in the order of keys; one or none for a key.
        under_way: the claimed occurrences of a key.
        count: the number that a :class:`CountQuestion` asks for.
        after: the last key of a page that is not the last one; ask for the next page with it.
        timeline: the numbers that a :class:`TimelineQuestion` asks for.
    """

    waiting: tuple[WaitingSchedule, ...] = ()
    under_way: tuple[UnderWay, ...] = ()
    count: int | None = None
    after: str | None = None
    timeline: tuple[TimelineCount, ...] = ()


# -- the answer of a gate


def answer_for_key(waiting: WaitingSchedule | None, under_way: Iterable[UnderWay]) -> QuestionAnswer:
    """The answer to a :class:`KeyQuestion`. Occurrences keep their messages while they fit."""
    room = _Room()
    first = () if waiting is None else (room.keep(waiting),)
    return QuestionAnswer(waiting=first, under_way=tuple(room.keep(one) for one in under_way))


def answer_for_page(question: PageQuestion, found: Iterable[WaitingSchedule]) -> QuestionAnswer:
    """The answer to a :class:`PageQuestion`.

    Args:
        found: the schedules that match, behind ``after`` and in the order of keys. A gate takes one more than
            ``limit`` from its index, to see whether this is the last page.
    """
    room, page = _Room(), list[WaitingSchedule]()
    for one in found:
        if len(page) == question.limit or (question.with_messages and page and not room.fits(one)):
            return QuestionAnswer(waiting=tuple(page), after=page[-1].key)
        page.append(room.keep(one) if question.with_messages else replace(one, message=NO_MESSAGE))
    return QuestionAnswer(waiting=tuple(page))


_Entry = TypeVar("_Entry", WaitingSchedule, UnderWay)


class _Room:
    """Counts the bytes of the messages in an answer."""

    def __init__(self) -> None:
        self._used = 0

    def fits(self, entry: WaitingSchedule | UnderWay) -> bool:
        return not self._used or self._used + _size(entry) <= PAGE_BYTES

    def keep(self, entry: _Entry) -> _Entry:
        """The entry, without its message if that does not fit."""
        if not self.fits(entry):
            return replace(entry, message=NO_MESSAGE)
        self._used += _size(entry)
        return entry


def _size(entry: WaitingSchedule | UnderWay) -> int:
    return len(entry.message.properties) + len(entry.message.body)


# -- encoding


def encode_question(question: ScheduleQuestion) -> bytes:
    """The body of a question."""
    return write_head({"v": VERSION, **_question_fields(question)})


def _question_fields(question: ScheduleQuestion) -> dict[str, Any]:
    match question:
        case KeyQuestion():
            return {"ask": "key", "key": question.key}
        case PageQuestion():
            return {
                "ask": "page",
                "filter": filter_fields(question.filter),
                "after": question.after,
                "limit": question.limit,
                "with_messages": question.with_messages,
                "recurring": question.is_recurring,
            }
        case CountQuestion():
            return {"ask": "count", "filter": filter_fields(question.filter), "paused": question.is_paused}
        case TimelineQuestion():
            grid = None if question.grid is None else question.grid.fields()
            return {"ask": "timeline", "filter": filter_fields(question.filter), "grid": grid}


def decode_question(body: bytes) -> ScheduleQuestion:
    """The question in a body.

    Raises:
        ScheduleRecordError: it is not a question, or another release of bide wrote it.
    """
    fields, rest = read_head("a question to a gate", body)
    check_version(fields, VERSION)
    question = _question(fields)
    fields.end(rest)
    return question


def _question(fields: RecordFields) -> ScheduleQuestion:
    match fields.text("ask"):
        case "key":
            return KeyQuestion(key=read_key(fields))
        case "page":
            question = PageQuestion(
                filter=read_filter(fields.inner("filter")),
                after=fields.optional_text("after"),
                limit=fields.integer("limit", lowest=1),
                with_messages=fields.flag("with_messages"),
                is_recurring=fields.flag("recurring"),
            )
            if question.limit > MAX_PAGE:
                raise fields.error("limit", question.limit, f"at most {MAX_PAGE}")
            return question
        case "count":
            return CountQuestion(filter=read_filter(fields.inner("filter")), is_paused=fields.flag("paused"))
        case "timeline":
            grid = read_grid(fields.inner("grid")) if fields.has("grid") else None
            return TimelineQuestion(filter=read_filter(fields.inner("filter")), grid=grid)
        case ask:
            raise fields.error("ask", ask, "'key', 'page', 'count' or 'timeline'")


def encode_question_answer(answer: QuestionAnswer) -> bytes:
    """The body of the answer to a question."""
    writer = EntryWriter()
    listed: list[WaitingSchedule | UnderWay] = [*answer.waiting, *answer.under_way]
    entries = [writer.entry(one) for one in listed]
    timeline = [one.fields() for one in answer.timeline] or None
    head = write_head(
        {"v": VERSION, "entries": entries, "count": answer.count, "after": answer.after, "timeline": timeline}
    )
    return b"".join([head, *writer.blobs])


def decode_question_answer(body: bytes) -> QuestionAnswer:
    """The answer to a question.

    Raises:
        ScheduleRecordError: it is not an answer, or another release of bide wrote it.
    """
    fields, rest = read_head("the answer to a question", body)
    check_version(fields, VERSION)
    reader = EntryReader(rest)
    waiting, under_way = list[WaitingSchedule](), list[UnderWay]()
    for one in fields.items("entries"):
        match reader.entry(one):
            case WaitingSchedule() as entry:
                waiting.append(entry)
            case UnderWay() as entry:
                under_way.append(entry)
            case _:
                raise fields.error("entries", one, "schedules and occurrences")
    answer = QuestionAnswer(
        waiting=tuple(waiting),
        under_way=tuple(under_way),
        count=fields.optional_integer("count"),
        after=fields.optional_text("after"),
        timeline=read_counts(fields),
    )
    fields.end()
    reader.end()
    return answer
