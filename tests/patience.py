"""How long tests wait for what happens soon on a machine that has nothing else to do."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

PATIENCE: Final = 300.0
"""Seconds until a test gives up waiting for something.

It takes no time where things go well. The host of a virtual machine may take most of its cores for minutes, and a
limit of ten or twenty seconds tells then what the host does, not what bide does.
"""

ON_TIME: Final = timedelta(seconds=30)
"""How late a message may be there and still be on time: what takes a wrong way waits for minutes, or for ever."""
