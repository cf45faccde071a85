"""The programs in docs/schedules.md."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import bide
from tests.broker.receiving import until_ready
from tests.broker.schedule_log import NAMES, gating, wait_for_leaders
from tests.readme import Shell, blocks, commands_of
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HEARD = """\
while bide delay verify >found 2>&1; ended=$?; ! grep -q '^✓ gate clocks' found; do :; done
cat found
test $ended = 0
"""
"""``bide delay verify``, repeated until it hears a gate in time, which on a busy machine may be silent or late."""


def run(vhost: Vhost, program: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "BIDE_URL": vhost.url},
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_first_program_prints_what_the_page_shows(vhost: Vhost, tmp_path: Path) -> None:
    shown = re.search(r"^\$ python reminders.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    async with gating(vhost.url, tmp_path / "gate"):
        assert await asyncio.to_thread(run, vhost, BLOCKS[0]) == shown[1]
        assert "CANCELLED" in await asyncio.to_thread(run, vhost, f"import bide\n{BLOCKS[1]}")


async def test_the_other_programs_run(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
        names = {"bide": bide, "client": client}
        for block in BLOCKS[2:]:
            code = compile(block, "docs/schedules.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = FunctionType(code, names)()
            if inspect.isawaitable(running):
                await running
        assert await client.count_scheduled(to="mail") == 2
    assert len(BLOCKS) == 10


async def test_the_commands_print_what_the_page_shows(vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path) -> None:
    shell = Shell(tmp_path, rabbitmq, vhost)

    def commands(title: str) -> list[tuple[str, str]]:
        shown = [text for _, text in blocks("docs/schedules.md", title) if text.startswith("$ bide ")]
        return [one for text in shown if "bide gate" not in text for one in commands_of(text)]

    async def check(*given: tuple[str, str]) -> None:
        await asyncio.to_thread(shell.check, given)

    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
        await asyncio.to_thread(shell.paste, "bide delay apply")
        async with gating(vhost.url, tmp_path / "gate", allow=["reminders"]):
            await wait_for_leaders(vhost.url)
            ((verify, verified),) = commands("Run gates")
            assert verify == "bide delay verify"
            await check((HEARD, verified))
            scheduling, *others = commands("Undeliverable messages")
            await check(scheduling)
            for one in others:
                # The gate sends it there a moment later, and a listing gives it back a moment later.
                await until_ready(vhost.url, NAMES.undeliverable, 1)
                await check(one)
            await client.schedule(b"{}", key="invoice:42", to="reminders", delay="3d")
            await check(*commands("The command line"))

    (warning,) = [text for _, text in blocks("docs/schedules.md", "Run gates") if text.startswith("! gates")]
    assert warning in await asyncio.to_thread(shell.paste, "bide delay verify")
