"""Pipelines on Spark: schedule, replay, audit, plan and report (``bide pipeline``)."""

from __future__ import annotations
