"""The process that a :class:`bide.WaitingHall` needs: it sends each message on, hop by hop, and loses none."""

from __future__ import annotations

from bide.relay.connection_loop import Relayed
from bide.relay.worker import PREFETCH, Relay

__all__ = ["PREFETCH", "Relay", "Relayed"]
