"""The programs and commands of docs/recurring-jobs.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import bide
from tests.broker.schedule_log import gating, wait_for_leaders
from tests.readme import Shell, blocks, commands_of, shape
from tests.support import Rabbitmq, Vhost

PAGE = "docs/recurring-jobs.md"


async def test_the_commands_print_what_the_page_shows(vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    shown = blocks(PAGE)
    (tmp_path / "jobs.py").write_text(next(text for language, text in shown if language == "python"))
    commands = [one for _, text in shown if text.startswith("$ ") for one in commands_of(text)]
    assert len(commands) > 5
    shell = Shell(tmp_path, rabbitmq)
    shell.environment["BIDE_URL"] = vhost.url
    async with gating(vhost.url, tmp_path / "gate", allow=["jobs"]):
        # Otherwise a command that has waited for an answer may print a warning.
        await wait_for_leaders(vhost.url)
        for command, printed in commands:
            found = await asyncio.to_thread(shell.paste, command)
            assert (command, shape(found)) == (command, shape(printed))


async def test_the_other_programs_are_valid() -> None:
    programs = [text for language, text in blocks(PAGE) if language == "python"][1:]
    for text in programs:
        exec(compile(text, PAGE, "exec"), {"bide": bide})
    assert len(programs) == 2
