"""The demonstration: a few thousand delayed messages, and how late each of them was.

It works on a broker of its own, or on yours under a prefix of its own, which it takes away again.
"""

from __future__ import annotations
