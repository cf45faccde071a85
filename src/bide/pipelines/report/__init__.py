"""A page with plots of what the audit found: read and counted by Spark, drawn by :mod:`bide.pipelines.charts`."""

from __future__ import annotations
