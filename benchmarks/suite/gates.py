"""Gate processes of the measured schedules."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

from benchmarks.suite.errors import BenchmarkError
from benchmarks.suite.processor import processor_seconds
from benchmarks.suite.task import environment
from bide.client.client import Client
from bide.schedules.names import PARTITIONS

_LEADING: Final = re.compile(r"(no longer )?leading (\S+)$", re.MULTILINE)
_LOOK_EVERY: Final = 0.02
_STOP_TIMEOUT: Final = 60.0


class GateProcess:
    """A ``bide gate``.

    Args:
        folder: of its index; its log is beside it.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._log = folder.with_suffix(".log")
        command = [sys.executable, "-m", "bide", "gate", "-v", "--state", str(folder), "--allow", "*"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, env=environment(BIDE_URL=url), stderr=output, stdout=output)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def processor_seconds(self) -> float:
        """Processor time that it has used."""
        return processor_seconds(self.pid)

    def leads(self) -> set[str]:
        """The streams that it leads, by its log.

        Raises:
            BenchmarkError: it has ended.
        """
        text = self._log.read_text(encoding="utf-8")
        if self._process.poll() is not None:
            raise BenchmarkError(f"the gate has ended: {text.strip().rpartition(chr(10))[2]}")
        found = set[str]()
        for ended, stream in _LEADING.findall(text):
            (found.discard if ended else found.add)(stream)
        return found

    async def wait_until_leading(self, partitions: int = PARTITIONS) -> Self:
        """Wait until it leads this number of partitions.

        Raises:
            BenchmarkError: it has ended.
        """
        while True:
            if len(self.leads()) == partitions:
                return self
            await asyncio.sleep(_LOOK_EVERY)  # the gate reports leadership only in its log

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it by SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_STOP_TIMEOUT)


@asynccontextmanager
async def one_gate(url: str) -> AsyncIterator[GateProcess]:
    """A gate that leads all partitions."""
    with TemporaryDirectory(prefix="bide-bench-", ignore_cleanup_errors=True) as name:
        gate = GateProcess(url, Path(name) / "gate")
        try:
            yield await gate.wait_until_leading()
        finally:
            gate.kill()


async def wait_for_schedules(client: Client, number: int, *, look_every: float = 0.1) -> None:
    """Wait until the gates have read this number of schedules that wait."""
    while True:
        if await client.count_scheduled() == number:
            return
        await asyncio.sleep(look_every)  # no event reports the count
