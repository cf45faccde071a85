"""Counts of a migration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCount:
    """The ready messages of one delay queue.

    Attributes:
        wait: how long each message waits in this queue; zero if the queue has no TTL.
    """

    queue: str
    messages: int
    wait: timedelta


@dataclass(slots=True, kw_only=True)
class Migrated:
    """The counts of a migration. The sum of ``taken`` is ``moved`` plus the sum of ``set_aside``.

    Attributes:
        taken: messages that were taken and are finished, by queue.
        moved: messages that the other infrastructure or the target has confirmed.
        overdue: moved messages that were due already, and went to their target at once.
        uncertain: moved messages whose due time was known only within bounds.
        longest_uncertainty: the largest distance between these bounds: how late such a message may be at most.
        set_aside: messages that were set aside, by reason.
        redelivered: messages that were delivered before, for example to a migration that was killed. Each of them may
            have a copy already.
        left: messages that remain at the end, by queue.
        counts_all: whether ``left`` includes dead letters between two queues, and queues that the settings of the
            layout do not name. Only the management API knows these.
        is_finished: whether the run reached its end; False if it was stopped, or ended although queues counted messages
            that they did not deliver.
    """

    taken: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    overdue: int = 0
    uncertain: int = 0
    longest_uncertainty: timedelta = timedelta(0)
    set_aside: Counter[str] = field(default_factory=Counter)
    redelivered: int = 0
    left: dict[str, int] = field(default_factory=dict)
    counts_all: bool = False
    is_finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON; times are in seconds."""
        return {
            "taken": dict(self.taken),
            "moved": self.moved,
            "overdue": self.overdue,
            "uncertain": self.uncertain,
            "longest_uncertainty": self.longest_uncertainty.total_seconds(),
            "set_aside": dict(self.set_aside),
            "redelivered": self.redelivered,
            "left": self.left,
            "counts_all": self.counts_all,
            "finished": self.is_finished,
        }
