"""Charts: drawings as data, with axes and colours, and their conversion to SVG."""

from __future__ import annotations
