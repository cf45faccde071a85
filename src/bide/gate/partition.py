"""The gate of one partition, on one connection after another."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bide.admin.declaring import is_temporary
from bide.errors import (
    AccessRefusedError,
    BrokerError,
    NotAppliedError,
    ScheduleLogError,
    TargetNotFoundError,
    UnroutableError,
)
from bide.gate.delivery_queue import DeliveryQueue
from bide.gate.leadership import PartitionLeadership
from bide.gate.observer import GateObservers, PartitionStatus
from bide.gate.partition_index import PartitionIndex
from bide.gate.room import LogRoom
from bide.gate.spread import GateTime
from bide.runtime.logs import logger
from bide.schedules.names import ScheduleNames

log = logger(__name__)

RETRY_PAUSE: Final = 1.0
"""Seconds until a partition whose log failed is tried again."""

_LONGEST_REBUILD_PAUSE: Final = 64.0
_REBUILDS_FORGOTTEN_AFTER: Final = 600.0
"""Seconds without a rebuild of the index after which the pauses between rebuilds begin at zero again."""


@dataclass(slots=True, kw_only=True)
class Gated:
    """The counts of a gate.

    Attributes:
        delivered: messages that their target accepted.
        refused: refusals of targets; a refused message is sent again.
        undeliverable: messages sent to the undeliverable queue.
        answered: answers to operations and questions.
        claimed: occurrences that were claimed for delivery.
        cancelled: schedules that were cancelled.
        superseded: schedules that were replaced.
        skipped: runs that were skipped, because they were missed or paused.
    """

    delivered: int = 0
    refused: int = 0
    undeliverable: int = 0
    answered: int = 0
    claimed: int = 0
    cancelled: int = 0
    superseded: int = 0
    skipped: int = 0


class PartitionGate:
    """The state of a gate for one partition, which outlives a connection.

    Attributes:
        waiting: the number of schedules that wait.
        wake: set when there may be something to do.
        is_stopping: whether to finish the messages in flight, and let the partition go.
        was_let_go: whether the partition was let go.

    Args:
        number: the number of the partition.
        gate: the name of this gate.
        folder: the folder of the index.
        retention: the retention of the log, in bytes.
        time: the clock of this gate.
        counts: the counts of this gate.
        observers: the observers of this gate.
        now: seconds by the monotonic clock.
        executor: runs the calls of the index; a thread if None.
    """

    def __init__(
        self,
        number: int,
        *,
        gate: str,
        names: ScheduleNames,
        folder: Path,
        retention: int,
        time: GateTime,
        counts: Gated,
        observers: GateObservers,
        now: float,
        executor: Executor | None,
    ) -> None:
        self.number = number
        self.gate = gate
        self.names = names
        self.time = time
        self.counts = counts
        self.observers = observers
        self.waiting = 0
        self.index = PartitionIndex(folder / f"schedule.{number}.db", number, names, gate, executor=executor)
        self.leadership = PartitionLeadership(gate, now)
        self.room = LogRoom(retention)
        self.wake = asyncio.Event()
        self.deliveries = DeliveryQueue(self.wake.set)
        self.ticked_at = now
        self.is_stopping = False
        self.was_let_go = False
        self._rebuilds = 0
        self._rebuilt_at = now

    @property
    def log(self) -> str:
        """The name of the stream."""
        return self.names.log(self.number)

    def status(self, now: float) -> PartitionStatus:
        """The state of the partition, as far as it is known.

        Args:
            now: seconds by the monotonic clock.
        """
        proven_at = self.leadership.proven_at
        return PartitionStatus(
            partition=self.number,
            is_leading=self.leadership.leads(now),
            waiting=self.waiting,
            under_way=self.deliveries.pending,
            lag=None if proven_at is None else now - proven_at,
        )

    def rebuild_pause(self, now: float) -> float:
        """Seconds to wait before the index is built anew: 0 s, 1 s, 2 s ... 64 s.

        If the retention is shorter than the gate expects, rebuilds repeat, and each of them reads the whole log.

        Args:
            now: seconds by the monotonic clock.
        """
        if now - self._rebuilt_at > _REBUILDS_FORGOTTEN_AFTER:
            self._rebuilds = 0
        self._rebuilt_at = now
        self._rebuilds += 1
        return 0.0 if self._rebuilds == 1 else min(float(1 << min(self._rebuilds - 2, 9)), _LONGEST_REBUILD_PAUSE)

    def check_temporary(self, error: BrokerError) -> None:
        """Raise an error that is permanent and did not end the connection.

        Raises:
            BrokerError: a part of the log was deleted, or is full, or may not be used.
        """
        # The worker passes on what this raised for a partition.
        if isinstance(error, AccessRefusedError | NotAppliedError | ScheduleLogError):
            raise error
        if isinstance(error, UnroutableError) or (isinstance(error, TargetNotFoundError) and not is_temporary(error)):
            raise NotAppliedError(
                f"a part of the schedule log {self.names.operations!r} was deleted ({error}): start the gate again to "
                "declare it",
                reply_code=error.reply_code,
            ) from error
