"""``bide schedule transfer`` as a process that is killed and stopped."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import bide
from tests.acceptance.test_cli import Program
from tests.check_histories import broken_promises
from tests.faults.cutting import Proxy
from tests.relay_process import gate
from tests.support import NUMBER, Vhost
from tests.timeouts import TIMEOUT

LONG_NUMBER = NUMBER or 20_000
LONG = [pytest.mark.long, pytest.mark.timeout(max(1800, LONG_NUMBER // 25))]


async def fill(client: bide.Client, number: int) -> dict[str, datetime]:
    """Schedule numbered messages that are due in an hour, and return their due times by key."""
    first = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    due = {f"key:{place}": first + timedelta(milliseconds=10 * place) for place in range(number)}
    await client.publish_many(
        bide.OutgoingSchedule(key.removeprefix("key:"), key=key, to="orders", deliver_at=moment)
        for key, moment in due.items()
    )
    return due


async def until_count(client: bide.Client, reached: int) -> None:
    """Wait until this many schedules wait there."""
    last, deadline = 0, time.monotonic() + TIMEOUT
    while (now := await client.count_scheduled()) < reached:
        if now != last:
            last, deadline = now, time.monotonic() + TIMEOUT
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)  # between two looks at the progress


@pytest.mark.parametrize(
    ("number", "to", "origin"),
    [
        pytest.param(600, "other_vhost", "vhost", marks=pytest.mark.slow, id="600"),
        # From the installed release to the one under test.
        pytest.param(LONG_NUMBER, "vhost", "installed_vhost", marks=LONG, id=f"{LONG_NUMBER}"),
    ],
)
async def test_a_killed_transfer_of_schedules_loses_nothing_and_repeats_nothing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    number: int,
    to: str,
    origin: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vhost, other_vhost = (request.getfixturevalue(name) for name in (origin, to))
    program = Program(vhost)
    command = ("schedule", "transfer", "--to-url", other_vhost.url, "--json")
    with gate(vhost, tmp_path / "first"), gate(other_vhost, tmp_path / "second"):
        async with bide.connect(vhost.url) as first, bide.connect(other_vhost.url) as second:
            for client in (first, second):
                await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            due = await fill(first, number)
            assert json.loads(program.ok(*command, "--dry-run")) == {"waiting": number}
            for reached in (number // 5, number // 2):
                process = program.start(*command)
                await until_count(second, reached)
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
            before, begun = await first.count_scheduled(), time.monotonic()
            process = program.start(*command)
            out, err = await asyncio.to_thread(process.communicate, timeout=max(TIMEOUT, number / 25))
            seconds = time.monotonic() - begun
            assert process.returncode == 0, err
            result = json.loads(out)
            assert (result["left"], result["waiting"]) == ({}, 0)
            assert (result["ended"], result["repeated"], result["finished"]) == (0, 0, True)
            assert (await first.count_scheduled(), await second.count_scheduled()) == (0, number)
            assert {one.key: one.due_time async for one in second.list_scheduled()} == due
            earliest = (datetime.now(UTC) + timedelta(seconds=6)).replace(microsecond=0)
            assert (await second.move_scheduled(prefix="", deliver_at=earliest)).count == number
            found: list[bide.Message] = []
            async with second.consume("orders", prefetch=1000) as messages:
                async for message in messages:
                    found.append(message)
                    await message.ack()
                    if len(found) == number:
                        break
            assert min(one.received_at for one in found) >= earliest
            moved_due = {b"%d" % place: earliest for place in range(number)}
            assert broken_promises(tmp_path / "history", moved_due, found) == {}
            assert (await first.get("orders"), await second.get("orders")) == (None, None)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{number} schedules, two kills: none came twice; the last run moved {before} in {seconds:.1f} s "
            f"({before / seconds:.0f}/s)\n"
        )


async def test_a_stopped_transfer_prints_the_command_that_goes_on(
    program: Program, vhost: Vhost, other_vhost: Vhost, tmp_path: Path
) -> None:
    number = 2000
    command = ("schedule", "transfer", "--to-url", other_vhost.url)
    with gate(vhost, tmp_path / "first"), gate(other_vhost, tmp_path / "second"):
        async with bide.connect(vhost.url) as first, bide.connect(other_vhost.url) as second:
            for client in (first, second):
                await client.declare(bide.Topology(queues=[bide.Queue.quorum("orders")]))
            await fill(first, number)
            # Through a proxy in this process: while the test gets no processor time, the command makes no progress.
            async with Proxy(other_vhost.url) as proxy:
                process = program.start(*command[:-1], proxy.url)
                await until_count(second, 100)
                process.send_signal(signal.SIGTERM)
                _, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
                assert process.returncode == 1
                again = shlex.split(err.strip().splitlines()[-1].removeprefix("bide: go on with: "))
                assert again[:-1] == ["bide", *command[:-1]]
                assert again[-1].endswith(f":***@{proxy.url.rpartition('@')[2]}")
            moved = await second.count_scheduled()
            assert (await first.count_scheduled(), moved < number) == (number - moved, True)
            output = program.ok(*command)
            assert output.splitlines() == [f"{number - moved:>9}  moved", "        0  left"]


def test_bad_usage_is_one_line(program: Program, vhost: Vhost) -> None:
    assert "--to-url" in program.fails(2, "schedule", "transfer")
    assert "both URLs lead to" in program.fails(2, "schedule", "transfer", "--to-url", vhost.url)
