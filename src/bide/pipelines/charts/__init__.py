"""Charts: drawings as data, their axes and colours, and SVG."""

from __future__ import annotations
