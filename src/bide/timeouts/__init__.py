"""Migration of stored NServiceBus timeouts from a database into a delay infrastructure."""

from __future__ import annotations

from bide.timeouts.migration import TimeoutMigration
from bide.timeouts.preview import EndpointPreview, preview_timeouts
from bide.timeouts.runs import RunStatus, abort_run, list_runs

__all__ = ["EndpointPreview", "RunStatus", "TimeoutMigration", "abort_run", "list_runs", "preview_timeouts"]
