"""The spread of partitions over the gates, and the clock of this gate."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from bide.amqp.connection import Connection
from bide.durations import to_milliseconds
from bide.gate.leadership import PartitionLeadership, may_take, partition_to_release
from bide.schedules.gate_clock import GateClock
from bide.schedules.records import Beat

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_HOST: Final = 100
_LESS_THAN_A_MILLISECOND: Final = timedelta(microseconds=999)


def new_gate_name() -> str:
    """A name for a gate, different at each start: host, machine and a random number.

    Containers of one machine have several host names and one clock, so the id of its boot identifies the machine.
    """
    host = socket.gethostname()[:_MAX_HOST] or "unknown"
    try:
        machine = _BOOT_ID.read_text().strip()[:8]
    except OSError:
        machine = host
    return f"{host}/{machine}/{secrets.token_hex(4)}"


def _machine(gate: str) -> str:
    return gate.split("/")[1] if gate.count("/") == 2 else gate


class LeadershipSpread:
    """The leaders of all partitions, as this gate knows them.

    Args:
        gate: the name of this gate.
        monotonic: seconds by the monotonic clock.
    """

    def __init__(self, gate: str, partitions: Sequence[PartitionLeadership], monotonic: Callable[[], float]) -> None:
        self._gate = gate
        self._partitions = partitions
        self._monotonic = monotonic

    def may_take(self, now: float) -> bool:
        """Whether to take a partition without a leader at once."""
        return may_take(self._gate, self._leaders(), self._alive(now))

    def to_release(self, now: float) -> int | None:
        """A partition to leave to another gate."""
        return partition_to_release(self._gate, self._leaders(), self._alive(now))

    def led(self) -> list[int]:
        """The partitions that this gate leads now."""
        now = self._monotonic()
        return [number for number, one in enumerate(self._partitions) if one.leads(now)]

    def _leaders(self) -> dict[int, str | None]:
        return {number: one.leader for number, one in enumerate(self._partitions)}

    def _alive(self, now: float) -> set[str]:
        return set.intersection(*(one.alive(now) for one in self._partitions))


class GateTime:
    """The clock by which a gate claims, for all its partitions.

    Args:
        gate: the name of this gate.
    """

    def __init__(self, gate: str) -> None:
        self._machine = _machine(gate)
        self._clock = GateClock()

    def now(self, connection: Connection) -> int:
        """The time for claims, in milliseconds since the Unix epoch."""
        return self._clock.now(wall=self.wall(connection), monotonic=int(connection.monotonic() * 1000))

    def wall(self, connection: Connection) -> int:
        """The wall clock, in milliseconds since the Unix epoch, rounded down: nothing is claimed too early."""
        return to_milliseconds(connection.now() - _LESS_THAN_A_MILLISECOND)

    def hear(self, connection: Connection, beat: Beat) -> None:
        """Compare with the clock of another gate."""
        if _machine(beat.gate) != self._machine:
            self._clock.hear(self.wall(connection), beat.clock)
