"""Spark killed at random, over and over, and everything counted afterwards: ``make soak``. See docs/soak.md."""

from __future__ import annotations
