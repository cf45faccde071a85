"""CPU time and memory of a process, as Linux reports them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from benchmarks.suite.task import Values

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_MICROSECONDS: Final = 1e6


def processor_times(pid: int) -> tuple[float, float]:
    """Processor time that a process has used, in user mode and in system mode, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, in user and system mode."""
    return sum(processor_times(pid))


def resident_bytes(pid: int | None = None) -> int:
    """Memory of a process that is in use, of this one by default."""
    pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def largest_bytes(pid: int) -> int:
    """The largest memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(found) * 1024


class Meter:
    """Time, and processor time of this process and of the broker, since it was made.

    Args:
        pid: of the broker's node.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._broker = processor_seconds(pid)
        self._own = time.process_time()
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._start

    def broker_cpu(self, messages: int) -> float:
        """Microseconds of the broker's processor time per message."""
        return (processor_seconds(self._pid) - self._broker) / messages * _MICROSECONDS

    def read(self, messages: int) -> Values:
        """Messages per second, and what each of them has cost."""
        seconds, own = self.seconds, time.process_time() - self._own
        return {
            "rate": messages / seconds,
            "client_cpu": own / messages * _MICROSECONDS,
            "broker_cpu": self.broker_cpu(messages),
        }
