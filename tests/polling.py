"""Waiting for conditions that no event announces."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, AnyStr

from tests.timeouts import TIMEOUT


def wait_until(
    condition: Callable[[], object], what: str = "the condition", *, seconds: float = TIMEOUT, step: float = 0.02
) -> None:
    """Poll until a condition holds.

    Args:
        what: the condition in words, for the error.
        seconds: seconds after which the test fails.
        step: seconds between two looks.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(step)  # there is no event to wait for


def wait_while_running(
    process: subprocess.Popen[Any],
    condition: Callable[[], object],
    what: str,
    *,
    seconds: float = TIMEOUT,
    step: float = 0.02,
) -> None:
    """Poll until a condition holds that a process brings about; if the process ends before, the test fails.

    The arguments are those of :func:`wait_until`.
    """

    def holds() -> bool:
        is_running = process.poll() is None
        if condition():
            return True
        assert is_running, f"the process ended with {process.returncode} before {what}"
        return False

    wait_until(holds, what, seconds=seconds, step=step)


@contextmanager
def killed_at_the_end(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """A process that does not outlive the block, however the block ends."""
    with process:
        try:
            yield process
        finally:
            process.kill()
