"""The relay of a :class:`bide.WaitingHall`, which sends its messages on without losing any."""

from __future__ import annotations

from bide.relay.connection_loop import Relayed
from bide.relay.worker import PREFETCH, Relay

__all__ = ["PREFETCH", "Relay", "Relayed"]
