"""Migration of waiting messages from one delay infrastructure into another."""

from __future__ import annotations

from bide.migration.counts import Migrated, WaitingCount
from bide.migration.migration import Migration
from bide.migration.schedules import SchedulesTransferred, ScheduleTransfer

__all__ = ["Migrated", "Migration", "ScheduleTransfer", "SchedulesTransferred", "WaitingCount"]
