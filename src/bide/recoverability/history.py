"""The history of attempts at a message, in its headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bide.delay.cascade_keys import HEADER_DELAY, LEVELS
from bide.delay.received import is_retried_by_servicecontrol
from bide.durations import from_milliseconds, to_milliseconds

HEADER_RETRIES: Final = "bide-retries"
"""Header with the number of delayed retries so far."""

HEADER_ATTEMPTS: Final = "bide-attempts"
"""Header with the number of attempts so far, immediate ones included."""

HEADER_ATTEMPT_TIMES: Final = "bide-attempt-times"
"""Header with the times of failed attempts: milliseconds since the Unix epoch, negative in unused elements."""

HEADER_FIRST_FAILURE: Final = "bide-first-failure"
"""Header with the time of the first failure: milliseconds since the Unix epoch."""

HEADER_EXPIRES: Final = "bide-expires"
"""Header with the moment at which the sender's ``expiration`` is over: milliseconds since the Unix epoch."""

HEADER_DELIVERIES: Final = "bide-deliveries"
"""Header with the number of deliveries by a queue that does not count deliveries itself."""

HEADER_FIRST_DUE: Final = "bide-first-due"
"""Header with the due time that the sender gave, on copies of the message."""

HEADER_SENT_BY: Final = "bide-sent-by"
"""Header with the publisher of a message, on its copies: the broker refuses another user's name in ``user_id``."""

HEADER_OPERATOR_RETRIES: Final = "bide-operator-retries"
"""Header with how often an operator sent a message back."""

HEADER_OPERATOR_RUN: Final = "bide-operator-run"
"""Header with the operation that last sent a message back, as named in the audit stream."""

HEADER_EDIT_OF: Final = "bide-edit-of"
"""Header with the message id of the message that an operator edited to make this one."""

NSERVICEBUS_RETRIES: Final = "NServiceBus.Retries"
"""Header with the number of delayed retries of a .NET endpoint. ServiceControl removes it when it retries a message."""

NSERVICEBUS_RETRIED_AT: Final = "NServiceBus.Retries.Timestamp"
"""Header with the time of the last delayed retry of a .NET endpoint."""

NSERVICEBUS_SENT: Final = "NServiceBus.TimeSent"
NSERVICEBUS_DUE: Final = "NServiceBus.DeliverAt"
"""Header with the due time that the sender gave. NServiceBus keeps this header in delayed retries."""

MAX_FAILURE_TIMES: Final = 100
"""The maximum number of failure times that a message carries; the oldest are left out."""

_MAX_COUNT: Final = 1 << 31
"""A larger counter was not written by bide, and increasing it could exceed what a header can hold."""

_UNUSED: Final = -(1 << 40)
"""Marks an unused element of the attempt times. It is encoded in as many bytes as a time."""

_NSERVICEBUS_TIME: Final = "%Y-%m-%d %H:%M:%S:%f Z"
_LONGEST_DELAY: Final = (1 << LEVELS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The attempts at a message so far, as recorded in its headers.

    Attributes:
        retries: number of delayed retries.
        attempts: number of attempts that are known to have ended, immediate ones included.
        times: when attempts failed, except those that failed in other processes since the last delayed retry.
        first_failed_at: when the first attempt failed, or None.
        expires_at: when the sender's ``expiration`` is over, or None.
        deliveries: number of deliveries by a queue that does not count deliveries itself.
        first_due: the due time that the sender gave; None if the message had no delayed retry and was not sent back by
            an operator.
        returned: how often an operator sent the message back.
        run: the operation that last sent the message back, or None.
        edit_of: the message id of the message that an operator edited to make this one, or None.
    """

    retries: int = 0
    attempts: int = 0
    times: tuple[datetime, ...] = ()
    first_failed_at: datetime | None = None
    expires_at: datetime | None = None
    deliveries: int = 0
    first_due: datetime | None = None
    returned: int = 0
    run: str | None = None
    edit_of: str | None = None

    @classmethod
    def read(cls, headers: Mapping[str, Any]) -> History:
        """Read the history from headers. Values that bide cannot have written are ignored.

        If NServiceBus and bide both counted the retries, NServiceBus's count is the later one: bide writes both, or
        leaves out NServiceBus's. ServiceControl removes NServiceBus's count and turns bide's headers into text. The
        retries of such a message are counted from zero.
        """
        if _HEADERS.isdisjoint(headers):
            # Most messages: nothing has failed yet.
            return _FIRST_ATTEMPT
        times = headers.get(HEADER_ATTEMPT_TIMES)
        restarted = is_retried_by_servicecontrol(headers)
        return cls(
            retries=_count(headers.get(NSERVICEBUS_RETRIES, _own_count(headers, HEADER_RETRIES, restarted=restarted))),
            attempts=_count(headers.get(HEADER_ATTEMPTS)),
            times=tuple(one for value in (times if isinstance(times, list) else ()) if (one := _moment(value))),
            first_failed_at=_moment(headers.get(HEADER_FIRST_FAILURE)),
            expires_at=_moment(headers.get(HEADER_EXPIRES)),
            deliveries=_own_count(headers, HEADER_DELIVERIES, restarted=restarted),
            first_due=_moment(headers.get(HEADER_FIRST_DUE)),
            returned=_count(headers.get(HEADER_OPERATOR_RETRIES)),
            run=_name(headers.get(HEADER_OPERATOR_RUN)),
            edit_of=_name(headers.get(HEADER_EDIT_OF)),
        )

    def with_failures(self, times: tuple[datetime, ...], *, attempts: int, expires_at: datetime | None) -> History:
        """The history after more attempts failed.

        Args:
            times: when they failed, as far as this process knows.
            attempts: the number of these attempts.
        """
        return replace(
            self,
            attempts=self.attempts + attempts,
            times=(self.times + times)[-MAX_FAILURE_TIMES:],
            first_failed_at=self.first_failed_at or (times[0] if times else None),
            expires_at=expires_at,
        )

    def headers(self, *, max_failure_times: int) -> dict[str, Any]:
        """Headers for a copy that is going to be retried. Their size does not depend on the number of attempts.

        Args:
            max_failure_times: number of failure times that the headers have room for; the oldest are left out.
        """
        max_failure_times = min(max_failure_times, MAX_FAILURE_TIMES)
        times = [to_milliseconds(one) for one in self.times[-max_failure_times:]] if max_failure_times else []
        headers: dict[str, Any] = {
            HEADER_RETRIES: self.retries,
            HEADER_ATTEMPTS: self.attempts,
            HEADER_ATTEMPT_TIMES: times + [_UNUSED] * (max_failure_times - len(times)),
        }
        for name, moment in (
            (HEADER_FIRST_FAILURE, self.first_failed_at),
            (HEADER_EXPIRES, self.expires_at),
            (HEADER_FIRST_DUE, self.first_due),
        ):
            if moment is not None:
                headers[name] = to_milliseconds(moment)
        if self.deliveries:
            headers[HEADER_DELIVERIES] = self.deliveries
        return headers | self.operators_headers()

    def operators_headers(self) -> dict[str, Any]:
        """Headers that record what operators did with the message."""
        returned = self.returned or None
        headers = {HEADER_OPERATOR_RETRIES: returned, HEADER_OPERATOR_RUN: self.run, HEADER_EDIT_OF: self.edit_of}
        return {name: value for name, value in headers.items() if value is not None}


_HEADERS: Final = frozenset(
    {
        HEADER_RETRIES,
        HEADER_ATTEMPTS,
        HEADER_ATTEMPT_TIMES,
        HEADER_FIRST_FAILURE,
        HEADER_EXPIRES,
        HEADER_DELIVERIES,
        HEADER_FIRST_DUE,
        HEADER_OPERATOR_RETRIES,
        HEADER_OPERATOR_RUN,
        HEADER_EDIT_OF,
        NSERVICEBUS_RETRIES,
    }
)
"""All headers that :meth:`History.read` reads."""

_FIRST_ATTEMPT: Final = History()


def nservicebus_time(moment: datetime) -> str:
    """Format a time as NServiceBus does: ``2026-12-24 18:00:00:000000 Z``, with a colon before the microseconds."""
    return moment.astimezone(UTC).strftime(_NSERVICEBUS_TIME)


def read_nservicebus_time(value: Any) -> datetime | None:
    """Parse a time from a header of NServiceBus; None if the value is not one."""
    if not isinstance(value, str):
        return None
    try:
        return datetime.strptime(value, _NSERVICEBUS_TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def nservicebus_due(headers: Mapping[str, Any]) -> datetime | None:
    """The due time that an NServiceBus endpoint gave, also on copies of the message; None if it was not delayed.

    Args:
        headers: the headers of the delivery; the delay counts from the sending time that they contain.
    """
    due = read_nservicebus_time(headers.get(NSERVICEBUS_DUE))
    return due or _after_delay(headers, NSERVICEBUS_SENT)


def nservicebus_delivery_due(headers: Mapping[str, Any]) -> datetime | None:
    """When this delivery was due, if an NServiceBus endpoint delayed it; None for a delivery without a delay.

    NServiceBus keeps the due time of the sender in copies, so it does not apply to its delayed retries.

    Args:
        headers: the headers of the delivery.
    """
    if HEADER_DELAY not in headers:
        return None
    return _after_delay(headers, NSERVICEBUS_RETRIED_AT) or nservicebus_due(headers)


def _after_delay(headers: Mapping[str, Any], start: str) -> datetime | None:
    if not 0 < (delay := _count(headers.get(HEADER_DELAY))) <= _LONGEST_DELAY:
        return None
    begun = read_nservicebus_time(headers.get(start))
    try:
        return None if begun is None else begun + timedelta(seconds=delay)
    except OverflowError:
        return None


def expiry_of(
    *, expiration: timedelta | None, due: datetime | None, sent_at: datetime | None, received_at: datetime
) -> datetime | None:
    """When a sender's ``expiration`` is over: counted from the due time, else from the sending, else from the receipt.

    None if the message has no ``expiration``, or if it ends after the year 9999.
    """
    try:
        return None if expiration is None else (due or sent_at or received_at) + expiration
    except OverflowError:
        return None


def _count(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_COUNT else 0


def _own_count(headers: Mapping[str, Any], name: str, *, restarted: bool) -> int:
    value = headers.get(name)
    return 0 if restarted and isinstance(value, str) else _count(value)


def _moment(value: Any) -> datetime | None:
    return from_milliseconds(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) else None
