"""The programs of docs/frameworks.md and their output."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bide.errors import TargetNotFoundError
from tests.broker.receiving import eventually, ready_at
from tests.broker.workers import killed_at_the_end
from tests.readme import blocks, commands_of
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = "docs/frameworks.md"

QUEUES = {"dramatiq": "default", "FastStream": "charges", "taskiq": "taskiq"}
"""A queue that the worker declares when it starts."""

_FILE_NAME = re.compile(r"# (\w+\.py)\n")


class Session:
    """A folder with the programs of a section, and the processes that its commands started."""

    def __init__(self, section: str, folder: Path, url: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.consoles: list[list[tuple[str, str]]] = []
        self._environment = {**os.environ, "BIDE_URL": url, "PYTHONUNBUFFERED": "1"}
        for language, text in blocks(PAGE, section):
            if language == "python":
                name = _FILE_NAME.match(text)
                assert name is not None, f"a program without a file name: {text[:40]!r}"
                (folder / name[1]).write_text(text)
            elif text.startswith("$ "):
                self.consoles.append(commands_of(text))

    @asynccontextmanager
    async def running(self, command: str) -> AsyncIterator[None]:
        """A command that runs in the background, whose output goes to the log."""
        program, background, _ = command.partition(" &")
        assert background
        name, *arguments = program.split()
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *([sys.executable] if name == "python" else [sys.executable, "-m", name]),
                *arguments,
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        async with killed_at_the_end(process):
            yield

    async def output(self, command: str) -> str:
        """The output of a Python program that ends."""
        name, program = command.split()
        assert name == "python"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            program,
            cwd=self.folder,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TIMEOUT):
            printed, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return printed.decode()

    async def says(self, words: str) -> None:
        """Wait until the log has these words."""

        async def are_there() -> bool:
            return words in self.log.read_text()

        await eventually(are_there)

    async def logged(self, *lines: str) -> None:
        """Wait until the log has these lines."""

        async def are_there() -> bool:
            log = self.log.read_text().splitlines()
            return all(line in log for line in lines)

        await eventually(are_there)


@pytest.mark.parametrize("framework", ["dramatiq", "FastStream", "taskiq"])
async def test_the_programs_of_the_page_print_what_it_shows(framework: str, vhost: Vhost, tmp_path: Path) -> None:
    session = Session(framework, tmp_path, vhost.url)
    (worker, _), (send, output) = session.consoles[0]
    (gate, _), (invoices, results) = session.consoles[1]
    async with session.running(worker), session.running(gate):
        await eventually(lambda: exists(vhost.url, QUEUES[framework]))
        # The program waits 30 s for an answer of the gate.
        await session.says("following bide.v1.schedule")
        assert await session.output(send) == ""
        assert await session.output(invoices) == results
        await session.logged(*output.splitlines())

        async def waits() -> bool:
            return await ready_at(vhost.url, "bide.v1.d3") == 1

        await eventually(waits)


async def exists(url: str, queue: str) -> bool:
    try:
        await ready_at(url, queue)
    except TargetNotFoundError:
        return False
    return True
