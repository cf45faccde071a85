"""Report of an audit: a page with plots, whose figures Spark computes."""

from __future__ import annotations
