"""Report of an audit: a page with plots, counted by Spark or in this process."""

from __future__ import annotations
