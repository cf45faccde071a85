"""A bide command as a process that is restarted whenever it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

_RESTART_AFTER: Final = 0.5
"""Seconds before a process that ended by itself is restarted, for example because the broker was unreachable."""


class CommandProcess:
    """A bide command that is restarted whenever it ends.

    Args:
        name: the name of the process, and of its log file without ``.log``.
        arguments: the arguments of ``bide``.
        url: the AMQP URL of the broker, passed as ``BIDE_URL``.
        folder: the folder of the log file.
        on_end: called each time the process ends, with its name and its exit code, or with None if :meth:`kill` ended
            it. It is not called for exit code 0 after :meth:`stop`.
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
        """Run the command until :meth:`stop` is called. Cancelling this coroutine kills the process."""
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
                # A process that ended by itself would probably end again at once.
                await asyncio.sleep(0 if self._was_killed else _RESTART_AFTER)

    def kill(self) -> None:
        """Kill the process with SIGKILL. It is restarted at once."""
        if self._process is not None and self._process.returncode is None:
            self._was_killed = True
            self._process.kill()

    def stop(self) -> None:
        """End the process with SIGTERM, and do not restart it."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
