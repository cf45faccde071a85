"""Conversion of local times of a zone to moments, and back.

Twice a year most zones skip an hour or repeat one. ``zoneinfo`` resolves both silently; here they are explicit.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from bide.durations import MICROSECOND
from bide.errors import InvalidRecurrenceError

_SECOND: Final = timedelta(seconds=1)


def zone_of(name: str) -> ZoneInfo:
    """The zone of an IANA name, such as ``Europe/Berlin``.

    Raises:
        InvalidRecurrenceError: this machine does not know the zone.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise InvalidRecurrenceError(
            f"the time zone {name!r} is unknown: give an IANA name such as 'Europe/Berlin', and install the package "
            "tzdata where the system has no time zone database"
        ) from error


def local_of(moment: datetime, zone: ZoneInfo) -> datetime:
    """The time that clocks of the zone show at a moment, without a zone."""
    return moment.astimezone(zone).replace(tzinfo=None, fold=0)


def first_moment(local: datetime, zone: ZoneInfo) -> datetime:
    """When clocks of the zone first show this local time, or a later one if they skip it, in UTC.

    The result grows with the local time, or stays the same.
    """
    moment = local.replace(tzinfo=zone).astimezone(UTC)
    if local_of(moment, zone) == local:
        return moment
    # The local time is skipped. With the offset before the gap, its moment is after the transition; with the offset
    # after the gap, it is before the transition.
    early = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return transition(early, moment, zone)


def transition(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """The first second at which the offset of the zone is the one at *after*; all moments in UTC."""
    # Offsets change at whole seconds.
    before, after = before.replace(microsecond=0), after + (-after.microsecond * MICROSECOND) % _SECOND
    offset = after.astimezone(zone).utcoffset()
    while after - before > _SECOND:
        middle = before + (after - before) // (2 * _SECOND) * _SECOND
        if middle.astimezone(zone).utcoffset() == offset:
            after = middle
        else:
            before = middle
    return after


def next_transition(moment: datetime, until: datetime, zone: ZoneInfo) -> datetime | None:
    """The first moment in UTC, after *moment* and at *until* at the latest, at which the offset of the zone changes.

    The search looks once a day. It misses two changes within a day that cancel each other; no zone has had such changes
    since 1970.
    """
    here, offset = moment, moment.astimezone(zone).utcoffset()
    while here < until:
        there = min(here + timedelta(days=1), until)
        if there.astimezone(zone).utcoffset() != offset:
            return transition(here, there, zone)
        here = there
    return None
