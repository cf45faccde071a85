"""RPC: caller, server, and blocking caller."""

from __future__ import annotations

from bide.messaging.rpc_caller import ERROR_HEADER, Caller, Replies
from bide.messaging.rpc_server import serve
from bide.messaging.rpc_sync import SyncCaller

__all__ = ["ERROR_HEADER", "Caller", "Replies", "SyncCaller", "serve"]
