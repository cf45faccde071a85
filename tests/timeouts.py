"""The timeout and the lateness limit of tests that do not measure time."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

TIMEOUT: Final = 300.0
"""Seconds until a test gives up waiting. Passing tests do not wait.

CPU steal on a virtual machine can last minutes: a limit of ten or twenty seconds would measure the machine, not bide.
"""

MAX_LATENESS: Final = timedelta(seconds=30)
"""The maximum lateness of a message on the right route: on a wrong route it waits for minutes, or never arrives."""
