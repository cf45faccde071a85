"""The demonstration: a few thousand delayed messages, and how late each of them was.

It runs on a private broker, or on yours under a unique prefix, and deletes all its queues and exchanges at the end.
"""

from __future__ import annotations
