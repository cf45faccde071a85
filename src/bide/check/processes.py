"""A command of bide as a process that can be killed, and is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

_RESTART_AFTER: Final = 0.5
"""Seconds until a process that has ended is started again: it ends if the broker cannot be reached when it starts."""


class CommandProcess:
    """A command that is started again whenever it ends.

    Args:
        name: of its log file.
        arguments: of ``bide``.
        url: the broker, as ``BIDE_URL``.
        folder: of its log.
        on_end: called after each end with the exit code; None if it was killed here.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        url: str,
        folder: Path,
        on_end: Callable[[str, int | None], None] = lambda name, code: None,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._url = url
        self._folder = folder
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._was_killed = False
        self._is_stopping = False

    async def run(self) -> None:
        """Run the command until it is stopped. It is killed if this is cancelled."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{self.name}.log").open("ab") as output:
            while not self._is_stopping:
                self._was_killed = False
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "bide", *self._arguments),
                    env={**os.environ, "BIDE_URL": self._url},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                try:
                    code = await self._process.wait()
                finally:
                    if self._process.returncode is None:
                        self._process.kill()
                        await self._process.wait()
                if code or not self._is_stopping:
                    self._on_end(self.name, None if self._was_killed else code)
                await asyncio.sleep(0 if self._was_killed else _RESTART_AFTER)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._was_killed = True
            self._process.kill()

    def stop(self) -> None:
        """End it with SIGTERM."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
