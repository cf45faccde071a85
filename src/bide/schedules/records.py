"""Records of the schedule log, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from bide.schedules.entries import Outcome, StateEntry
from bide.schedules.message import ScheduledMessage
from bide.schedules.requests import RequestId

Action = Literal["cancel", "move", "pause", "resume", "run-now"]
"""A change of schedules that wait."""

ACTIONS: Final[tuple[Action, ...]] = get_args(Action)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFilter:
    """Conditions for the schedules that an operation changes; absent ones hold for all.

    Attributes:
        prefix: the start of the key.
        target: ``q:<queue>`` or ``x:<exchange>``.
        due_from: due at this time or later, in milliseconds since the Unix epoch.
        due_before: due before this time.
    """

    prefix: str = ""
    target: str | None = None
    due_from: int | None = None
    due_before: int | None = None

    def matches(self, key: str, target: str, due: int) -> bool:
        """Whether a schedule with these values meets the conditions."""
        return (
            key.startswith(self.prefix)
            and (self.target is None or self.target == target)
            and (self.due_from is None or due >= self.due_from)
            and (self.due_before is None or due < self.due_before)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSchedule:
    """An application schedules a message, or replaces the schedule that waits under the key.

    Attributes:
        nominal: the first occurrence before jitter, in milliseconds since the Unix epoch.
        due: the due time of the first occurrence, in milliseconds since the Unix epoch.
        recurrence: rules for the following occurrences, as :meth:`bide.schedules.recurrence.Recurrence.spec` writes
            them; None for a single message. The fold does not read it.
        if_absent: do nothing if a schedule waits under the key.
        if_version: do nothing unless the version that waits is this one.
    """

    request: RequestId
    key: str
    target: str
    routing_key: str = ""
    nominal: int
    due: int
    recurrence: Mapping[str, Any] | None = None
    if_absent: bool = False
    if_version: str | None = None
    message: ScheduledMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSchedule:
    """An application changes the schedule that waits under a key, or all that a filter matches.

    Attributes:
        key: the key of the schedule; None if ``filter`` is given.
        due: for a move, the new due time of the next occurrence, in milliseconds since the Unix epoch.
        at: the time of a resume by its sender's clock. Occurrences of a recurring schedule before it are skipped.
    """

    request: RequestId
    action: Action
    key: str | None = None
    filter: ScheduleFilter | None = None
    due: int | None = None
    at: int | None = None
    if_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedOccurrence:
    """One occurrence that a gate claims.

    The claim holds only while the schedule is exactly as the gate saw it. So it names the version, which each change
    renews, and the nominal and due times, which each occurrence renews.

    Attributes:
        skip: pass over the occurrence instead of delivering it.
        next_nominal, next_due: the following occurrence, None after the last. The claiming gate computes it, because
            time zone data differ between machines; the fold does no arithmetic with calendars.
    """

    key: str
    version: str
    nominal: int
    due: int
    skip: bool = False
    next_nominal: int | None = None
    next_due: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A gate claims occurrences that are due."""

    gate: str
    items: tuple[ClaimedOccurrence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedOccurrence:
    """A claimed occurrence that was delivered or set aside."""

    occurrence: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A gate reports occurrences that have ended."""

    gate: str
    items: tuple[EndedOccurrence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """An hour has passed by the monotonic clock of a gate. The fold counts in ticks how long it remembers requests.

    Attributes:
        number: the previous tick plus one. Any other number changes nothing, so that the ticks of two gates count once.
    """

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A gate is alive. Beats also let readers notice records that retention removed before they were read.

    Attributes:
        gate: its name.
        leads: whether it leads the partition, or takes it over.
        clock: its wall clock, in milliseconds since the Unix epoch.
        after: the offset of the last record that it had applied.
        count: how many records it had read up to that one since the log began.
        snapshot: offset of the first chunk of the latest complete snapshot that it knows: a gate that starts without an
            index begins to read there.
    """

    gate: str
    leads: bool = False
    clock: int
    after: int
    count: int
    snapshot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk:
    """A part of the state as of one offset, carried forward in the log.

    Attributes:
        cycle: names the snapshot that it belongs to.
        as_of: offset of the last record that the state contains. All chunks of a cycle have the same.
        count: records read up to that one since the log began.
        tick: the tick of the state.
        number: position of the chunk in its cycle, from 0 on.
        is_last: whether the cycle is complete with it.
    """

    cycle: str
    as_of: int
    count: int
    tick: int
    number: int
    is_last: bool
    entries: tuple[StateEntry, ...]


Operation = AddSchedule | ChangeSchedule
GateRecord = Claim | Done | Tick | Beat | SnapshotChunk
ScheduleRecord = Operation | GateRecord
