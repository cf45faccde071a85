"""Schedules: messages that can be cancelled, replaced, moved and listed by a key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Final

from bide.client.publisher import Publisher
from bide.client.schedule_requests import ScheduleRequests
from bide.client.schedule_result import (
    FilterResult,
    Scheduled,
    ScheduleOutcome,
    ScheduleResult,
    ScheduleView,
    due_moment,
)
from bide.durations import DelayLike, DueTimeLike, to_milliseconds
from bide.errors import BideError, NoGateAnswerError
from bide.schedules.entries import ScheduleAnswer, UnderWay, WaitingSchedule
from bide.schedules.names import PARTITIONS, ScheduleNames, check_key, partition_of
from bide.schedules.prepared import PreparedSchedule, check_due, check_version
from bide.schedules.questions import MAX_PAGE, CountQuestion, KeyQuestion, PageQuestion, TimelineQuestion
from bide.schedules.records import Action, ChangeSchedule, Operation, ScheduleFilter
from bide.schedules.timeline import ScheduleTimeline, TimeGrid, TimelineCount, merged

FIRST_PAGE: Final = 100
"""The size of the first page of schedules that is asked for in each partition. Later pages are larger."""

_SHOWN_KEYS: Final = 20
"""The maximum number of keys that an error names if a change was not answered by all partitions."""

_NOUNS: Final[dict[Action, str]] = {
    "cancel": "cancelling",
    "move": "moving",
    "pause": "pausing",
    "resume": "resuming",
    "run-now": "running",
}


class Schedules:
    """The operations of a client on the schedule log.

    Attributes:
        requests: sends them.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.requests = ScheduleRequests(publisher, ScheduleNames(), declare=publisher.declare)

    def now(self) -> datetime:
        """The time in UTC by which delays are counted."""
        return self._publisher.reconnecting.url.transport.now()

    async def add(self, schedule: PreparedSchedule) -> Scheduled:
        """Store a schedule. See :meth:`bide.Client.schedule`."""
        now = self.now()
        request, answer = await self.requests.append(
            partition_of(schedule.key),
            f"scheduling {schedule.key!r}",
            lambda request: schedule.record(request, now),
            needs_answer=schedule.is_conditional,
        )
        outcome = ScheduleOutcome.SCHEDULED if answer is None else ScheduleOutcome(answer.outcome)
        is_stored = outcome is ScheduleOutcome.SCHEDULED
        version = str(request) if answer is None else answer.version
        return Scheduled(
            key=schedule.key,
            id=str(request) if is_stored else None,
            version=version,
            due_time=due_moment(schedule.due(request)) if is_stored else None,
            outcome=outcome,
        )

    async def change(
        self,
        action: Action,
        key: str,
        *,
        if_version: str | None,
        delay: DelayLike | None = None,
        deliver_at: DueTimeLike | None = None,
    ) -> ScheduleResult:
        """Change the schedule of one key."""
        check_key(key)
        check_version(if_version)
        now = self.now()
        due = check_due(delay, deliver_at, now) if action == "move" else None
        _, answer = await self.requests.append(
            partition_of(key),
            f"{_NOUNS[action]} {key!r}",
            lambda request: ChangeSchedule(
                request=request,
                action=action,
                key=key,
                due=due,
                at=to_milliseconds(now) if action == "resume" else None,
                if_version=if_version,
            ),
            needs_answer=True,
        )
        assert answer is not None
        return ScheduleResult.of(key, answer)

    async def change_all(self, action: Action, chosen: ScheduleFilter, *, due: int | None = None) -> FilterResult:
        """Change all schedules that a filter matches: one record in each partition, at the same time."""
        at = to_milliseconds(self.now()) if action == "resume" else None

        async def change(partition: int) -> ScheduleAnswer:
            _, answer = await self.requests.append(
                partition,
                f"{_NOUNS[action]} all that match in partition {partition}",
                lambda request: ChangeSchedule(request=request, action=action, filter=chosen, due=due, at=at),
                needs_answer=True,
            )
            assert answer is not None
            return answer

        results = await asyncio.gather(*map(change, range(PARTITIONS)), return_exceptions=True)
        answers = {number: one for number, one in enumerate(results) if not isinstance(one, BaseException)}
        errors = [one for one in results if isinstance(one, BaseException)]
        if not errors:
            return FilterResult.of(answers)
        # Prefer an error other than a missing answer, because it names a cause.
        error = next((one for one in errors if not isinstance(one, NoGateAnswerError)), errors[0])
        if isinstance(error, BideError):
            parts = [_partly_done(answers)] if answers else []
            unanswered = sum(isinstance(one, NoGateAnswerError) for one in errors)
            if unanswered and not isinstance(error, NoGateAnswerError):
                recorded = f"{unanswered} of {PARTITIONS} partitions have recorded it"
                parts.append(f"{recorded}, and it takes effect there when a gate reads it")
            error.args = ("; ".join((str(error), *parts)), *error.args[1:])
        raise error

    async def append(self, record: Operation, what: str) -> ScheduleAnswer:
        """Append an operation on one key with the id that it has, and wait for the answer of a gate.

        Args:
            record: the operation. Gates apply it once, even if it is appended again.
            what: the operation, for errors.

        Raises:
            BideError: as :meth:`ScheduleRequests.append`.
        """
        assert record.key is not None
        _, answer = await self.requests.append(
            partition_of(record.key), what, lambda _: record, needs_answer=True, number=record.request
        )
        assert answer is not None
        return answer

    async def move_all(
        self, chosen: ScheduleFilter, *, delay: DelayLike | None, deliver_at: DueTimeLike | None
    ) -> FilterResult:
        """Move all schedules that a filter matches."""
        return await self.change_all("move", chosen, due=check_due(delay, deliver_at, self.now()))

    async def view(self, key: str) -> ScheduleView | None:
        """The schedule of one key."""
        check_key(key)
        answer = await self.requests.ask(partition_of(key), f"the question for {key!r}", KeyQuestion(key=key))
        entries: list[WaitingSchedule | UnderWay] = [*answer.waiting, *answer.under_way]
        return ScheduleView.of(entries[0], answer.under_way, with_message=True) if entries else None

    async def views(self, chosen: ScheduleFilter, *, bodies: bool) -> AsyncGenerator[ScheduleView, None]:
        """The schedules that a filter matches, in the order of keys."""
        async with aclosing(self.entries(chosen, bodies=bodies)) as found:
            async for one in found:
                yield ScheduleView.of(one, (), with_message=bodies)

    async def entries(
        self, chosen: ScheduleFilter, *, bodies: bool = False, after: str | None = None, is_recurring: bool = False
    ) -> AsyncGenerator[WaitingSchedule, None]:
        """The schedules that a filter matches, in the order of keys, as the log has them.

        Args:
            after: begin after this key.
            is_recurring: whether only recurring schedules match.
        """
        first = PageQuestion(
            filter=chosen, after=after, limit=FIRST_PAGE, with_messages=bodies, is_recurring=is_recurring
        )
        pages = [_Pages(self.requests, number, first) for number in range(PARTITIONS)]
        while True:
            # The next key is known when each partition has a schedule in memory or has ended.
            if empty := [one.fill() for one in pages if one.is_empty]:
                await asyncio.gather(*empty)
            filled = [one for one in pages if one.found]
            if not filled:
                return
            yield min(filled, key=lambda one: one.found[0].key.encode()).found.popleft()

    async def count(self, chosen: ScheduleFilter, *, is_paused: bool = False) -> int:
        """The number of schedules that a filter matches.

        Args:
            is_paused: count paused schedules only. Gates of earlier releases do not answer such a question.
        """
        question = CountQuestion(filter=chosen, is_paused=is_paused)
        questions = (
            self.requests.ask(number, f"the count of partition {number}", question) for number in range(PARTITIONS)
        )
        return sum(one.count or 0 for one in await asyncio.gather(*questions))

    async def timeline(self, chosen: ScheduleFilter, grid: TimeGrid) -> ScheduleTimeline:
        """The numbers of schedules that a filter matches, by target and interval.

        Gates of older releases do not answer.
        """
        return merged(grid, await self._counts(TimelineQuestion(filter=chosen, grid=grid)))

    async def span(self, chosen: ScheduleFilter) -> tuple[int, int] | None:
        """The first and the last due time of the schedules that a filter matches, in milliseconds since the Unix epoch.

        None if none matches. Gates of older releases do not answer.
        """
        counts = await self._counts(TimelineQuestion(filter=chosen, grid=None))
        return (min(one.first for one in counts), max(one.last for one in counts)) if counts else None

    async def _counts(self, question: TimelineQuestion) -> list[TimelineCount]:
        answers = await asyncio.gather(
            *(self.requests.ask(number, f"the times of partition {number}", question) for number in range(PARTITIONS))
        )
        return [count for one in answers for count in one.timeline]


def _partly_done(answers: Mapping[int, ScheduleAnswer]) -> str:
    """The part of a change that was done, if not all partitions answered."""
    done = FilterResult.of(answers)
    counts = ", ".join(f"{count} in partition {number}" for number, count in done.partitions.items())
    keys = ", ".join(map(repr, done.keys[:_SHOWN_KEYS])) + (", ..." if done.count > _SHOWN_KEYS else "")
    return (
        f"{len(answers)} of {PARTITIONS} partitions answered: {done.outcome.value} {done.count} ({counts})"
        f"{': ' if keys else ''}{keys}"
    )


class _Pages:
    """The schedules of one partition that a filter matches, asked for page by page."""

    def __init__(self, requests: ScheduleRequests, partition: int, first: PageQuestion) -> None:
        self.found = deque[WaitingSchedule]()
        self._requests = requests
        self._partition = partition
        self._next: PageQuestion | None = first

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of the last page, and there may be another page."""
        return not self.found and self._next is not None

    async def fill(self) -> None:
        """Ask for pages until one has schedules, or there are no more."""
        while not self.found and (question := self._next) is not None:
            answer = await self._requests.ask(self._partition, f"the list of partition {self._partition}", question)
            self.found.extend(answer.waiting)
            self._next = None
            if answer.after is not None:
                self._next = replace(question, after=answer.after, limit=MAX_PAGE)
