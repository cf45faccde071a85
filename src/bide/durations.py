"""Delays and due times as ``timedelta`` and aware ``datetime``."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from bide.errors import InvalidDelayError, InvalidDueTimeError

_UNITS: Final = {
    1_000: ("ms", "millisecond", "milliseconds"),
    1_000_000: ("s", "sec", "second", "seconds"),
    60_000_000: ("m", "min", "minute", "minutes"),
    3_600_000_000: ("h", "hour", "hours"),
    86_400_000_000: ("d", "day", "days"),
    604_800_000_000: ("w", "week", "weeks"),
}
_MICROSECONDS_PER_UNIT: Final = {name: size for size, names in _UNITS.items() for name in names}
_MAX_TEXT_LENGTH: Final = 200
_UNIT: Final = "|".join(sorted(_MICROSECONDS_PER_UNIT, key=len, reverse=True))
_NUMBER_AND_UNIT: Final = re.compile(rf"(\d+(?:\.\d+)?)\s*({_UNIT})\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\d+(\.\d+)?", re.ASCII)
_ISO_DURATION: Final = re.compile(
    r"P(?:(?P<w>\d+)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?=\d)(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
LATEST: Final = datetime.max.replace(tzinfo=UTC)
"""The first and the last time that Python can represent, in the years 1 and 9999."""

LATEST_MILLISECOND: Final = 253_402_300_799_999
""":data:`LATEST`, rounded down, in milliseconds since the Unix epoch."""

MILLISECOND: Final = timedelta(milliseconds=1)
MICROSECOND: Final = timedelta(microseconds=1)
_ACCEPTED_FORMS: Final = "give a timedelta, text such as '1h30m', '90s' or '250ms', or ISO 8601 such as 'PT1H30M'"

DelayLike = timedelta | str
"""A delay: a ``timedelta``, or text such as ``"1h30m"``, ``"90s"``, ``"PT1H30M"``."""

DueTimeLike = datetime | str
"""A due time: an aware ``datetime``, or ISO 8601 text with an offset."""


LONGEST: Final = timedelta(days=999_999_999)
"""The longest delay. Rounding up negates a delay, and the negative of ``timedelta.max`` overflows."""


def parse_delay(value: DelayLike) -> timedelta:
    """A delay as a ``timedelta``.

    Text is a sum of numbers with units (``ms``, ``s``, ``m`` or ``min``, ``h``, ``d``, ``w``, or words such as
    ``3 days``), or an ISO 8601 duration. Numbers without a unit are not accepted. Years and months are not accepted,
    because their length varies. Fractions of a microsecond are rounded up.

    Raises:
        InvalidDelayError: the delay is negative, longer than :data:`LONGEST`, or in none of these forms.
    """
    if isinstance(value, timedelta):
        delay = value
    elif isinstance(value, str):
        delay = _from_text(value.strip())
    else:
        raise InvalidDelayError(f"the delay {value!r} has no unit: {number_advice(value)}{_ACCEPTED_FORMS}")
    if delay < timedelta(0):
        raise InvalidDelayError(f"the delay {format_delay(delay)} is negative: give zero or more")
    if delay > LONGEST:
        raise InvalidDelayError(f"the delay {format_delay(delay)} is longer than {LONGEST.days} d: give a shorter one")
    return delay


def _from_text(text: str) -> timedelta:
    if len(text) > _MAX_TEXT_LENGTH:
        raise InvalidDelayError(
            f"the delay {text[:40]!r}... of {len(text)} characters cannot be read: {_ACCEPTED_FORMS}"
        )
    if text.startswith("-"):
        raise InvalidDelayError(f"the delay {text!r} is negative: give zero or more")
    iso = _ISO_DURATION.fullmatch(text.upper())
    if iso:
        parts = [(number, unit) for unit, number in iso.groupdict().items() if number]
    else:
        parts = _NUMBER_AND_UNIT.findall(text)
        if "".join(text.split()) != "".join(number + unit for number, unit in parts):
            parts = []
    if not parts and _NUMBER.fullmatch(text):
        raise InvalidDelayError(f"the delay {text!r} has no unit: {number_advice(text)}{_ACCEPTED_FORMS}")
    if not parts:
        raise InvalidDelayError(f"the delay {text!r} cannot be read: {_ACCEPTED_FORMS}")
    try:
        return timedelta(microseconds=sum(_microseconds(number, unit) for number, unit in parts))
    except OverflowError as error:
        raise InvalidDelayError(f"the delay {text!r} is longer than {LONGEST.days} d: give a shorter one") from error


def number_advice(value: object) -> str:
    """The start of the advice for a number without a unit; empty for other values. Other libraries take seconds, or
    milliseconds."""
    text = str(value)
    if not _NUMBER.fullmatch(text):
        return ""
    return f"give '{text}s' if it is in seconds, or '{text}ms' in milliseconds; "


def _microseconds(number: str, unit: str) -> int:
    """Microseconds, rounded up. Computed exactly: a float cannot hold 1.001 s."""
    whole, _, decimals = number.partition(".")
    scale: int = 10 ** len(decimals)
    return -(-int(whole + decimals) * _MICROSECONDS_PER_UNIT[unit] // scale)


def format_delay(delay: timedelta) -> str:
    """A delay as text: ``7 d``, ``3199 d 23:59:59.99``, ``0:00:10``, ``-0:00:01``."""
    sign = "-" if delay < timedelta(0) else ""
    # The most negative timedelta has no positive counterpart.
    delay = abs(max(delay, -LONGEST))
    hours, rest = divmod(delay.seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    text = f"{hours}:{minutes:02}:{seconds:02}"
    if delay.microseconds:
        text += f".{delay.microseconds:06}".rstrip("0")
    if not delay.days:
        return sign + text
    return f"{sign}{delay.days} d" + (f" {text}" if delay.seconds or delay.microseconds else "")


def parse_due_time(value: DueTimeLike) -> datetime:
    """A due time as an aware ``datetime`` in UTC.

    Raises:
        InvalidDueTimeError: the due time has no time zone, or is not ISO 8601.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError as error:
            raise InvalidDueTimeError(
                f"the due time {value!r} cannot be read: give ISO 8601 with an offset, as 2026-12-24T18:00:00+01:00"
            ) from error
    if not isinstance(value, datetime):
        raise InvalidDueTimeError(f"the due time {value!r} is not a datetime: give one with a time zone")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidDueTimeError(
            f"the due time {value.isoformat()} has no time zone: give an aware datetime, such as "
            f"{value.isoformat()}+00:00"
        )
    try:
        return value.astimezone(UTC)
    except OverflowError as error:
        raise InvalidDueTimeError(f"the due time {value.isoformat()} lies outside the years 1 to 9999") from error


def sending_time(now: datetime | None = None) -> datetime:
    """The start of a delay: the current time, rounded down to a millisecond.

    The broker also rounds down the time at which a message enters a queue. A due time counted from the exact time would
    be up to a millisecond after the end of the wait, and on a fast machine the message would arrive before it.

    Args:
        now: the current time; None reads this machine's clock.
    """
    if now is None:
        now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1_000 * 1_000)


def to_milliseconds(moment: datetime) -> int:
    """Milliseconds since the Unix epoch, rounded up: a due time is never stamped too early."""
    # Integer arithmetic is faster than dividing a timedelta, and each message sent has two such times.
    span = moment - EPOCH
    return (span.days * 86_400 + span.seconds) * 1_000 - (-span.microseconds // 1_000)


def from_milliseconds(value: int) -> datetime | None:
    """The time this many milliseconds after the Unix epoch, or None beyond the year 9999."""
    try:
        return EPOCH + timedelta(milliseconds=value)
    except OverflowError:
        return None


def to_microseconds(moment: datetime) -> int:
    """Microseconds since the Unix epoch, as Spark and Arrow store times."""
    return (moment - EPOCH) // MICROSECOND


def from_microseconds(value: int) -> datetime:
    """The time this many microseconds after the Unix epoch.

    Raises:
        OverflowError: the time lies outside the years 1 to 9999.
    """
    return EPOCH + timedelta(microseconds=value)
