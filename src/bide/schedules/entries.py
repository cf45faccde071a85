"""Entries of the state that follows from the schedule log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from bide.schedules.message import ScheduledMessage
from bide.schedules.requests import AppliedNumbers

Outcome = Literal["delivered", "undeliverable"]
"""The end of a claimed occurrence."""

AnswerOutcome = Literal[
    "scheduled",
    "exists",
    "changed",
    "cancelled",
    "moved",
    "paused",
    "resumed",
    "running",
    "too-late",
    "not-found",
    "forgotten",
]

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
ANSWER_OUTCOMES: Final[tuple[AnswerOutcome, ...]] = get_args(AnswerOutcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleAnswer:
    """The result of a request: the same from each gate, and each time that the request is repeated.

    Attributes:
        outcome: ``exists``: ``if_absent`` was given, and a schedule waits. ``changed``: ``if_version`` was given, and
            another version waits (or none, for a new schedule). ``too-late``: nothing waits, and the last occurrence is
            under way or ended a short while ago. ``forgotten``: the request was applied so long ago that its answer is
            no longer known.
        version: the version of the schedule that waits now, or that was cancelled or claimed by the request.
        under_way: occurrences of the key that are claimed and may still be delivered; the first 1,000 in their order.
        count: how many schedules a filter matched.
        keys: the keys of these schedules, the first 20,000 in their order.
    """

    outcome: AnswerOutcome
    version: str | None = None
    under_way: tuple[str, ...] = ()
    count: int = 0
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSchedule:
    """A schedule that waits for its next occurrence.

    Attributes:
        id: the request that scheduled it.
        version: the request that changed it last.
        nominal: time of the next occurrence before jitter and moves, in milliseconds since the Unix epoch.
        due: the due time of the next occurrence, in milliseconds since the Unix epoch.
        resumed_at: occurrences due before this are skipped, because the schedule was paused.
    """

    key: str
    id: str
    version: str
    target: str
    routing_key: str
    nominal: int
    due: int
    recurrence: Mapping[str, Any] | None
    is_paused: bool = False
    resumed_at: int | None = None
    message: ScheduledMessage = field(repr=False)

    @property
    def occurrence(self) -> str:
        """The id of the next occurrence.

        It contains the id of the schedule, not the key: after a replacement the same nominal time is another
        occurrence.
        """
        return self.id if self.recurrence is None else f"{self.id}@{self.nominal}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A claimed occurrence that is not known to have ended. It has its own copy of the message.

    Attributes:
        occurrence: its id.
        due: its due time, in milliseconds since the Unix epoch.
        is_run_now: whether a *run-now* put it under way, so that it is delivered at once, also before its due time.
    """

    occurrence: str
    key: str
    id: str
    target: str
    routing_key: str
    nominal: int
    due: int
    is_recurring: bool
    is_run_now: bool = False
    message: ScheduledMessage = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedKey:
    """A key whose last occurrence ended a short while ago.

    Attributes:
        version: the id of the schedule that it belonged to, which was its first version.
        tick: when the occurrence ended, in ticks.
    """

    key: str
    version: str
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSession:
    """The applied requests of a client.

    Attributes:
        session: its name.
        applied: the numbers of the requests.
        tick: when the latest request came, in ticks.
    """

    session: str
    applied: AppliedNumbers = field(default_factory=AppliedNumbers)
    tick: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedAnswer:
    """The answer to a request, for a client that repeats it.

    Attributes:
        request: its id.
        tick: when it was answered, in ticks.
    """

    request: str
    tick: int
    answer: ScheduleAnswer


StateEntry = WaitingSchedule | UnderWay | FinishedKey | ScheduleSession | RememberedAnswer
