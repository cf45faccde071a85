"""The programs of ``examples/wire`` in other languages: built once, and run on a broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.readme import ROOT, code, read
from tests.timeouts import TIMEOUT

FOLDER: Final = ROOT / "examples" / "wire"
PAGE: Final = "docs/wire-contract.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that publishes, receives, schedules and cancels by the wire contract.

    Attributes:
        command: the start of each of its commands.
        folder: where it runs.
    """

    command: Sequence[str]
    folder: Path

    async def run(self, url: str, *arguments: str) -> str:
        """The output of a command."""
        code, printed, errors = await self.result(url, *arguments)
        assert code == 0, errors
        return printed

    async def result(self, url: str, *arguments: str) -> tuple[int | None, str, str]:
        """Exit code, output and errors of a command."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *arguments,
            cwd=self.folder,
            env={**os.environ, "BIDE_URL": url},
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            printed, errors = await asyncio.wait_for(process.communicate(), TIMEOUT)
        except TimeoutError as error:
            error.add_note(f"{shlex.join(arguments)[:200]} did not end")
            raise
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, printed.decode(), errors.decode()

    async def received(self, url: str, queue: str, number: int) -> list[dict[str, Any]]:
        """Messages that it has received and acknowledged."""
        printed = await self.run(url, "receive", queue, str(number))
        return [json.loads(line) for line in printed.splitlines()]


def built(language: str, folder: Path) -> Program:
    """The program in a language, built and run as docs/wire-contract.md says.

    Args:
        language: ``node``, ``java`` or ``go``.
        folder: for what the compiler writes.
    """
    _, _, build, run = next(row for row in _rows() if code(row[0]) == [language])
    (jars,) = re.findall(r"^`JARS` is `([^`]+)`", read(PAGE), re.MULTILINE)
    source = FOLDER / language
    if language != "node":  # make has run npm ci
        source = Path(shutil.copytree(source, folder / language))
        environment = {
            **os.environ,
            "JARS": jars,
            "JDK_JAVAC_OPTIONS": "--release 17 -Xlint:all,-classfile -Werror",
            "GOCACHE": str(folder / "cache"),
        }
        done = subprocess.run(
            ["bash", "-e", "-c", code(build)[0]],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}: is everything installed by 'make languages go'?"
    name, *arguments = shlex.split(code(run)[0].replace("$JARS", jars))
    # The program runs for a second: the second compiler of Java would take longer than it saves.
    options = ["-XX:TieredStopAtLevel=1", "-Xshare:auto"] if name == "java" else []
    return Program(command=[name, *options, *arguments], folder=source)


def _rows() -> list[list[str]]:
    table = read(PAGE).partition("| folder | libraries | build | run |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
