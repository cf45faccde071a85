"""The pictures on the pages of the pipelines: see ``__main__.py``."""

from __future__ import annotations
