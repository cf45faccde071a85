"""Due time, target and onward route of a message that waits in a delay queue.

A message that has to change its infrastructure needs the rest of its delay. :func:`waiting_message` computes its due
time from what the message carries: the header ``bide-due``, or another absolute due time, or else the queue in which it
waits and the time at which it came there. A due time that is known only within bounds counts as the later bound, so
that a message is never early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from bide.delay.protocol import HEADER_DUE, DelayInfrastructure, Target, Wait
from bide.delay.routes import DelayRoute
from bide.durations import from_milliseconds
from bide.errors import InvalidDueTimeError, InvalidInputError

DueSource = Literal["bide-due", "NServiceBus.DeliverAt", "NServiceBus.Retries.Timestamp", "eta", "x-death", "queue"]
"""The source of a due time: a header, the time of the last dead-lettering, or the queue alone."""

_DELIVER_AT: Final = "NServiceBus.DeliverAt"
_RETRIED_AT: Final = "NServiceBus.Retries.Timestamp"
_ETA: Final = "eta"

_NATIVE_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d):(\d{6}) Z", re.ASCII)

_SECOND: Final = timedelta(seconds=1)
_TOLERANCE: Final = timedelta(seconds=2)
"""How far a due time may lie outside the bounds of the levels: cascades round delays to seconds, and the clocks of
sender, broker and this machine differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """The target of a waiting message, and its due time or the bounds of it.

    Attributes:
        target: where it goes at its due time.
        earliest: the earliest possible due time.
        latest: the latest possible due time; the same as ``earliest`` if the due time is known.
        source: where the due time is from.
    """

    target: Target
    earliest: datetime
    latest: datetime
    source: DueSource

    @property
    def uncertainty(self) -> timedelta:
        """How late the message may be if it is delivered at ``latest``."""
        return self.latest - self.earliest

    def route(self, infrastructure: DelayInfrastructure, now: datetime, *, message_id: str = "") -> DelayRoute:
        """The route through an infrastructure from now to the latest due time. A past due time means no delay.

        Args:
            message_id: spreads messages over parallel queues, if the infrastructure has any.

        Raises:
            InvalidInputError: as :meth:`DelayInfrastructure.route` does.
        """
        return infrastructure.route(max(self.latest - now, timedelta(0)), self.target, message_id=message_id)


def waiting_message(
    infrastructure: DelayInfrastructure,
    queue: str,
    *,
    routing_key: str,
    headers: Mapping[str, Any],
    now: datetime,
) -> WaitingMessage:
    """The target and the due time of a message that was taken from a delay queue.

    The due time is ``bide-due``, or the latest of the due times of other systems that the message carries:
    ``NServiceBus.DeliverAt``; for a delayed retry of NServiceBus the time of the failure and the delay; the ``eta`` of
    a Celery task. ``NServiceBus.TimeSent`` is not used, because a delayed retry keeps the first one. In the cascades of
    NServiceBus and Celery a message may carry the due time of an earlier delivery. Such a time does not fit the level
    in which the message waits. Then, and for a message without a due time, the bounds are computed: the message came
    into its level when it died in the level before (``x-death``), or else at any time within the wait of the level.

    Args:
        infrastructure: the infrastructure that the queue belongs to.
        queue: the name of the queue.
        routing_key: the message's routing key.
        headers: all headers, including those of the broker.
        now: the time at which the message was taken.

    Raises:
        InvalidInputError: messages do not wait in this queue; or the keys or the headers do not show the target or the
            wait; or a header with a due time cannot be read.
    """
    wait = infrastructure.wait_in(queue, routing_key, headers)
    if wait is None:
        raise InvalidInputError(
            f"the queue {queue!r} is not one of those in which messages of {infrastructure.name!r} wait: check the "
            "layout and its settings"
        )
    due = _own_due(headers)
    if due is not None and wait.owns_due:
        return WaitingMessage(target=wait.target, earliest=due, latest=due, source=HEADER_DUE)
    earliest, latest, source = _bounds(wait, headers, now)
    found = max(_due_times(due, wait, headers), key=lambda one: one[1], default=None)
    if found is not None and earliest - _TOLERANCE <= found[1] <= latest + _TOLERANCE:
        earliest, latest, source = found
    return WaitingMessage(target=wait.target, earliest=earliest, latest=latest, source=source)


def _bounds(wait: Wait, headers: Mapping[str, Any], now: datetime) -> tuple[datetime, datetime, DueSource]:
    """The bounds of the due time by the levels.

    A message that is still in its queue waits at least for the levels below, and at most for the whole of this level
    and those below. If it came from another level, the broker has noted the second in which it came.
    """
    try:
        earliest, latest = now + wait.least, now + wait.here + wait.most
        entered = _death_in(wait.previous, headers)
        if entered is None:
            return earliest, latest, "queue"
        earliest = max(earliest, entered + wait.here + wait.least)
        return earliest, max(earliest, min(latest, entered + _SECOND + wait.here + wait.most)), "x-death"
    except OverflowError as error:
        raise InvalidDueTimeError("the message is due after the year 9999") from error


def _death_in(queue: str | None, headers: Mapping[str, Any]) -> datetime | None:
    """The time at which a message left its previous queue, rounded down to a second; None if that is unknown.

    The broker keeps the time of the first death in a queue. If the message died there more than once, the record may
    be that of an earlier delivery, because a copy of a message can have the ``x-death`` of the original.
    """
    deaths = headers.get("x-death")
    if queue is None or not isinstance(deaths, list):
        return None
    found = [one for one in deaths if isinstance(one, Mapping) and one.get("queue") == queue]
    if len(found) != 1 or found[0].get("count") != 1:
        return None
    moment = found[0].get("time")
    if not isinstance(moment, datetime):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _due_times(
    own: datetime | None, wait: Wait, headers: Mapping[str, Any]
) -> list[tuple[datetime, datetime, DueSource]]:
    """The bounds of all due times that a message carries.

    Each belongs to one delivery, and a later delivery has a later due time: the message waits for the latest of them.
    """
    found: list[tuple[datetime, datetime, DueSource]] = []
    if own is not None:
        found.append((own, own, HEADER_DUE))
    if (deliver_at := headers.get(_DELIVER_AT)) is not None:
        moment = native_time(_DELIVER_AT, deliver_at)
        found.append((moment, moment, _DELIVER_AT))
    if (retried_at := headers.get(_RETRIED_AT)) is not None and wait.whole is not None:
        # The delay of the retry was rounded up to a second.
        moment = native_time(_RETRIED_AT, retried_at) + wait.whole
        found.append((moment - _SECOND, moment, _RETRIED_AT))
    if isinstance(eta := headers.get(_ETA), str) and "task" in headers:
        moment = _celery_time(eta)
        found.append((moment, moment, _ETA))
    return found


def _own_due(headers: Mapping[str, Any]) -> datetime | None:
    value = headers.get(HEADER_DUE)
    if value is None:
        return None
    due = None if isinstance(value, bool) or not isinstance(value, int) else from_milliseconds(value)
    if due is None:
        raise InvalidDueTimeError(f"the header {HEADER_DUE} is {value!r}: it must be milliseconds since 1970")
    return due


def native_time(name: str, value: Any) -> datetime:
    """A time in the format of NServiceBus headers.

    Args:
        name: the name of the header, for the error.
        value: its value.

    Raises:
        InvalidDueTimeError: the value is not such a time.
    """
    found = _NATIVE_TIME.fullmatch(value) if isinstance(value, str) else None
    try:
        if found is not None:
            return datetime.fromisoformat(f"{found[1]}T{found[2]}.{found[3]}+00:00")
    except ValueError:
        found = None
    raise InvalidDueTimeError(f"the header {name} is {value!r}: it must be a time such as 2026-12-24 17:00:00:000000 Z")


def _celery_time(value: str) -> datetime:
    """The due time of a task. Celery writes ISO 8601, and means UTC if there is no offset."""
    try:
        moment = datetime.fromisoformat(value)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidDueTimeError(f"the header {_ETA} is {value!r}: it must be a time in ISO 8601") from error
