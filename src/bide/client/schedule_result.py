"""Results of operations on schedules, and schedules as clients see them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from bide.delay.received import OWN_PREFIX
from bide.durations import from_milliseconds
from bide.runtime.arguments import whole_number

if TYPE_CHECKING:
    from bide.schedules.entries import ScheduleAnswer, UnderWay, WaitingSchedule


_UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
"""Units of an interval, in milliseconds."""


class ScheduleOutcome(Enum):
    """The outcome of an operation on a schedule. None of them raises an error."""

    SCHEDULED = "scheduled"
    """The schedule was stored, in place of the one that waited under the key, if any."""
    MOVED = "moved"
    PAUSED = "paused"
    RESUMED = "resumed"
    RUNNING = "running"
    """A run is delivered now."""
    CANCELLED = "cancelled"
    """No handler sees the message. A recurring schedule has no more runs, except those in ``under_way``: gates had
    claimed them before."""
    TOO_LATE = "too-late"
    """Nothing waits: the last run is being delivered, or was delivered or set aside. Gates remember this for at least
    an hour."""
    NOT_FOUND = "not-found"
    """Nothing waits, and gates remember no run that was delivered or set aside."""
    EXISTS = "exists"
    """Nothing was stored: ``if_absent`` was given, and a schedule waits."""
    CHANGED = "changed"
    """Nothing was done: the version that waits is not ``if_version``. When scheduling, also if no version waits."""
    FORGOTTEN = "forgotten"
    """The operation was repeated more than an hour after it was applied, so its first result is no longer known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """The result of :meth:`bide.Client.schedule`.

    Attributes:
        id: the id of the schedule; received messages have it too. None if nothing was stored.
        version: the version of the schedule that waits under the key, for ``if_version``. None if none waits.
        due_time: the due time of the message, or of its first run. None if nothing was stored.
        outcome: ``SCHEDULED``; with ``if_absent`` also ``EXISTS``, with ``if_version`` also ``CHANGED``.
    """

    key: str
    id: str | None
    version: str | None
    due_time: datetime | None
    outcome: ScheduleOutcome = ScheduleOutcome.SCHEDULED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """The result of an operation on one schedule.

    Attributes:
        version: the version that waits now. For ``CANCELLED`` and ``RUNNING``, the version that was cancelled or run;
            for ``TOO_LATE``, the id of the schedule that was delivered or set aside, None while it is being delivered.
        under_way: ids of runs of the key that gates have claimed: they were or will be delivered. At most 1,000.
    """

    key: str
    outcome: ScheduleOutcome
    version: str | None = None
    under_way: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str, answer: ScheduleAnswer) -> Self:
        """The result in an answer of a gate."""
        outcome = ScheduleOutcome(answer.outcome)
        return cls(key=key, outcome=outcome, version=answer.version, under_way=answer.under_way)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    """The result of an operation on all schedules that a filter matches.

    Attributes:
        count: the number of schedules that were changed.
        keys: their keys in order; the first 20,000 of each partition.
        partitions: the number of changed schedules by partition. The operation is atomic within a partition.
        forgotten: partitions that had applied the operation more than an hour before the client, in doubt, repeated
            it. It was done there, but ``count`` and ``keys`` lack what it changed there.
    """

    outcome: ScheduleOutcome
    count: int
    keys: tuple[str, ...] = field(repr=False)
    partitions: Mapping[int, int]
    forgotten: tuple[int, ...] = ()

    @classmethod
    def of(cls, answers: Mapping[int, ScheduleAnswer]) -> Self:
        """The result in the answers of all partitions."""
        known = {number: one for number, one in answers.items() if one.outcome != "forgotten"}
        return cls(
            outcome=ScheduleOutcome(next(iter(known.values())).outcome if known else "forgotten"),
            count=sum(one.count for one in known.values()),
            keys=tuple(sorted(key for one in known.values() for key in one.keys)),
            partitions={number: one.count for number, one in known.items()},
            forgotten=tuple(sorted(answers.keys() - known.keys())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule in the state that a gate knew when the client asked.

    Attributes:
        version: its version for ``if_version``; None if nothing waits.
        due_time: the due time of the message, or of the next run.
        nominal_time: the time of that run, before jitter and moves.
        state: ``waiting``, ``paused``, or ``under-way``: nothing waits, and gates have claimed the last run and deliver
            it.
        to: the target queue, or None.
        exchange: the target exchange, or None.
        recurrence: all rules of a recurring schedule, as the log has them.
        body: the body of the message; None in lists without bodies.
        properties: the properties of the message by their AMQP names; empty in lists without bodies.
        under_way: ids of runs that gates have claimed. Lists do not have them.
    """

    key: str
    id: str
    version: str | None
    due_time: datetime
    nominal_time: datetime
    state: Literal["waiting", "paused", "under-way"]
    to: str | None = None
    exchange: str | None = None
    routing_key: str = ""
    recurrence: Mapping[str, Any] | None = None
    body: bytes | None = field(default=None, repr=False)
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)
    under_way: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: WaitingSchedule | UnderWay, under_way: tuple[UnderWay, ...], *, with_message: bool) -> Self:
        """The view of an entry in the answer of a gate.

        Raises:
            ScheduleRecordError: the properties of its message cannot be decoded.
        """
        # An occurrence under way has neither a version nor the rules of its schedule.
        version = getattr(entry, "version", None)
        paused = getattr(entry, "is_paused", False)
        kind, _, name = entry.target.partition(":")
        return cls(
            key=entry.key,
            id=entry.id,
            version=version,
            due_time=due_moment(entry.due),
            nominal_time=due_moment(entry.nominal),
            state="under-way" if version is None else "paused" if paused else "waiting",
            to=name if kind == "q" else None,
            exchange=name if kind == "x" else None,
            routing_key=entry.routing_key,
            recurrence=getattr(entry, "recurrence", None),
            body=entry.message.body if with_message else None,
            properties=entry.message.values if with_message else {},
            under_way=tuple(one.occurrence for one in under_way),
        )

    @property
    def every(self) -> str | None:
        """The cron expression, or the interval as text such as ``15m``; None for a single message."""
        if self.recurrence is None:
            return None
        if (cron := self.recurrence.get("cron")) is not None:
            return str(cron)
        interval = int(self.recurrence.get("interval", 0))
        unit = next(name for name, length in _UNITS.items() if interval % length == 0)
        return f"{interval // _UNITS[unit]}{unit}"

    @property
    def time_zone(self) -> str | None:
        """The time zone of the cron expression; None without a cron expression."""
        zone = None if self.recurrence is None else self.recurrence.get("time_zone")
        return None if zone is None else str(zone)

    @property
    def headers(self) -> Mapping[str, Any]:
        """The sender's headers of the message."""
        headers = self.properties.get("headers") or {}
        return {name: value for name, value in headers.items() if not name.startswith(OWN_PREFIX)}

    def next_runs(self, count: int = 5) -> list[datetime]:
        """The next runs of a recurring schedule, with their jitter; of a single message, its due time.

        Raises:
            InvalidInputError: the count is not a whole number, or is negative.
            InvalidRecurrenceError: this machine does not know the expression or the time zone.
        """
        whole_number("number of runs", count, 0, sys.maxsize)
        if self.recurrence is None or not count:
            return [self.due_time][:count]
        return [self.due_time, *islice(self._later_runs(), count - 1)]

    def _later_runs(self) -> Iterator[datetime]:
        # Imported here, so that clients that do not ask for runs need no parser of cron expressions.
        from bide.durations import to_milliseconds
        from bide.schedules.recurrence import Recurrence

        assert self.recurrence is not None
        recurrence = Recurrence.parse(self.recurrence)
        for nominal in recurrence.runs(to_milliseconds(self.nominal_time)):
            if (due := from_milliseconds(recurrence.due(self.id, nominal))) is None:
                return
            yield due


def due_moment(milliseconds: int) -> datetime:
    """A due time in milliseconds since the Unix epoch, in UTC; the last moment of the year 9999 for a later one."""
    found = from_milliseconds(milliseconds)
    return datetime.max.replace(tzinfo=UTC) if found is None else found
