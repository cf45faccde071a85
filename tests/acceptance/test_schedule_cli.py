"""``bide schedule`` as a subprocess, on a real broker with a gate."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import bide
from tests.acceptance.test_cli import Program, lines
from tests.broker.receiving import eventually, ready_at, receive
from tests.broker.schedule_log import gating, wait_for_leaders
from tests.support import Vhost


@pytest.fixture
async def client(vhost: Vhost, tmp_path: Path) -> AsyncIterator[bide.Client]:
    """A client, with two targets and a gate at work."""
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders"), bide.Queue.quorum("mail")]))
        async with gating(vhost.url, tmp_path / "gate"):
            # A command that waits 2 s for the answer of a gate warns if there is none yet.
            await wait_for_leaders(vhost.url)
            yield client


class Commands:
    """Runs ``bide schedule`` beside the gate of this process."""

    def __init__(self, vhost: Vhost) -> None:
        self._program = Program(vhost)

    async def ok(self, *arguments: str) -> str:
        return await asyncio.to_thread(self._program.ok, "schedule", *arguments)

    async def fails(self, code: int, *arguments: str) -> str:
        return await asyncio.to_thread(self._program.fails, code, "schedule", *arguments)

    async def values(self, *arguments: str) -> list[dict[str, Any]]:
        return lines(await self.ok(*arguments, "--json"))

    async def outcome(self, code: int, *arguments: str) -> str:
        """The outcome of an operation that ends with this exit code."""
        done = await asyncio.to_thread(self._program.run, "schedule", *arguments, "--json")
        assert (done.returncode, done.stderr) == (code, b"")
        return str(json.loads(done.stdout)["outcome"])


@pytest.fixture
def run(vhost: Vhost) -> Commands:
    return Commands(vhost)


async def test_a_message_is_scheduled_shown_and_delivered(client: bide.Client, run: Commands) -> None:
    (made,) = await run.values("add", "k", "hello", "--to", "reminders", "--in", "1h", "--header", "mine=1")
    assert (made["key"], made["outcome"], made["version"]) == ("k", "scheduled", made["id"])
    found = json.loads(await run.ok("show", "k", "--json"))
    assert (found["body"], found["headers"], found["due"]) == ("hello", {"mine": "1"}, made["due"])
    assert (found["to"], found["state"], found["id"]) == ("reminders", "waiting", made["id"])
    assert "state:           waiting" in await run.ok("show", "k")
    assert "nothing waits" in await run.fails(1, "show", "other")
    assert await run.outcome(0, "run-now", "k") == "running"
    (message,) = await receive(client, "reminders", 1)
    assert (message.body, message.headers) == (b"hello", {"mine": "1"})


async def test_each_operation_ends_with_its_outcome_and_exit_code(client: bide.Client, run: Commands) -> None:
    (made,) = await run.values("add", "k", "--to", "reminders", "--in", "1h")
    assert await run.outcome(1, "add", "k", "--to", "reminders", "--in", "1h", "--if-absent") == "exists"
    assert await run.outcome(1, "move", "k", "--in", "2h", "--if-version", "other-1") == "changed"
    assert await run.outcome(0, "move", "k", "--in", "2h", "--if-version", made["version"]) == "moved"
    assert await run.outcome(0, "pause", "k") == "paused"
    assert await run.outcome(0, "resume", "k") == "resumed"
    assert await run.outcome(0, "cancel", "k") == "cancelled"
    for command in ("cancel", "pause", "resume", "run-now"):
        assert await run.outcome(1, command, "k") == "not-found"


async def test_a_recurring_schedule_shows_its_next_runs(client: bide.Client, run: Commands) -> None:
    await run.ok("add", "digest", "{}", "--to", "mail", "--every", "0 8 * * MON-FRI", "--time-zone", "Europe/Berlin")
    found = json.loads(await run.ok("show", "digest", "--json"))
    assert (found["every"], found["time_zone"], len(found["next_runs"])) == ("0 8 * * MON-FRI", "Europe/Berlin", 5)
    assert "every '0 8 * * MON-FRI' Europe/Berlin" in await run.ok("list")


async def test_conditions_choose_what_is_listed_cancelled_and_moved(client: bide.Client, run: Commands) -> None:
    for number in range(20):
        await client.schedule(key=f"invoice:{number:02}", to="reminders", delay="1h")
    await client.schedule(key="other", to="mail", delay="2h")
    assert [one["key"] for one in await run.values("list", "--to", "mail")] == ["other"]
    assert len(await run.values("list", "--limit", "3")) == 3
    assert await run.ok("list", "--prefix", "invoice:", "--count") == "20\n"
    assert await run.ok("cancel", "--prefix", "invoice:0", "--dry-run") == "10 would be cancelled\n"
    assert await run.ok("cancel", "--prefix", "invoice:0", "--yes") == "cancelled 10\n"
    moved = json.loads(await run.ok("move", "--all", "--at", "2040-01-01T00:00:00Z", "--yes", "--json"))
    assert (moved["outcome"], moved["count"]) == ("moved", 11)
    assert {one["due"] for one in await run.values("list")} == {"2040-01-01T00:00:00.000+00:00"}
    assert await run.ok("list", "--prefix", "none") == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["cancel"], "give either KEY, or conditions"),
        (["cancel", "k", "--prefix", "x"], "give either KEY, or conditions"),
        (["cancel", "k", "--dry-run"], "bide schedule show"),
        (["cancel", "--prefix", "x", "--if-version", "a-1"], "needs KEY"),
        (["cancel", "--due-from", "tomorrow"], "cannot be read"),
        (["cancel", "--to", "a", "--exchange", "b"], "two targets"),
        (["list", "--count", "--limit", "3"], "leave out --limit"),
        (["move", "k"], "--in DELAY or --at TIME"),
        (["move", "k", "--in", "soon"], "cannot be read"),
        (["add", "k", "--to", "q"], "needs one time"),
        (["add", "k", "--in", "1s"], "give either --to (a queue) or --exchange"),
        (["add", "k", "--to", "q", "--routing-key", "r", "--in", "1s"], "goes with --exchange"),
        (
            ["add", "k", "--to", "q", "--in", "1s", "--jitter", "5s"],
            "--jitter is for recurring schedules: give --every",
        ),
        (["add", "k", "--to", "q", "--every", "61 * * * *"], "cron expression"),
        (["add", "k", "--to", "q", "--every", "0 8 * * *", "--time-zone", ""], "time zone"),
        (["add", "k", "--exchange", "bide.v1.schedule.gates", "--in", "1s"], "schedule log itself"),
        (["add", "", "--to", "q", "--in", "1s"], "key"),
        (["add", "k", "--to", "q", "--in", "1s", "--header", "x"], "NAME=VALUE"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(vhost: Vhost, arguments: list[str], reason: str) -> None:
    assert reason in Program(vhost).fails(2, "schedule", *arguments)


async def test_an_undeliverable_message_is_found_by_key_and_sent_again(client: bide.Client, vhost: Vhost) -> None:
    program = Program(vhost)

    async def ok(*arguments: str) -> str:
        return await asyncio.to_thread(program.ok, *arguments)

    queue = ("--queue", "bide.v1.schedule.undeliverable")
    await client.schedule(b"x", key="invoice:1", to="gone", delay="0s")
    await client.schedule(b"y", key="invoice:2", to="gone", delay="0s")

    async def arrived() -> bool:
        return await ready_at(vhost.url, queue[1]) == 2

    await eventually(arrived)
    (found,) = lines(await ok("errors", "list", *queue, "--key", "invoice:1", "--json"))
    assert (found["key"], found["queue"], found["reason"]) == ("invoice:1", "gone", "undeliverable")
    groups = lines(await ok("errors", "groups", *queue, "--by", "key", "--json"))
    assert [(one["group"], one["count"]) for one in groups] == [("invoice:1", 1), ("invoice:2", 1)]
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("gone")]))
    sent = json.loads(await ok("delay", "resend", *queue, "--allow", "gone", "--json"))
    assert sent == {"sent": 2, "kept": {}}
    assert {one.key for one in await receive(client, "gone", 2)} == {"invoice:1", "invoice:2"}


def shown_until(terminal: int, text: str | None) -> str:
    """What a terminal shows until it has shown a text; until its end if None."""
    output = b""
    while text is None or text.encode() not in output:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the end of the terminal, on Linux
            part = b""
        if not part:
            break
        output += part
    return output.decode()


async def test_a_terminal_shows_that_a_list_waits_for_a_gate(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mail")]))
        await client.schedule(b"", key="invoice:1", to="mail", delay="1h")
    near, far = pty.openpty()
    environment = {**Program(vhost).environment, "TERM": "xterm"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bide", "schedule", "list"), env=environment, stdin=far, stdout=far, stderr=far
    )
    os.close(far)
    before = await asyncio.to_thread(shown_until, near, "waiting for a gate")
    assert "waiting for a gate" in before
    assert "invoice:1" not in before
    async with gating(vhost.url, tmp_path / "gate"):
        after = await asyncio.to_thread(shown_until, near, None)
        assert await process.wait() == 0
    os.close(near)
    # The last sequence before the first line erases the message.
    assert after.rpartition("\x1b[2K")[2].endswith("  invoice:1\r\n")
