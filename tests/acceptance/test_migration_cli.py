"""``bide delay migrate`` and ``transfer`` as processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import bide
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.delay.protocol import DelayInfrastructure
from bide.migration import Migration
from bide.topology import Queue, Topology
from tests.acceptance.test_cli import Program
from tests.check_histories import broken_promises
from tests.faults.cutting import Proxy
from tests.support import NUMBER, Vhost
from tests.timeouts import TIMEOUT

SOURCE = bide.NServiceBus(version=1, routing="direct")
TARGET = bide.Clock(prefix="new")
COMMAND = (
    *("delay", "migrate", "--from-layout", "nservicebus-v1", "--from-routing", "direct"),
    *("--to-layout", "clock", "--to-prefix", "new", "--allow", "orders"),
)
IN_FLIGHT = 100 * 28
"""Messages that a migration holds at most: its prefetch for each level."""


@dataclass(frozen=True)
class Case:
    """A migration, as a command and as its parts."""

    source: DelayInfrastructure
    command: tuple[str, ...]


V1_TO_CLOCK = Case(SOURCE, COMMAND)
CASES = {
    "v1 to clock": V1_TO_CLOCK,
    "v1 to v2": Case(SOURCE, (*COMMAND[:6], "--to-layout", "nservicebus", "--to-routing", "direct", *COMMAND[-2:])),
    "celery to clock": Case(bide.Celery(), ("delay", "migrate", "--from-layout", "celery", *COMMAND[6:])),
    "hall to clock": Case(bide.WaitingHall(), ("delay", "migrate", "--from-layout", "waiting-hall", *COMMAND[6:])),
}


async def fill(
    url: str, number: int, delays: tuple[float, float], source: DelayInfrastructure = SOURCE
) -> list[datetime]:
    """Send numbered messages with delays between two bounds, and return their due times."""
    lowest, highest = delays
    step = (highest - lowest) / number
    now = datetime.now(UTC)
    due = [now + timedelta(seconds=lowest + step * place) for place in range(number)]
    async with bide.connect(url, infrastructure=source, timeout=timedelta(seconds=TIMEOUT)) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        await client.publish_many(
            bide.OutgoingMessage(f"{place}", to="orders", deliver_at=moment) for place, moment in enumerate(due)
        )
    return due


async def waiting(vhost: Vhost, source: DelayInfrastructure = SOURCE) -> int:
    return sum(one.messages for one in await Migration(vhost.url, source, TARGET, allow=["*"]).count())


async def run_until(
    program: Program, vhost: Vhost, left: int, number: signal.Signals, case: Case = V1_TO_CLOCK
) -> tuple[int, str, str]:
    """Run the command, and send it a signal once fewer messages are left."""
    # Through a proxy in this process: while the test gets no processor time, the command makes no progress either.
    async with Proxy(vhost.url) as proxy:
        process = program.start(*case.command, "--json", BIDE_URL=proxy.url)
        last, deadline = 0, time.monotonic() + TIMEOUT
        while (now := await waiting(vhost, case.source)) > left:
            assert process.poll() is None, process.communicate()
            if now != last:
                last, deadline = now, time.monotonic() + TIMEOUT
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)  # between two looks at the progress
        process.send_signal(number)
        out, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        return process.returncode, out, err


async def collect(url: str, number: int, first: datetime) -> list[bide.Message]:
    """Receive messages, due from a time on, until as many different ones have come."""
    found: list[bide.Message] = []
    bodies: set[bytes] = set()
    async with bide.connect(url) as client, client.consume("orders", prefetch=1000) as messages:
        waiter = messages.__aiter__()
        while len(bodies) < number:
            async with asyncio.timeout(TIMEOUT + max(0.0, (first - datetime.now(UTC)).total_seconds())):
                message = await waiter.__anext__()
            await message.ack()
            found.append(message)
            bodies.add(message.body)
    return found


async def check_killed_twice(
    program: Program, old: Vhost, new: Vhost, case: Case, number: int, delays: tuple[float, float], history: Path
) -> str:
    """Move messages in three runs, two of which are killed, judge what arrives, and return what was counted.

    Args:
        history: the folder for the history that is judged.
    """
    due = await fill(old.url, number, delays, case.source)
    kills = []
    for left in (number * 4 // 5, number // 2):
        code, _, _ = await run_until(program, old, left, signal.SIGKILL, case)
        assert code == -signal.SIGKILL
        kills.append(datetime.now(UTC))
    before, begun = await waiting(old, case.source), time.monotonic()
    process = program.start(*case.command, "--json")
    out, err = await asyncio.to_thread(process.communicate, timeout=max(TIMEOUT, number / 50))
    seconds = time.monotonic() - begun
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    assert (result["left"], result["set_aside"], result["finished"]) == ({}, {}, True)
    assert sum(result["taken"].values()) == result["moved"]
    messages = await collect(new.url, number, due[0])
    assert broken_promises(history, {b"%d" % place: at for place, at in enumerate(due)}, messages, kills) == {}
    assert not [one.body for one in messages if one.received_at < due[int(one.body)]]
    repeated = len(messages) - number
    assert repeated <= 2 * IN_FLIGHT
    late = sorted((one.received_at - due[int(one.body)]).total_seconds() for one in messages)
    return (
        f"\n{number} messages, two kills: none lost or early, {repeated} came twice, {result['redelivered']} "
        f"redelivered to the last run, which moved {before} in {seconds:.1f} s ({before / seconds:.0f}/s); late by "
        f"{late[len(late) // 2]:.1f} s (median), {late[-1]:.1f} s (at most)\n"
    )


LONG_NUMBER = NUMBER or 20_000
LONG = [pytest.mark.long, pytest.mark.timeout(max(900, LONG_NUMBER // 50))]
LONG_DELAYS = (max(80, LONG_NUMBER // 300), max(120, LONG_NUMBER // 220))


@pytest.mark.parametrize(
    ("case", "number", "delays"),
    [
        pytest.param(V1_TO_CLOCK, 2000, (20, 35), marks=pytest.mark.slow, id="v1 to clock, 2000"),
        *(
            pytest.param(case, LONG_NUMBER, LONG_DELAYS, marks=LONG, id=f"{name}, {LONG_NUMBER}")
            for name, case in CASES.items()
        ),
    ],
)
async def test_a_migration_killed_twice_loses_nothing_and_nothing_is_early(
    program: Program,
    vhost: Vhost,
    tmp_path: Path,
    case: Case,
    number: int,
    delays: tuple[float, float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted = await check_killed_twice(program, vhost, vhost, case, number, delays, tmp_path)
    with capsys.disabled():
        sys.stdout.write(counted)


@pytest.mark.parametrize("number", [pytest.param(LONG_NUMBER, marks=LONG)])
async def test_a_transfer_to_another_broker_killed_twice_loses_nothing_and_nothing_is_early(
    vhost: Vhost, installed_vhost: Vhost, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the installed release to the one under test."""
    async with bide.connect(vhost.url) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
    source = bide.NServiceBus(routing="direct")
    layouts = ("--from-layout", "nservicebus", "--from-routing", "direct", *COMMAND[6:])
    case = Case(source, ("delay", "transfer", "--to-url", vhost.url, *layouts))
    program = Program(installed_vhost)
    counted = await check_killed_twice(program, installed_vhost, vhost, case, number, LONG_DELAYS, tmp_path)
    with capsys.disabled():
        sys.stdout.write(f"\nfrom {installed_vhost.broker.release} to {vhost.broker.release}:{counted}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
async def test_a_stopped_migration_prints_the_command_that_goes_on(
    program: Program, vhost: Vhost, number: signal.Signals
) -> None:
    await fill(vhost.url, 1000, (600, 700))
    code, out, err = await run_until(program, vhost, 800, number)
    assert code == 1
    first = json.loads(out)
    assert not first["finished"]
    assert 200 <= first["moved"] < 1000
    assert "Traceback" not in err
    stopped, again = err.strip().splitlines()[-2:]
    assert stopped == f"bide: stopped: {first['moved']} messages taken, the others are still in their queues"
    words = shlex.split(again.removeprefix("bide: go on with: "))
    assert words == ["bide", *COMMAND, "--json"]
    rest = json.loads(program.ok(*words[1:]))
    assert (first["moved"] + rest["moved"], rest["redelivered"]) == (1000, 0)


async def test_a_dry_run_counts_by_level_and_changes_nothing(program: Program, vhost: Vhost) -> None:
    await fill(vhost.url, 30, (600, 630))
    output = program.ok(*COMMAND, "--dry-run")
    assert output.splitlines() == [
        "       30  nsb.delay-level-09, wait 0:08:32",
        "       30  in 28 queues; nothing was changed",
    ]
    counts = json.loads(program.ok(*COMMAND, "--dry-run", "--json"))
    assert [one for one in counts if one["messages"]] == [
        {"queue": "nsb.delay-level-09", "messages": 30, "wait": 512.0}
    ]
    assert await waiting(vhost) == 30


async def test_the_output_counts_what_was_moved_set_aside_and_left(program: Program, vhost: Vhost) -> None:
    await fill(vhost.url, 30, (600, 630))
    done = program.run(*COMMAND[:-1], "others")
    assert done.returncode == 1
    assert done.stdout.decode().splitlines()[:2] == [
        "       30  from nsb.delay-level-09",
        "       30  taken: 0 moved, 30 set aside",
    ]
    assert "       30  set aside: the target 'q:orders' matches no allowed pattern (others)" in done.stdout.decode()
    assert done.stderr.decode() == "bide: 30 messages set aside in bide.set-aside.nsb.delay-delivery\n"
    assert program.ok(*COMMAND).splitlines() == [
        "       30  from bide.set-aside.nsb.delay-delivery",
        "       30  taken: 30 moved, 0 set aside",
        "        0  left in nservicebus-v1",
    ]


async def test_messages_go_to_another_virtual_host(program: Program, vhost: Vhost, other_vhost: Vhost) -> None:
    """Those whose target is missing there are set aside here."""
    program.ok("--help")  # the first command takes seconds to import bide
    due = await fill(vhost.url, 30, (60, 61))
    same = ("--from-layout", "nservicebus-v1", "--to-layout", "nservicebus-v1", "--allow", "*")
    transfer = ("delay", "transfer", "--to-url", other_vhost.url, *same, "--from-routing=direct", "--to-routing=direct")
    first = program.run(*transfer, "--json")
    assert first.returncode == 1
    assert sum(json.loads(first.stdout)["set_aside"].values()) == 30
    async with bide.connect(other_vhost.url) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
    assert json.loads(program.ok(*transfer, "--json"))["moved"] == 30
    messages = await collect(other_vhost.url, 30, due[0])
    assert len(messages) == 30
    assert not [one.body for one in messages if one.received_at < due[int(one.body)]]


async def test_bad_usage_is_one_line_and_exits_with_2(program: Program, vhost: Vhost) -> None:
    assert "--to-layout" in program.fails(2, *COMMAND[:6], "--allow", "*")
    assert "share names" in program.fails(
        2, "delay", "migrate", "--from-layout", "clock", "--to-layout", "clock", "--allow", "*"
    )
    assert "leave out --from-levels" in program.fails(2, *COMMAND, "--from-levels", "4")
    assert "belongs to celery" in program.fails(2, *COMMAND, "--to-queue-type", "classic")
    assert "no queue of the layout 'nservicebus-v1'" in program.fails(1, *COMMAND)
    await fill(vhost.url, 1, (600, 601))
    same = ("--from-layout", "nservicebus-v1", "--to-layout", "nservicebus-v1", "--allow", "*")
    assert "both URLs lead to" in program.fails(2, "delay", "transfer", "--to-url", vhost.url, *same)


async def test_a_second_run_is_refused(program: Program, vhost: Vhost) -> None:
    await fill(vhost.url, 1, (600, 601))
    connection = await Connection.open(BrokerUrl.parse(vhost.idle_url))
    async with await connection.channel() as channel:
        await channel.declare_queue(Queue("bide.migration.nsb.delay-delivery", exclusive=True, durable=False))
        assert "runs on this virtual host already" in program.fails(1, *COMMAND)
    await connection.close()
