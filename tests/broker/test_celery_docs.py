"""The programs of docs/celery.md and their output."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.broker.receiving import connected, eventually, has_consumer
from tests.broker.workers import killed_at_the_end
from tests.timeouts import TIMEOUT

PAGE = Path(__file__).parents[2] / "docs" / "celery.md"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)\n")
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NUMBER = re.compile(r"\d+(\.\d+)?(e-\d+)?")


def blocks() -> tuple[dict[str, str], dict[str, list[str]]]:
    """The programs of the page by their file names, and for each the other blocks between it and the next."""
    programs: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    name = ""
    for language, text in _BLOCK.findall(PAGE.read_text()):
        if language == "python":
            found = _FILE_NAME.match(text)
            assert found is not None, f"a program without a file name: {text[:40]!r}"
            name = found[1]
            programs[name], others[name] = text, []
        else:
            others[name].append(text)
    return programs, others


def shape(text: str) -> str:
    """What stays the same from run to run: numbers, times and task ids do not."""
    return _NUMBER.sub("0", _ID.sub("ID", text)).strip()


@asynccontextmanager
async def running(folder: Path, url: str, *arguments: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process with children of its own, all ended at the end."""
    environment = {**os.environ, "BIDE_URL": url, "CELERY_BROKER_URL": url, "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=folder, env=environment, start_new_session=True, **options
    )
    async with killed_at_the_end(process):
        yield process


async def output(folder: Path, url: str, program: str) -> str:
    """The output of a program that ends without a signal."""
    async with asyncio.timeout(TIMEOUT), running(folder, url, program, stdout=asyncio.subprocess.PIPE) as process:
        printed, _ = await process.communicate()
        assert process.returncode == 0, f"{program} failed"
        return printed.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs of the page."""
    for name, text in blocks()[0].items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def test_a_worker_runs_the_tasks_delayed_by_the_programs(folder: Path, vhost_url: str) -> None:
    _, others = blocks()
    program, *arguments = others["tasks.py"][0].removeprefix("$ ").split()
    assert program == "celery"
    log = folder / "worker.log"
    with log.open("wb") as file:
        worker = running(folder, vhost_url, "-m", program, *arguments, stdout=file, stderr=asyncio.subprocess.STDOUT)
        async with worker:

            async def logged(text: str, times: int = 1) -> bool:
                return log.read_text().count(text) >= times

            await eventually(lambda: logged(" ready."))
            senders = ("send.py", "send_signature.py")
            printed = await asyncio.gather(*(output(folder, vhost_url, name) for name in senders))
            await eventually(lambda: logged(" succeeded in ", 2))

    assert [shape(one) for one in printed] == [shape(others[name][0]) for name in senders]
    lines = [shape(line) for line in log.read_text().splitlines()]
    for expected in others["send.py"][1].splitlines():
        assert shape(expected) in lines
    assert log.read_text().count(" succeeded in ") == 2
    assert "mailed bob@example.org: welcome" in log.read_text()


async def test_an_application_with_the_adapter_delays_and_retries(folder: Path, vhost_url: str) -> None:
    _, others = blocks()
    program, *arguments = others["shop.py"][0].removeprefix("$ ").split()
    assert program == "celery"
    shown, logs = others["remind_ann.py"]
    log = folder / "worker.log"
    with log.open("wb") as file:
        worker = running(folder, vhost_url, "-m", program, *arguments, stdout=file, stderr=asyncio.subprocess.STDOUT)
        async with worker:

            async def is_ready() -> bool:
                return " ready." in log.read_text()

            async def has_logged_all() -> bool:
                # A process of the pool logs a retry after it has sent it, and another one may run it first.
                lines = [shape(line) for line in log.read_text().splitlines()]
                return all(shape(expected) in lines for expected in logs.splitlines())

            await eventually(is_ready)
            printed = await output(folder, vhost_url, "remind_ann.py")
            await eventually(has_logged_all)
    assert shape(printed) == shape(shown)


async def test_the_receiving_program_gets_tasks_delayed_by_celery(folder: Path, vhost_url: str) -> None:
    receiver = running(folder, vhost_url, "receive.py", stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(TIMEOUT), connected(vhost_url) as connection, receiver as process:
        # The program consumes when it has declared everything.
        await eventually(partial(has_consumer, connection, "orders"))
        assert await output(folder, vhost_url, "order.py") == "sent\n"
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
    assert shape(line) == shape(blocks()[1]["receive.py"][0])
