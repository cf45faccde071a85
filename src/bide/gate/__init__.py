"""The gate of a schedule log, the process that delivers scheduled messages."""

from __future__ import annotations

from bide.gate.observer import GateEvent, GateObserver, PartitionStatus
from bide.gate.partition import Gated
from bide.gate.worker import Gate

__all__ = ["Gate", "GateEvent", "GateObserver", "Gated", "PartitionStatus"]
