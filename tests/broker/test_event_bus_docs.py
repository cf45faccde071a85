"""The programs of docs/event-bus.md and their output."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

import bide
from bide.errors import InvalidTopologyError
from bide.patterns.event_bus import event_bus
from tests.broker.receiving import eventually
from tests.readme import Shell, commands_of
from tests.support import Rabbitmq, Vhost
from tests.timeouts import TIMEOUT

PAGE = (Path(__file__).parents[2] / "docs" / "event-bus.md").read_text()

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)\n")
_TIME = re.compile(r"\d{13}|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def blocks() -> dict[str, list[str]]:
    """Each program by its file name, with the plain blocks between it and the next."""
    found: dict[str, list[str]] = {}
    name = ""
    for language, text in _BLOCK.findall(PAGE):
        if named := _FILE_NAME.match(text):
            name = named[1]
            found[name] = [text]
        elif name and not language:
            found[name].append(text)
    return found


def without_times(text: str) -> str:
    return _TIME.sub("TIME", text)


async def start(name: str, url: str, folder: Path) -> asyncio.subprocess.Process:
    program = folder / name
    program.write_text(blocks()[name][0])
    return await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        env={**os.environ, "BIDE_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def output_of(process: asyncio.subprocess.Process) -> str:
    """What a process prints until it ends. It is killed if it does not end in time."""
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


async def test_the_program_prints_the_documented_output(vhost_url: str, tmp_path: Path) -> None:
    expected = blocks()["bus.py"][1]
    process = await start("bus.py", vhost_url, tmp_path)
    assert process.stdout is not None
    try:
        # It runs until it is stopped.
        async with asyncio.timeout(TIMEOUT):
            printed = [await process.stdout.readline() for _ in expected.splitlines()]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert b"".join(printed).decode().replace(f"{tmp_path}/", "") == expected


async def test_the_documented_x_death_is_that_of_the_broker(
    vhost: Vhost, release: tuple[int, ...], tmp_path: Path
) -> None:
    process = await start("rejected.py", vhost.url, tmp_path)
    printed = without_times(await output_of(process))
    on_3_10, on_4_3 = map(without_times, blocks()["rejected.py"][1:3])
    if release[:2] == (3, 10):
        assert printed == on_3_10
    elif release[:2] == (4, 3):
        assert printed == on_4_3
    else:
        # Elsewhere there may be other headers, but the deaths are the same.
        assert printed.splitlines()[:2] == on_4_3.splitlines()[:2] == on_3_10.splitlines()[:2]


async def test_the_commands_on_parked_messages_print_what_the_page_shows(
    vhost: Vhost, rabbitmq: Rabbitmq, tmp_path: Path
) -> None:
    process = await start("bus.py", vhost.url, tmp_path)
    try:
        async with bide.connect(vhost.url) as client:

            async def is_parked() -> bool:
                return await client.exists("orders.parked") and await client.message_count("orders.parked") == 1

            await eventually(is_parked)
    finally:
        process.terminate()
        await output_of(process)
    (block,) = (text for language, text in _BLOCK.findall(PAGE) if text.startswith("$ bide errors"))
    await asyncio.to_thread(Shell(tmp_path, rabbitmq, vhost).check, commands_of(block))


def test_the_refused_ttl_is_the_error_of_the_page() -> None:
    (message,) = (text for _, text in _BLOCK.findall(PAGE) if text.startswith("queue 'orders.retry'"))
    with pytest.raises(InvalidTopologyError) as refused:
        event_bus("shop", "orders", delay="5s", retry_arguments={"x-message-ttl": 5000})
    assert str(refused.value) == message.strip()
