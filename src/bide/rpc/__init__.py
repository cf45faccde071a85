"""Requests and replies: the caller's side, the server's, and a caller that blocks."""

from __future__ import annotations

from bide.rpc.caller import ERROR_HEADER, Caller, Replies
from bide.rpc.server import serve
from bide.rpc.sync import SyncCaller

__all__ = ["ERROR_HEADER", "Caller", "Replies", "SyncCaller", "serve"]
