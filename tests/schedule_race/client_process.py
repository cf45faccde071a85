"""A client process that is killed with SIGKILL again and again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.schedule_race.client import Task
from tests.schedule_race.history import Change, from_line

_ROOT: Final = Path(__file__).parents[2]
_RESTART_AFTER: Final = 0.5
"""Seconds before a client that ended by itself is restarted."""
_REQUEST: Final = 0.02
"""Seconds that a request takes on an idle machine: a kill hits it before, while or after the broker gets it."""


@dataclass(slots=True)
class _Open:
    """A task that has no end yet, and what the client has reported of it last."""

    task: Task
    end: asyncio.Future[Change]
    known: Change | None = None


class ClientProcess:
    """A process that performs tasks, and is killed in a request and restarted.

    Args:
        name: its name, and that of its connection and of the file with its log.
        url: the AMQP URL of the broker.
        folder: the folder of the log file.
        requests: requests until it is killed, on average. The number does not depend on the speed of the machine.
        on_end: called each time the process ends, with its name and its exit code, or with None if it was killed.
    """

    def __init__(
        self,
        name: str,
        url: str,
        folder: Path,
        *,
        requests: int,
        rng: random.Random,
        on_end: Callable[[str, int | None], None],
    ) -> None:
        self.name = name
        self._url = f"{url}?name={name}"
        self._folder = folder
        self._requests = requests
        self._rng = rng
        self._on_end = on_end
        self._open: dict[str, _Open] = {}
        self._input: asyncio.StreamWriter | None = None

    async def perform(self, task: Task) -> Change:
        """Have a task performed; return what the process knew of it when the task ended, or the process."""
        one = self._open[task.key] = _Open(task, asyncio.get_running_loop().create_future())
        self._send(one)
        return await one.end

    async def run(self) -> None:
        """Run the process until this coroutine is cancelled, which kills the process."""
        with (self._folder / f"{self.name}.log").open("ab") as errors:
            while True:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.schedule_race.client"),
                    env={**os.environ, "BIDE_URL": self._url},
                    cwd=_ROOT,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                )
                try:
                    await self._follow(process)
                    code = await process.wait()
                finally:
                    self._input = None
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
                for known in [one.known for one in self._open.values() if one.known is not None]:
                    self._end(known)
                was_killed = code == -signal.SIGKILL
                self._on_end(self.name, None if was_killed else code)
                # A process that ended by itself would probably end again at once.
                await asyncio.sleep(0 if was_killed else _RESTART_AFTER)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Send a process its tasks, read all its reports, and kill it in one of its requests."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        for one in self._open.values():
            self._send(one)
        rest = round(self._requests * self._rng.uniform(0.5, 1.5))
        async for line in process.stdout:
            known = from_line(line)
            assert isinstance(known, Change)
            self._open[known.key].known = known
            if known.error is not None or (known.what != "schedule" and known.outcome != "error"):
                self._end(known)
            elif known.outcome == "error":  # a request
                rest -= 1
                if rest == 0:
                    await asyncio.sleep(self._rng.uniform(0, _REQUEST))  # a moment in the request
                    self._input = None
                    if process.returncode is None:
                        process.kill()

    def _send(self, one: _Open) -> None:
        if self._input is not None:
            self._input.write(json.dumps(asdict(one.task)).encode() + b"\n")

    def _end(self, known: Change) -> None:
        self._open.pop(known.key).end.set_result(known)
