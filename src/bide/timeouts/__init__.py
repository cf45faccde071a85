"""Migration of stored NServiceBus timeouts from a database into a delay infrastructure."""

from __future__ import annotations

from bide.timeouts.dispatcher import TimeoutDispatcher
from bide.timeouts.migration import TimeoutMigration
from bide.timeouts.preview import EndpointPreview, preview_timeouts
from bide.timeouts.retire import Retirement, inspect_timeout_manager, retire_timeout_manager
from bide.timeouts.runs import RunStatus, abort_run, list_runs

__all__ = [
    "EndpointPreview",
    "Retirement",
    "RunStatus",
    "TimeoutDispatcher",
    "TimeoutMigration",
    "abort_run",
    "inspect_timeout_manager",
    "list_runs",
    "preview_timeouts",
    "retire_timeout_manager",
]
