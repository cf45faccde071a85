"""The web application of docs/reminders.md, with a gate, on a real broker."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

import bide
from tests.broker.receiving import eventually
from tests.broker.schedule_log import gating, wait_for_leaders
from tests.readme import ROOT, blocks, commands_of
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE = "docs/reminders.md"
EXAMPLE = ROOT / "examples" / "reminders"


def test_the_page_shows_the_programs_as_they_are() -> None:
    shown = [text for language, text in blocks(PAGE) if language == "python"]
    assert shown == [(EXAMPLE / name).read_text(encoding="utf-8") for name in ("shop.py", "mailer.py")]


@asynccontextmanager
async def program(
    vhost: Vhost, *command: str, folder: Path = EXAMPLE, pass_fds: Collection[int] = ()
) -> AsyncIterator[Process]:
    """A Python program in a folder, ended by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        cwd=folder,
        env={**os.environ, "BIDE_URL": vhost.url, "REMIND_AFTER": "1h"},
        stdout=PIPE,
        stderr=STDOUT,
        pass_fds=pass_fds,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), TIMEOUT)


async def line_of(process: Process, part: str) -> str:
    """The next line that has this part."""
    assert process.stdout is not None
    read = ""
    async with asyncio.timeout(TIMEOUT):
        while line := (await process.stdout.readline()).decode():
            read += line
            if part in line:
                return line
    raise AssertionError(read)


@asynccontextmanager
async def shop(vhost: Vhost, folder: Path, seconds: float = TIMEOUT) -> AsyncIterator[int]:
    """The web application, and its port, which no other process can take before the application has it.

    Args:
        folder: for the program.
        seconds: how long it waits for the broker and for the answer of a gate. The 5 s of the example are too short
            on a busy machine.
    """
    text = (EXAMPLE / "shop.py").read_text(encoding="utf-8")
    assert 'timeout="5s"' in text
    (folder / "shop.py").write_text(text.replace('timeout="5s"', f'timeout="{seconds}s"'), encoding="utf-8")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number = listener.fileno()
        # Nothing reads a log of requests, and the application would wait for that when the pipe is full.
        command = ("-m", "uvicorn", "shop:app", "--fd", str(number), "--no-access-log")
        async with program(vhost, *command, folder=folder, pass_fds=[number]) as process:
            await line_of(process, "Uvicorn running")
            yield listener.getsockname()[1]


async def curl(command: str, port: int) -> str:
    """What a command of the page prints, sent to this port."""
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command.replace("localhost:8000", f"127.0.0.1:{port}")), stdout=PIPE, stderr=PIPE
    )
    printed, errors = await asyncio.wait_for(process.communicate(), TIMEOUT)
    assert process.returncode == 0, errors.decode()
    return printed.decode()


async def test_the_commands_print_what_the_page_shows(vhost: Vhost, tmp_path: Path) -> None:
    sections = {
        title: [one for _, text in blocks(PAGE, title) if text.startswith("$ curl") for one in commands_of(text)]
        for title in ("Run it", "Paid in time", "More time", "Paid too late", "No gate")
    }
    assert all(sections.values())
    async with bide.connect(vhost.url) as client:

        async def is_reported() -> bool:
            return await client.scheduled("invoice:42") is None

        async with (
            gating(vhost.url, tmp_path / "gate", allow=["reminders"]),
            shop(vhost, tmp_path) as port,
            program(vhost, "mailer.py") as mailer,
        ):
            await wait_for_leaders(vhost.url)
            for title in ("Run it", "Paid in time", "More time"):
                for command, printed in sections[title]:
                    assert (title, await curl(command, port)) == (title, printed.rstrip("\n"))
            await client.run_now("invoice:42")
            assert await line_of(mailer, "to ") == "to bob@example.org: please pay 50 for order 42\n"
            # The mailer may have the message before the gate has its confirm, and reports it.
            await eventually(is_reported)
            for command, printed in sections["Paid too late"]:
                assert await curl(command, port) == printed.rstrip("\n")
            apology = "to bob@example.org: order 42 is paid, please ignore our reminder\n"
            assert await line_of(mailer, "to ") == apology
        async with shop(vhost, tmp_path, 10) as port:
            for command, printed in sections["No gate"]:
                assert await curl(command, port) == printed.rstrip("\n")
        async with gating(vhost.url, tmp_path / "gate", allow=["reminders"]):
            assert [one.key async for one in client.list_scheduled()] == ["invoice:43"], "Dora's was cancelled"


async def test_a_payment_while_its_order_is_scheduled_leaves_no_reminder(vhost: Vhost, tmp_path: Path) -> None:
    conflicts, paid = 0, set[str]()
    async with (
        gating(vhost.url, tmp_path / "gate", allow=["reminders"]),
        bide.connect(vhost.url) as client,
        shop(vhost, tmp_path) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}/orders", timeout=TIMEOUT) as browser,
    ):
        await wait_for_leaders(vhost.url)
        number = 0
        async with asyncio.timeout(TIMEOUT):
            while conflicts < 3:
                number += 1
                order = {"email": "ann@example.org", "amount": 30}
                created, payment = await asyncio.gather(
                    browser.put(f"/{number}", json=order), browser.post(f"/{number}/payment")
                )
                conflicts += created.status_code == 409
                if payment.status_code == 200:
                    paid.add(f"invoice:{number}")
        waiting = {one.key async for one in client.list_scheduled()}
    assert not waiting & paid
