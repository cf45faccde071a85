"""The programs of docs/web-applications.md under their servers, and its notebook."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

import bide
import bide.testing
from bide.errors import ClosedError, DeclarationMismatchError
from tests.broker.receiving import eventually, receive
from tests.broker.schedule_log import gating, wait_for_leaders
from tests.broker.test_reminders_docs import curl, line_of
from tests.faults.proxy import Proxy
from tests.ports import held_port
from tests.readme import ROOT, blocks, commands_of, read
from tests.support import Vhost
from tests.timeouts import TIMEOUT

PAGE: Final = "docs/web-applications.md"
FRAMEWORKS: Final = ("FastAPI", "Flask", "Django")
SERVERS: Final = ("uvicorn", "gunicorn")


def test_the_list_of_sections_is_complete() -> None:
    titles = [line.removeprefix("## ") for line in read(PAGE).splitlines() if line.startswith("## ")]
    links = [line for line in read(PAGE).splitlines() if line.startswith("- [")]
    assert links == [f"- [{title}](#{title.lower().replace(' ', '-')})" for title in titles]


def test_the_example_has_the_programs_of_the_page() -> None:
    for title, name in (("FastAPI", "shop.py"), ("The mailer", "mailer.py")):
        (shown,) = (text for language, text in blocks(PAGE, title) if language == "python")
        assert shown == (ROOT / "examples" / "fastapi" / name).read_text(encoding="utf-8")


def write_programs(title: str, folder: Path) -> None:
    """Write the programs of a section into the files that their first lines name."""
    for language, text in blocks(PAGE, title):
        if language == "python":
            file = folder / text.partition("\n")[0].removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def commands_in(title: str) -> list[tuple[str, str]]:
    """The commands of a section, and what they print."""
    return [one for _, text in blocks(PAGE, title) if text.startswith("$ ") for one in commands_of(text)]


def installed(command: str) -> list[str]:
    """The command of a package in this environment, with its arguments."""
    name, *arguments = shlex.split(command)
    return [str(Path(sys.executable).parent / name), *arguments]


def set_up(title: str, folder: Path) -> list[str]:
    """Make the folder of an application, and return the commands that serve it."""
    folder.mkdir()
    commands = [command for command, _ in commands_in(title)]
    for command in commands:
        if not command.startswith(SERVERS):
            subprocess.run(installed(command), cwd=folder, check=True, timeout=TIMEOUT)
    if title != "FastAPI":
        write_programs("A client for each process", folder)
    write_programs(title, folder)
    if title == "Django":
        middleware = "orders.middleware.BrokerErrors"
        assert f'Add `"{middleware}"` to `MIDDLEWARE` in `shop/settings.py`' in read(PAGE)
        with (folder / "shop" / "settings.py").open("a", encoding="utf-8") as settings:
            settings.write(f"\nMIDDLEWARE.append({middleware!r})\n")
    return [command for command in commands if command.startswith(SERVERS)]


@asynccontextmanager
async def serving(folder: Path, command: str, port: int, url: str) -> AsyncIterator[Process]:
    """A server in an application's folder. After the block, SIGTERM must end it without an error."""
    environment = {**os.environ, "BIDE_URL": url, "HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(
        *installed(command.replace("8000", str(port))), cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT
    )
    reading = asyncio.create_task(process.communicate())
    try:
        yield process
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        printed = (await asyncio.wait_for(reading, TIMEOUT))[0].decode()
        print(printed)  # noqa: T201 (shown if the test fails)
    # uvicorn raises the signal again when it has shut down.
    assert await process.wait() == (-signal.SIGTERM if command.startswith("uvicorn") else 0)
    assert "Traceback" not in printed


def test_a_process_keeps_no_client_whose_queue_could_not_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bide.SyncClient] = []
    ((_, text),) = blocks(PAGE, "A client for each process")
    with bide.testing.broker() as b, b.connect_sync() as client:
        client.declare(bide.Topology(queues=[bide.Queue("mail")]))

        def connect(**_: object) -> bide.SyncClient:
            made.append(b.connect_sync())
            return made[-1]

        program: dict[str, Any] = {}
        exec(text, program)
        monkeypatch.setattr(bide, "connect_sync", connect)
        for _ in range(2):
            with pytest.raises(DeclarationMismatchError):
                program["client"]()
        for one in made:
            with pytest.raises(ClosedError):
                one.publish(b"x", to="mail")
    assert len(made) == 2


async def answers(port: int, commands: Sequence[str]) -> list[dict[str, Any]]:
    """The answers to requests, all of which are repeated if one had to wait for the broker longer than 5 s.

    One process of a server may answer the first request, and another one, which has no client yet, the next.
    """
    deadline = time.monotonic() + TIMEOUT
    while True:
        found: list[dict[str, Any]] = [json.loads(await curl(f"{one} -sS", port)) for one in commands]
        if not any("error" in one for one in found):
            return found
        assert time.monotonic() < deadline, found


@pytest.mark.long
@pytest.mark.slow
async def test_each_application_does_what_the_page_shows(vhost: Vhost, tmp_path: Path) -> None:
    requests = [one for one in commands_in("Try it") if one[0].startswith("curl ")]
    assert len(requests) == 5
    async with (
        Proxy(vhost.url) as proxy,
        bide.connect(vhost.url) as client,
        gating(vhost.url, tmp_path / "gate", allow=["mail"]),
        httpx2.AsyncClient(timeout=TIMEOUT) as browser,
        AsyncExitStack() as servers,
    ):
        ports = []
        for title in FRAMEWORKS:
            folder = tmp_path / title
            for command in await asyncio.to_thread(set_up, title, folder):
                ports.append(servers.enter_context(held_port()))
                await servers.enter_async_context(serving(folder, command, ports[-1], proxy.url))
        assert len(ports) == 4

        async def health(port: int) -> tuple[int, object]:
            try:
                answer = await browser.get(f"http://127.0.0.1:{port}/health")
            except httpx2.ConnectError:
                return 0, None
            return answer.status_code, answer.json().get("broker", "error")

        async def each_answers(status: int, *broker: object) -> None:
            async def all_answer() -> bool:
                return all([await health(port) in [(status, one) for one in broker] for port in ports])

            await eventually(all_answer)

        await each_answers(200, True)
        for port in ports:
            wanted = [json.loads(printed) for _, printed in requests]
            assert (port, await answers(port, [command for command, _ in requests])) == (port, wanted)
        receipts = await receive(client, "mail", 2 * len(ports))
        assert {one.json()["receipt"] for one in receipts} == {7, 13}
        assert await client.scheduled("order:7") is None

        # A process whose client is not connected yet answers with an error.
        proxy.refusing = True
        proxy.cut()
        await each_answers(503, False, "error")
        proxy.refusing = False
        await each_answers(200, True)
        for port in ports:
            assert await answers(port, ["curl -X PUT localhost:8000/orders/8"]) == [{"order": 8}]


@pytest.mark.long
@pytest.mark.slow
async def test_the_mailer_prints_what_the_page_shows_and_needs_no_gate(vhost: Vhost, tmp_path: Path) -> None:
    requests = [one for one in commands_in("Try it") if one[0].startswith("curl ")]
    before, after = requests[:3], requests[3:]
    others = [command for command, _ in commands_in("Try it") if not command.startswith("curl ")]
    assert others == ["python mailer.py", "bide gate --state gate --allow mail"]
    (shown,) = (text for _, text in blocks(PAGE, "Try it") if text.startswith("sent "))
    folder = tmp_path / "FastAPI"
    (command,) = await asyncio.to_thread(set_up, "FastAPI", folder)
    write_programs("The mailer", folder)
    program = folder / "shop.py"
    text = program.read_text()
    assert 'timeout="5s"' in text
    program.write_text(text.replace('timeout="5s"', f'timeout="{TIMEOUT}s"'))
    with held_port() as port:
        async with serving(folder, command, port, vhost.url), httpx2.AsyncClient(timeout=TIMEOUT) as browser:

            async def is_served() -> bool:
                with suppress(httpx2.ConnectError):
                    return (await browser.get(f"http://127.0.0.1:{port}/health")).is_success
                return False

            await eventually(is_served)
            mailer = await asyncio.create_subprocess_exec(
                *(sys.executable, "mailer.py"),
                cwd=folder,
                env={
                    **os.environ,
                    "BIDE_URL": vhost.url,
                    "BIDE_MANAGEMENT_URL": vhost.broker.management_url,
                },
                stdout=PIPE,
                stderr=STDOUT,
            )
            try:
                for one, printed in before:
                    assert await curl(one, port) == printed.rstrip("\n")
                lines = [await line_of(mailer, "") for _ in shown.splitlines()]
            finally:
                if mailer.returncode is None:
                    mailer.send_signal(signal.SIGTERM)
                await asyncio.wait_for(mailer.communicate(), TIMEOUT)
            assert sorted(map(without_id, lines)) == sorted(map(without_id, shown.splitlines(keepends=True)))
            async with gating(vhost.url, tmp_path / "gate", allow=["mail"]):
                # A gate that has just started answers a moment later.
                await wait_for_leaders(vhost.url)
                for one, printed in after:
                    assert await curl(one, port) == printed.rstrip("\n")


def without_id(line: str) -> str:
    return re.sub(r"\b[0-9a-f]{32}\b", "ID", line)


CELLS: Final = [
    (text, output if next_language == "" else "")
    for (language, text), (next_language, output) in pairwise([*blocks(PAGE, "Jupyter"), ("", "")])
    if language == "python"
]
"""The cells of the notebook, and what they print."""

INTERRUPTED: Final = [
    (
        """client = await bide.connect()
print("consuming")
async for message in client.consume("jobs"):
    await message.ack()
""",
        "consuming\n",
    ),
    ("await client.publish(b'1', to='jobs')\nprint(client.connected)\nawait client.close()", "True\n"),
    (
        """client = bide.connect_sync()
client.purge("jobs")
print("consuming")
with client.consume("jobs") as messages:
    for message in messages:
        message.ack()
""",
        "consuming\n",
    ),
    ("client.publish(b'1', to='jobs')\nprint(client.message_count('jobs'))\nclient.close()", "1\n"),
]
"""Cells that are interrupted when they print "consuming", and cells after them."""

KERNEL: Final = """
import json, sys
from jupyter_client.manager import start_new_kernel

timeout = float(sys.argv[1])
manager, client = start_new_kernel(kernel_name="python3", startup_timeout=timeout)

def run(cell):
    printed = []

    def on_output(message):
        content = message["content"]
        printed.append(content.get("text") or "\\n".join(content.get("traceback", [])))
        # The kernel sends what a cell prints in parts.
        if content.get("text") and "".join(printed) == "consuming\\n":
            manager.interrupt_kernel()

    reply = client.execute_interactive(cell, timeout=timeout, output_hook=on_output)["content"]
    return reply["status"], reply.get("ename", ""), "".join(printed)

print(json.dumps([run(cell) for cell in json.load(sys.stdin)]))
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
"""A program that runs cells in a Jupyter kernel."""


@pytest.mark.long
@pytest.mark.slow
def test_the_cells_of_the_notebook_print_what_the_page_shows(vhost: Vhost, tmp_path: Path) -> None:
    assert len(CELLS) == 6
    environment = {**os.environ, "BIDE_URL": vhost.url, "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(TIMEOUT)],
        input=json.dumps([cell for cell, _ in CELLS + INTERRUPTED]),
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [("ok", "", printed) for _, printed in CELLS] == [tuple(one) for one in results[: len(CELLS)]]
    for (_, printed), (status, error, output) in zip(INTERRUPTED, results[len(CELLS) :], strict=True):
        if printed == "consuming\n":
            assert (status, error in {"KeyboardInterrupt", "CancelledError"}) == ("error", True), output
        else:
            assert (status, output) == ("ok", printed)
