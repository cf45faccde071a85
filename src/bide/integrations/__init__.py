"""Adapters for task frameworks, and the interface for clients of other libraries."""

from __future__ import annotations

from bide.integrations.declarations import Declaration
from bide.integrations.delays import DelayedPublish, Delays

__all__ = ["Declaration", "DelayedPublish", "Delays"]
