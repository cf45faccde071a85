"""The report of an audit: a page with plots, counted by Spark."""

from __future__ import annotations
