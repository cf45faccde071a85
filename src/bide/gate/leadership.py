"""The leading gate of a partition, as all gates derive it from the beats in the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from bide.schedules.records import Beat

BEAT_EVERY: Final = 1.0
"""Seconds between two beats of a gate."""

TAKE_OVER_AFTER: Final = 3.0
"""Seconds without a beat after which another gate takes over."""

REPEAT_AFTER: Final = 60.0
"""Seconds after which a gate sends a beat although the last one is unread."""

CURRENT_FOR: Final = 5.0
"""Seconds for which a beat that was read back proves that its gate is not behind."""


class PartitionLeadership:
    """The leader of one partition, from the beats in its log.

    Each gate appends a beat every second. A beat says whether its gate leads, and the offset of the last record that
    its gate had read. Three rules give all gates that read the log the same leader:

    1. A beat whose gate had not read the leader's latest beat is ignored.
    2. Any other beat that says that its gate leads makes that gate the leader.
    3. A leader that says that it no longer leads leaves the partition without one.

    So of two gates that take over at once, the first one in the log leads, and a late copy of a beat changes nothing.

    A gate that begins to read in the middle of a log may take another one for the leader at first, until it reads the
    leader's next beat that no other beat overlaps. Two leaders cost time and do no harm: claims decide who delivers.

    All times are seconds by the monotonic clock of this process.

    Args:
        gate: the name of this gate, different at each start.
        now: the present.

    Attributes:
        leader: the name of the leading gate; None if there is none, or none is known.
        has_missed: whether this gate has read a beat of its own but not its previous one, which retention removed.
        proven_at: when this gate sent the latest beat that it has read back; None before the first one.
    """

    def __init__(self, gate: str, now: float) -> None:
        self.leader: str | None = None
        self.has_missed = False
        self.proven_at: float | None = None
        self._gate = gate
        self._leader_offset = -1
        self._heard_leader_at = now
        self._heard_at: dict[str, float] = {}
        self._unread: dict[int, float] = {}
        self._unread_leading = set[int]()
        self._next_beat_at = now

    def read(self, offset: int, beat: Beat, now: float) -> None:
        """Take the next beat of the log."""
        self._heard_at[beat.gate] = now
        if beat.gate == self._gate:
            self._unread_leading.discard(beat.clock)
        if beat.gate == self._gate and (sent_at := self._unread.pop(beat.clock, None)) is not None:
            self.proven_at = sent_at
            self.has_missed = self.has_missed or any(other < sent_at for other in self._unread.values())
        if beat.after < self._leader_offset:
            return
        if beat.leads or beat.gate == self.leader:
            self.leader = beat.gate if beat.leads else None
            self._leader_offset = offset
            self._heard_leader_at = now
            if not beat.leads:
                # The gate is about to end, or leads more partitions than others, so it is not a candidate.
                del self._heard_at[beat.gate]

    def sent(self, clock: int, now: float, *, leads: bool) -> None:
        """Remember a beat that was sent. All beats are sent on one channel, in order.

        Args:
            clock: the wall clock in the beat.
            leads: whether the beat says that this gate leads.
        """
        self._unread[clock] = now
        if leads:
            self._unread_leading.add(clock)
        self._next_beat_at = now + BEAT_EVERY

    def on_connection_lost(self) -> None:
        """Forget the beats that were sent, which may never be in the log, and whether this gate was current."""
        self._unread.clear()
        self._unread_leading.clear()
        self.has_missed = False
        self.proven_at = None

    @property
    def may_come_to_lead(self) -> bool:
        """Whether a beat that says that this gate leads was sent, and not read back."""
        return bool(self._unread_leading)

    def is_current(self, now: float) -> bool:
        """Whether this gate has read a beat of its own that it sent a short while ago."""
        return self.proven_at is not None and now < self.proven_at + CURRENT_FOR

    def leads(self, now: float) -> bool:
        """Whether this gate claims, delivers, answers, and carries the state forward."""
        return self.leader == self._gate and self.is_current(now)

    def alive(self, now: float) -> set[str]:
        """The gates whose beats were read a short while ago."""
        self._heard_at = {gate: at for gate, at in self._heard_at.items() if now - at < TAKE_OVER_AFTER}
        return set(self._heard_at)

    def next_beat(self, now: float, *, may_take: bool, let_go: bool = False, is_asked: bool = False) -> bool | None:
        """Whether the beat to send now says that this gate leads; None if it should send none.

        A gate has one unread beat at a time, because a gate that is behind does not know how full the log is. But
        retention may have removed that beat, so the gate sends another one after a while.

        Args:
            may_take: whether to take over at once if there is no leader, as :func:`may_take` says.
            let_go: whether to leave the partition to others.
            is_asked: whether a question waits for the next beat.
        """
        if self._unread:
            is_overdue = now - max(self._unread.values()) >= REPEAT_AFTER
            return False if is_overdue else None
        leads = self.leader == self._gate
        if let_go and leads:
            return False
        is_silent = now - self._heard_leader_at >= TAKE_OVER_AFTER
        takes_over = not leads and not let_go and (is_silent or (self.leader is None and may_take))
        if takes_over and self.is_current(now):
            return True
        return leads if is_asked or now >= self._next_beat_at else None


def partition_to_release(gate: str, leaders: Mapping[int, str | None], alive: Collection[str]) -> int | None:
    """A partition to leave to another gate, which leads at least two fewer; None if there is none.

    Args:
        leaders: the leader of each partition.
        alive: gates whose beats were read a short while ago in every partition.
    """
    if None in leaders.values() or not _leads_more(gate, leaders, alive, by=2):
        return None
    return max(partition for partition, leader in leaders.items() if leader == gate)


def may_take(gate: str, leaders: Mapping[int, str | None], alive: Collection[str]) -> bool:
    """Whether a gate takes a partition without a leader at once. If it leads more partitions than another gate, it
    waits, so that the partitions spread evenly."""
    return not _leads_more(gate, leaders, alive, by=1)


def _leads_more(gate: str, leaders: Mapping[int, str | None], alive: Collection[str], *, by: int) -> bool:
    counts = Counter(leaders.values())
    return any(counts[gate] >= counts[other] + by for other in alive if other != gate)
