"""Checked schedules, filters and due times, ready for records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final

from bide.delay.protocol import ExchangeTarget, QueueTarget, check_name
from bide.durations import DelayLike, DueTimeLike, parse_delay, parse_due_time, to_milliseconds
from bide.errors import (
    InvalidDueTimeError,
    InvalidInputError,
    InvalidNameError,
    InvalidRecurrenceError,
    UnsupportedTargetError,
)
from bide.messages.outgoing import MessageFields, OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message
from bide.schedules.fields import MAX_NAME
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import ScheduleNames, check_key
from bide.schedules.outgoing import OutgoingSchedule
from bide.schedules.records import AddSchedule, ScheduleFilter
from bide.schedules.recurrence import Recurrence
from bide.schedules.requests import RequestId

_MESSAGE_FIELDS: Final = tuple(one.name for one in fields(MessageFields) if one.name not in ("delay", "deliver_at"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSchedule:
    """A checked schedule.

    Attributes:
        message: the message with its target and properties.
        nominal: the first run before jitter, in milliseconds since the Unix epoch.
        recurrence: None for a single message.
    """

    key: str
    message: PreparedMessage
    nominal: int
    recurrence: Recurrence | None
    if_absent: bool
    if_version: str | None

    @property
    def is_conditional(self) -> bool:
        """Whether only a gate knows if the schedule is stored."""
        return self.if_absent or self.if_version is not None

    def stamped(self, headers: Mapping[str, Any]) -> PreparedSchedule:
        """The same schedule with additional headers; the message's own headers take precedence.

        Raises:
            InvalidInputError: or a subclass of it: a header cannot be sent.
        """
        return replace(self, message=self.message.stamped(headers))

    def due(self, request: RequestId) -> int:
        """When the message, or its first run, is due, in milliseconds since the Unix epoch."""
        return self.nominal if self.recurrence is None else self.recurrence.due(str(request), self.nominal)

    def record(self, request: RequestId, now: datetime) -> AddSchedule:
        """The record of this schedule.

        Args:
            now: the time of scheduling, for the message's header.

        Raises:
            InvalidInputError: a property cannot be encoded.
        """
        target, spec = self.message.target, self.recurrence
        return AddSchedule(
            request=request,
            key=self.key,
            target=str(target),
            routing_key=target.routing_key if isinstance(target, ExchangeTarget) else "",
            nominal=self.nominal,
            due=self.due(request),
            recurrence=None if spec is None else spec.spec(),
            if_absent=self.if_absent,
            if_version=self.if_version,
            message=ScheduledMessage.of(self.message.wire_values(None, now), self.message.body),
        )


def check_schedule(outgoing: OutgoingSchedule, now: datetime) -> PreparedSchedule:
    """Check a schedule.

    Args:
        now: the present, from which a delay is counted.

    Raises:
        InvalidInputError: or a subclass of it, for the first field that cannot be used.
    """
    key = check_key(outgoing.key)
    times = {"delay": outgoing.delay, "deliver_at": outgoing.deliver_at, "every": outgoing.every}
    given = [name for name, value in times.items() if value is not None]
    if len(given) != 1:
        raise InvalidDueTimeError(
            f"the schedule {key!r} needs one time, and has {' and '.join(given) or 'none'}: give one of delay=, "
            "deliver_at= and every="
        )
    # With a delay of zero, the rules for the headers of delayed messages apply.
    message_fields: dict[str, Any] = {name: getattr(outgoing, name) for name in _MESSAGE_FIELDS}
    message = check_message(OutgoingMessage(**message_fields, delay=timedelta(0)))
    if ScheduleNames().owns(str(outgoing.to or outgoing.exchange)):
        raise UnsupportedTargetError(
            f"the target '{message.target}' is a part of the schedule log itself, and gates deliver nothing there: "
            "name another one"
        )
    recurrence = _recurrence(outgoing, now)
    if recurrence is None:
        nominal = check_due(outgoing.delay, outgoing.deliver_at, now)
    else:
        first = recurrence.after(to_milliseconds(now))
        assert first is not None
        nominal = first
    if outgoing.if_absent.__class__ is not bool:
        raise InvalidInputError(f"if_absent is {outgoing.if_absent!r}: give True or False")
    if outgoing.if_absent and outgoing.if_version is not None:
        raise InvalidInputError(
            "both if_absent and if_version were given, and a schedule with a version is not absent: give one of them"
        )
    return PreparedSchedule(
        key=key,
        message=message,
        nominal=nominal,
        recurrence=recurrence,
        if_absent=outgoing.if_absent,
        if_version=check_version(outgoing.if_version),
    )


def _recurrence(outgoing: OutgoingSchedule, now: datetime) -> Recurrence | None:
    rules = {
        "time_zone": outgoing.time_zone,
        "first_run": outgoing.first_run,
        "last_run": outgoing.last_run,
        "jitter": outgoing.jitter,
    }
    every = outgoing.every
    if every is None:
        given = [name for name, value in rules.items() if value is not None]
        given += ["catch_up"] if outgoing.catch_up != "last" else []
        if given:
            raise InvalidRecurrenceError(f"{given[0]}=... is for recurring schedules: give every=..., or leave it out")
        return None
    if isinstance(every, str) and len(every.encode(errors="replace")) > MAX_NAME:
        raise InvalidRecurrenceError(f"every={every[:40]!r}... is longer than {MAX_NAME} bytes: give a shorter one")
    made = Recurrence.of(
        every,
        now=now,
        time_zone=outgoing.time_zone,
        first_run=outgoing.first_run,
        last_run=outgoing.last_run,
        jitter=outgoing.jitter,
        catch_up=outgoing.catch_up,
    )
    if min(made.first or 0, made.last or 0) < 0:
        raise InvalidRecurrenceError("the first or the last run lies before the year 1970: give a later one")
    return made


def check_due(delay: DelayLike | None, deliver_at: DueTimeLike | None, now: datetime) -> int:
    """The due time of a delay or a due time, in milliseconds since the Unix epoch.

    Raises:
        InvalidDelayError: the delay is invalid.
        InvalidDueTimeError: the due time is invalid, or both or neither were given.
    """
    if (delay is None) == (deliver_at is None):
        raise InvalidDueTimeError("a due time is needed: give either delay= or deliver_at=")
    if deliver_at is not None:
        due = parse_due_time(deliver_at)
    else:
        assert delay is not None
        wait = parse_delay(delay)
        try:
            due = now + wait
        except OverflowError as error:
            raise InvalidDueTimeError(f"the delay {wait} ends after the year 9999: give a shorter one") from error
    return max(to_milliseconds(due), 0)


def check_version(version: object) -> str | None:
    """A version for ``if_version``, if it can be one.

    Raises:
        InvalidNameError: the version is not text, is empty or is too long.
    """
    if version is None:
        return None
    check_name("version", version)
    return str(version)


def check_filter(
    *,
    prefix: str | None = None,
    to: str | None = None,
    exchange: str | None = None,
    due_from: DueTimeLike | None = None,
    due_before: DueTimeLike | None = None,
) -> ScheduleFilter:
    """The filter of these conditions; absent ones hold for all schedules.

    Raises:
        InvalidNameError: prefix, queue or exchange is invalid.
        InvalidDueTimeError: a time is invalid.
        InvalidInputError: both a queue and an exchange were given.
    """
    if prefix:
        check_name("prefix", prefix)
    if to is not None and exchange is not None:
        raise InvalidInputError("both a queue and an exchange were given, and no schedule has two targets: give one")
    target: QueueTarget | ExchangeTarget | None = None
    if to is not None:
        check_name("queue", to)
        target = QueueTarget(to)
    elif exchange is not None:
        check_name("exchange", exchange)
        target = ExchangeTarget(exchange)
    if prefix is not None and not isinstance(prefix, str):
        raise InvalidNameError(f"the prefix {prefix!r} is not text: give a str")
    return ScheduleFilter(
        prefix=prefix or "",
        target=None if target is None else str(target),
        due_from=None if due_from is None else max(to_milliseconds(parse_due_time(due_from)), 0),
        due_before=None if due_before is None else max(to_milliseconds(parse_due_time(due_before)), 0),
    )
