"""Outgoing schedules, and conditions for waiting ones, as values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from typing import Final

from bide.durations import DelayLike, DueTimeLike
from bide.messages.outgoing import MessageFields
from bide.schedules.requests import RequestId


@dataclass(slots=True)
class OutgoingSchedule(MessageFields):
    """A schedule to be stored: the parameters of :meth:`bide.Client.schedule`, as a value.

    Args:
        body: bytes, or text that is sent as UTF-8.
        json: instead of a body, any value that serialises as JSON.
        key: names the schedule: at most 255 bytes. A schedule that waits under the key is replaced.
        to: the target queue.
        exchange: instead of a queue, the target exchange; used with ``routing_key``.
        delay: the time until delivery, from now on.
        deliver_at: instead of a delay, the due time with a time zone. A due time in the past means delivery at once.
        every: instead of a delay, a recurring schedule: a cron expression such as ``"0 8 * * MON-FRI"``, or a duration
            such as ``"15m"``.
        time_zone: the IANA name of the zone of a cron expression; UTC if None.
        first_run: no run before this time. Runs of a duration are counted from it.
        last_run: no run after this time.
        jitter: each run is delayed by up to this much. The id of the schedule and the time of the run determine by how
            much.
        catch_up: which of the runs that were missed while no gate was running are made up for: ``"last"``, ``"all"`` or
            ``"none"``.
        if_absent: store nothing if a schedule waits under the key.
        if_version: store nothing unless the schedule that waits under the key has this version.
        message_id: the message id; None generates one. Each run of a recurring schedule gets an id of its own.
        timestamp: an aware ``datetime``, sent in whole seconds.
        persistent: survive a restart of the broker in classic queues (quorum queues always persist messages).
        priority: 0 to 255.
        expiration: how long the message stays valid in its queue, from its delivery on.
    """

    _: KW_ONLY
    key: str
    every: str | timedelta | None = None
    time_zone: str | None = None
    first_run: DueTimeLike | None = None
    last_run: DueTimeLike | None = None
    jitter: DelayLike | None = None
    catch_up: str = "last"
    if_absent: bool = False
    if_version: str | None = None


SCHEDULE_ADVICE: Final = dict.fromkeys(
    sorted({one.name for one in fields(OutgoingSchedule)} - {one.name for one in fields(MessageFields)}),
    "is for messages that can be cancelled and replaced until they are due, or that recur: send one with "
    "client.schedule(...)",
)
"""Advice for callers of ``publish`` who give a parameter of ``schedule``, by the name of the parameter."""


@dataclass(slots=True)
class NumberedSchedule(OutgoingSchedule):
    """A schedule whose request id the caller chose, so that it is applied once however often it is sent.

    Args:
        request: its id. In each partition, a session may have at most 1,000 numbers.
    """

    _: KW_ONLY
    request: RequestId


@dataclass(slots=True, kw_only=True)
class ScheduleConditions:
    """Conditions for waiting schedules; see :meth:`bide.Client.list_scheduled`. A schedule has to match all of them."""

    prefix: str | None = None
    to: str | None = None
    exchange: str | None = None
    due_from: DueTimeLike | None = None
    due_before: DueTimeLike | None = None


@dataclass(slots=True, kw_only=True)
class ScheduleListing(ScheduleConditions):
    """Conditions for a list of schedules, and whether the list includes their messages."""

    bodies: bool = False


@dataclass(slots=True, kw_only=True)
class ScheduleMove(ScheduleConditions):
    """Another time for all schedules that match: a delay from now on, or a due time."""

    delay: DelayLike | None = None
    deliver_at: DueTimeLike | None = None
