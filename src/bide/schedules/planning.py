"""Items of a claim: the occurrence that is due, and the following one."""

from __future__ import annotations

from typing import Final

from bide.schedules.entries import WaitingSchedule
from bide.schedules.records import ClaimedOccurrence
from bide.schedules.recurrence import Recurrence

MISSED_AFTER: Final = 60_000
"""Milliseconds after which a run counts as missed."""


def plan(one: WaitingSchedule, now: int) -> ClaimedOccurrence:
    """The item of a claim for a schedule that is due.

    Runs before a resume are skipped. Of runs that were missed, ``catch_up`` says which are made up for. The rest is
    skipped in one item, after which the schedule may be due again.

    Args:
        now: the time by the gate's clock, in milliseconds since the Unix epoch.

    Raises:
        BideError: the recurrence cannot be read on this machine.
    """
    if one.recurrence is None:
        return ClaimedOccurrence(key=one.key, version=one.version, nominal=one.nominal, due=one.due)
    recurrence = Recurrence.parse(one.recurrence)
    wanted = _wanted(one, recurrence, now)
    if wanted == one.nominal:
        return _item(one, recurrence, recurrence.after(one.nominal), skip=False)
    return _item(one, recurrence, wanted, skip=True)


def _wanted(one: WaitingSchedule, recurrence: Recurrence, now: int) -> int | None:
    """The run to deliver next: this one, or a later one; None if there is none."""
    if one.resumed_at is not None and one.due < one.resumed_at:
        return recurrence.after(one.resumed_at - 1)
    if recurrence.catch_up == "all" or now - one.due <= MISSED_AFTER:
        return one.nominal
    latest = recurrence.latest(one.nominal, now)
    if recurrence.catch_up == "last" or now - latest <= MISSED_AFTER:
        return latest
    return recurrence.after(now)


def _item(one: WaitingSchedule, recurrence: Recurrence, following: int | None, *, skip: bool) -> ClaimedOccurrence:
    return ClaimedOccurrence(
        key=one.key,
        version=one.version,
        nominal=one.nominal,
        due=one.due,
        skip=skip,
        next_nominal=following,
        next_due=None if following is None else recurrence.due(one.id, following),
    )
