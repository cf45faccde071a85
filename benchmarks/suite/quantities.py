"""Measured quantities: names, units and digits to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Quantity:
    """One column.

    Attributes:
        name: in the results.
        title: in tables, with the unit.
        digits: after the decimal point.
    """

    name: str
    title: str
    digits: int = 0

    def shown(self, value: float) -> str:
        """A value with thousands separators."""
        return f"{value:,.{self.digits}f}"


_ALL: Final = (
    Quantity("rate", "messages/s"),
    Quantity("sent", "sent, messages/s"),
    Quantity("p50", "p50, ms late", 1),
    Quantity("p99", "p99, ms late", 1),
    Quantity("max", "max, ms late", 1),
    Quantity("min", "min, ms late", 1),
    Quantity("seconds", "s", 2),
    Quantity("stop", "stop, s", 1),
    Quantity("restart", "start, s", 1),
    Quantity("drained", "drained, messages/s"),
    Quantity("client_cpu", "client CPU, µs/message", 1),
    Quantity("broker_cpu", "broker CPU, µs/message"),
    Quantity("cpu_ms", "CPU, ms", 1),
    Quantity("memory", "memory, MB", 1),
    Quantity("growth", "growth, MB", 1),
    Quantity("disk", "disk, MB", 1),
    Quantity("bytes_memory", "memory, bytes/message"),
    Quantity("bytes_disk", "disk, bytes/message"),
    Quantity("gate_cpu", "gate CPU, µs/message", 1),
    Quantity("behind", "gate behind, s", 2),
    Quantity("publish_p50", "publish p50, ms", 1),
    Quantity("publish_p99", "publish p99, ms", 1),
    Quantity("cancel_p50", "cancel p50, ms", 1),
    Quantity("cancel_p99", "cancel p99, ms", 1),
    Quantity("times_p50", "p50, publishes", 1),
    Quantity("times_p99", "p99, publishes", 1),
    Quantity("takeover_p50", "take-over p50, s", 2),
    Quantity("takeover_max", "take-over max, s", 2),
    Quantity("gate_memory", "gate, MB"),
    Quantity("gate_index", "index on disk, MB"),
    Quantity("broker_memory", "broker growth, MB"),
    Quantity("page_p50", "page of 100 p50, ms", 1),
    Quantity("page_max", "page of 100 max, ms", 1),
    Quantity("rebuild", "rebuild, s", 1),
    Quantity("rebuild_cpu", "rebuild gate CPU, s", 1),
    Quantity("rebuild_memory", "rebuild gate peak, MB"),
    Quantity("move_tenth", "move a tenth, s", 2),
    Quantity("tenth", "cancel a tenth, s", 2),
    Quantity("header_bytes", "headers received, bytes"),
    Quantity("early", "early"),
    Quantity("lost", "lost"),
    Quantity("sustained", "sustained"),
)

QUANTITIES: Final = {one.name: one for one in _ALL}
"""In the order of the columns."""
