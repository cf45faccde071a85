"""Spark, killed at random many times, and a final count: ``make soak``. See docs/soak.md."""

from __future__ import annotations
