"""Work on many messages at once, on Spark: each pipeline as a function of tables, and as ``bide pipeline``."""

from __future__ import annotations
