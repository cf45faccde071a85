"""The plan of a run: workloads, faults, rates and durations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from bide.check.faults.broker import DISK, LEADERS, MEMORY, POLICY_CHANGE
from bide.check.faults.clock import DRIFT, STEP
from bide.check.faults.disk import FULL
from bide.check.faults.fault import Fault
from bide.check.faults.network import ONE_WAY, PARTITION
from bide.check.faults.nodes import KILL, KILL_PROCESS, PAUSE, REPLACE
from bide.check.workloads.base import CheckWorkload
from bide.check.workloads.gate import GateWorkload
from bide.check.workloads.isolated import IsolatedWorkload
from bide.check.workloads.queues import BulkWorkload, QueuesWorkload
from bide.check.workloads.relay import RelayWorkload
from bide.check.workloads.retries import RetriesWorkload
from bide.check.workloads.spark import SparkWorkload
from bide.check.workloads.topic import TopicWorkload
from bide.errors import InvalidInputError

WORKLOADS: Final[Mapping[str, type[CheckWorkload]]] = {
    one.name: one
    for one in (
        QueuesWorkload,
        TopicWorkload,
        IsolatedWorkload,
        RetriesWorkload,
        GateWorkload,
        RelayWorkload,
        BulkWorkload,
        SparkWorkload,
    )
}

ALL_WORKLOADS: Final = tuple(name for name in WORKLOADS if name != SparkWorkload.name)
"""The workloads of ``all``. Spark has to be asked for, because it needs Java, and as much of the machine as a node."""

FAULTS: Final[Mapping[str, Fault]] = {
    one.name: one
    for one in (
        *(KILL, PAUSE, REPLACE, KILL_PROCESS),
        *(PARTITION, ONE_WAY),
        *(LEADERS, POLICY_CHANGE, MEMORY, DISK, FULL),
        *(STEP, DRIFT),
    )
}

_WITH_PROCESSES: Final = frozenset({GateWorkload.name, RelayWorkload.name})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault of the plan.

    Attributes:
        pause: seconds between the beginning of the previous fault and that of this one.
        length: seconds from the beginning to the repair.
        choice: a number from 0 to 1 that selects the node.
    """

    fault: Fault
    pause: float
    length: float
    choice: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """The workloads and faults of a run.

    Attributes:
        duration: how long messages are sent.
        rate: messages per second of all workloads together.
        longest: the longest delay of a message.
        every: the mean time between the beginnings of two faults.
        length: the longest time from a fault to its repair.
        at_once: the largest number of simultaneous faults.
        patience: how long the run waits at its end for messages that have not arrived.

    Raises:
        InvalidInputError: a name is unknown, a value is out of range, or faults do not fit the workloads.
    """

    seed: int
    workloads: tuple[str, ...]
    faults: tuple[str, ...] = ()
    duration: timedelta = timedelta(minutes=1)
    rate: float = 100.0
    longest: timedelta = timedelta(seconds=20)
    every: timedelta = timedelta(seconds=20)
    length: timedelta = timedelta(seconds=10)
    at_once: int = 1
    patience: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise InvalidInputError(f"{name!r} is not a workload: give one of {', '.join(WORKLOADS)}")
        for name in self.faults:
            if name not in FAULTS:
                raise InvalidInputError(f"{name!r} is not a fault: give one of {', '.join(FAULTS)}")
        if not self.workloads:
            raise InvalidInputError(f"no workload was given: give one of {', '.join(WORKLOADS)}")
        if self.needs("processes") and not _WITH_PROCESSES & set(self.workloads):
            raise InvalidInputError(
                "kill-process kills gates and relays, and no workload has one: add the workload gate or relay"
            )
        for name, value, least, unit in (
            ("rate", self.rate, 0.1, ""),
            ("duration", self.duration.total_seconds(), 1, " s"),
            ("longest", self.longest.total_seconds(), 0.05, " s"),
            ("every", self.every.total_seconds(), 1, " s"),
            ("at_once", self.at_once, 1, ""),
        ):
            if value < least:
                raise InvalidInputError(f"{name}={value:g}{unit} is too small: give {least:g}{unit} or more")

    def check_requirements(self) -> None:
        """Check that this machine has what the workloads need.

        Raises:
            InvalidInputError: a package or a program is missing.
        """
        for name in self.workloads:
            if (missing := WORKLOADS[name].missing()) is not None:
                raise InvalidInputError(f"the workload {name}: {missing}")

    def check_no_faults(self) -> None:
        """Check that the plan leaves the cluster as it is.

        Raises:
            InvalidInputError: the plan has faults.
        """
        if self.faults:
            raise InvalidInputError(
                f"the fault {self.faults[0]} is for clusters that bide started: omit --fault, or omit --url"
            )

    def needs(self, what: str) -> bool:
        """Whether one of the faults has this need."""
        return any(FAULTS[name].need == what for name in self.faults)

    def planned_faults(self) -> Iterator[PlannedFault]:
        """Yield faults without end. Equal seeds yield equal faults."""
        rng = random.Random(self.seed)  # noqa: S311 (repeatable, not secret)
        every, length = self.every.total_seconds(), self.length.total_seconds()
        while self.faults:
            yield PlannedFault(
                fault=FAULTS[rng.choice(self.faults)],
                pause=every * rng.uniform(0.5, 1.5),
                length=length * rng.uniform(0.2, 1.0),
                choice=rng.random(),
            )
