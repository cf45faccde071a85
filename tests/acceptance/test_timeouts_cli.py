"""``bide timeouts`` as processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timedelta

import pytest

import bide
from bide.timeouts import inspect_timeout_manager, retire_timeout_manager
from bide.timeouts.dispatcher import BATCH as DISPATCH_BATCH
from bide.timeouts.migration import BATCH
from bide.timeouts.retire import Retirement
from bide.topology import Binding, Exchange, Queue, Topology
from tests.acceptance.test_cli import Program
from tests.broker.receiving import eventually, receive
from tests.databases import DatabaseServer
from tests.stored_timeouts import Store, endpoints, later
from tests.support import Vhost
from tests.timeouts import TIMEOUT

LAYOUT = ("--to-layout", "nservicebus", "--to-routing", "direct")
INFRASTRUCTURE = bide.NServiceBus(routing="direct")


@pytest.fixture
def store(database_server: DatabaseServer) -> Store:
    """A database with the timeouts of one endpoint."""
    store = Store(database_server, database_server.new_database())
    store.create("Sales")
    return store


@pytest.fixture
def program(vhost: Vhost, store: Store) -> Program:
    """The command line, with the database in its environment."""
    program = Program(vhost)
    program.environment["BIDE_DATABASE"] = store.url
    return program


def fill(store: Store, number: int, first: datetime, period: timedelta) -> dict[str, datetime]:
    """Store timeouts, and return their due times by body."""
    due = {str(place): first + period * place / number for place in range(number)}
    due = {body: moment.replace(microsecond=0) for body, moment in due.items()}
    rows = [("Sales", moment, {"NServiceBus.MessageId": f"m-{body}"}, body.encode()) for body, moment in due.items()]
    store.add("Sales", *rows)
    return due


async def until_left(process: subprocess.Popen[str], store: Store, left: int) -> None:
    """Wait until a process has left at most this number of timeouts in the table."""
    deadline = time.monotonic() + TIMEOUT
    # A connection for each look would take more processor time than the process that the test looks at.
    with store.counting("Sales") as count:
        while count() > left:
            assert process.poll() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def receive_all(client: bide.Client, due: dict[str, datetime]) -> Counter[str]:
    """Receive until every message has come, and check that none is early or altered; return their numbers by body."""
    counts = Counter[str]()
    async with client.consume("Sales", prefetch=1000) as messages:
        waiter = messages.__aiter__()
        while len(counts) < len(due):
            async with asyncio.timeout(TIMEOUT):
                message = await waiter.__anext__()
            body = message.body.decode()
            assert message.received_at >= due[body], body
            assert message.headers["NServiceBus.MessageId"] == message.message_id == f"m-{body}"
            await message.ack()
            counts[body] += 1
    return counts


@pytest.mark.parametrize(
    ("number", "kills", "ahead"),
    [
        pytest.param(4_000, 2, timedelta(seconds=60), marks=pytest.mark.slow, id="4000"),
        pytest.param(
            60_000,
            10,
            timedelta(minutes=4),
            marks=[pytest.mark.long, pytest.mark.timeout(1800)],
            id="60000",
        ),
    ],
)
async def test_a_killed_migration_loses_nothing_and_counts_what_may_come_twice(
    program: Program,
    vhost: Vhost,
    store: Store,
    number: int,
    kills: int,
    ahead: timedelta,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("timeouts", "migrate", "--all", *LAYOUT, "--past", "send", "--json")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales") as client:
        due = fill(store, number, later(seconds=ahead.total_seconds()), timedelta(seconds=30))
        thresholds = sorted(random.sample(range(BATCH, number - BATCH), kills), reverse=True)
        for left in thresholds:
            process = program.start(*command)
            await until_left(process, store, left)
            process.kill()
            await asyncio.to_thread(process.communicate)
        before, begun = store.count("Sales"), time.monotonic()
        done = await asyncio.to_thread(program.run, *command)
        seconds = time.monotonic() - begun
        assert done.returncode == 0, done.stderr.decode()
        assert store.count("Sales") == 0
        (run,) = json.loads(program.ok("timeouts", "status", "--json"))
        (counted,) = run["endpoints"]
        assert (run["status"], counted["sent"], counted["claimed"], counted["left"]) == ("completed", number, 0, {})
        counts = await receive_all(client, due)
    repeated = counts.total() - number
    assert max(counts.values()) <= 1 + kills
    assert repeated <= counted["repeated"] <= kills * 2 * BATCH
    with capsys.disabled():
        sys.stdout.write(
            f"\n{number} timeouts in {store.server.scheme}, {kills} kills: {repeated} came twice, "
            f"{counted['repeated']} counted as perhaps sent twice; the last run moved {before} in {seconds:.1f} s "
            f"({before / seconds:.0f}/s)\n"
        )


async def test_a_stopped_migration_repeats_nothing_and_prints_the_command_that_continues(
    program: Program, vhost: Vhost, store: Store
) -> None:
    command = ("timeouts", "migrate", "--endpoint", "Sales", *LAYOUT, "--json")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        fill(store, 10_000, later(hours=2), timedelta(hours=1))
        process = program.start(*command)
        await until_left(process, store, 9_000)
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        assert process.returncode == 1
        first = json.loads(out)
        assert not first["finished"]
        assert err.splitlines()[-1] == f"bide: go on with: bide {' '.join(command)}"
        assert store.count("Sales") == 10_000 - sum(first["sent"].values())
        second = json.loads(program.ok(*command))
        assert (sum(first["sent"].values()) + sum(second["sent"].values()), second["repeated"]) == (10_000, 0)


async def test_the_commands_show_and_refuse(program: Program, vhost: Vhost, store: Store) -> None:
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        store.add("Sales", *[("Sales", later(hours=2, seconds=30), {}, b"x") for _ in range(3)])
        store.add("Sales", ("Gone", later(hours=3), {}, b"x"))
        missing = f"the queue 'Gone' does not exist on the virtual host '{vhost.name}'"
        done = program.run("timeouts", "preview", *LAYOUT)
        assert done.returncode == 1
        lines = done.stdout.decode().splitlines()
        assert [one.split() for one in lines[2:4]] == [["3", "to", "Sales"], ["1", "to", "Gone"]]
        assert missing in lines[4]
        (shown,) = json.loads(program.run("timeouts", "preview", *LAYOUT, "--json").stdout)
        assert (shown["timeouts"], shown["destinations"], shown["problems"]) == (
            4,
            {"Sales": 3, "Gone": 1},
            {missing: 1},
        )
        assert program.ok("timeouts", "status") == "no run\n"
        migrate = ("timeouts", "migrate", *LAYOUT)
        assert "give one of --endpoint, --all and --table" in program.fails(2, *migrate)
        assert "no time zone" in program.fails(2, *migrate, "--all", "--cutoff", "2026-01-01T00:00:00")
        assert "'Nowhere' has no table" in program.fails(1, *migrate, "--endpoint", "Nowhere")
        password = "postgresql://bide:secret@127.0.0.1:1/x"
        assert "secret" not in program.fails(1, *migrate, "--all", "--database", password)
        assert "starts with 'oracle:'" in program.fails(2, *migrate, "--all", "--database", "oracle://x/y")
        done = program.run(*migrate, "--all")
        assert done.returncode == 1
        assert done.stdout.decode().splitlines()[:2] == ["        3  of Sales sent", "        3  sent"]
        assert "left: " in done.stdout.decode()
        assert store.count("Sales") == 1
        (run,) = json.loads(program.ok("timeouts", "status", "--json"))
        assert run["status"] == "completed"
        assert "nothing to abort" in program.fails(1, "timeouts", "abort", "--yes")


async def test_any_table_is_moved_by_its_columns(program: Program, vhost: Vhost, store: Store) -> None:
    store.server.execute(
        store.url,
        "CREATE TABLE reminder (number int PRIMARY KEY, queue varchar(50), content text, at timestamp, extra int)",
    )
    due = later(seconds=10)
    rows = [(place, "Sales", f"é {place}", due.replace(tzinfo=None), place) for place in range(3)]
    store.server.execute(store.url, "INSERT INTO reminder VALUES (%s, %s, %s, %s, %s)", rows)
    columns = "id=number,destination=queue,body=content,due=at"
    async with endpoints(vhost, INFRASTRUCTURE, "Sales") as client:
        wrong = ("timeouts", "migrate", *LAYOUT, "--table", "reminder")
        assert "has no column 'no'" in program.fails(
            1, *wrong, "--columns", "id=no,destination=queue,body=content,due=at"
        )
        assert "cannot be used as 'x'" in program.fails(2, *wrong, "--columns", "x=y")
        assert "no column is named for body" in program.fails(2, *wrong, "--columns", "id=number,destination=queue")
        (shown,) = json.loads(
            program.ok("timeouts", "preview", *LAYOUT, "--table", "reminder", "--columns", columns, "--json")
        )
        assert (shown["timeouts"], shown["destinations"]) == (3, {"Sales": 3})
        program.ok("timeouts", "migrate", *LAYOUT, "--table", "reminder", "--columns", columns, "--past", "send")
        assert store.server.execute(store.url, "SELECT * FROM reminder") == []
        messages = await receive(client, "Sales", 3)
        assert {(one.message_id, one.body.decode()) for one in messages} == {(f"{n}", f"é {n}") for n in range(3)}
        assert min(one.received_at for one in messages) >= due


async def test_a_timeout_manager_is_removed_only_when_it_is_unused(
    program: Program, vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = ("timeouts", "retire", "--endpoint", "Sales", "--watch", "1s", "--yes", "--json")
    names = ("Sales.Timeouts", "Sales.TimeoutsDispatcher")
    legacy = Topology(
        [Exchange(name, "fanout") for name in names],
        [Queue(name) for name in names],
        [Binding(name, name) for name in names],
    )
    async with bide.connect(vhost.url) as client:
        await client.declare(legacy)
        store.add("Sales", ("Sales", later(hours=1), {}, b"x"))
        await client.publish(b"late", exchange=names[0])
        done = program.run(*retire)
        found = json.loads(done.stdout)
        assert (done.returncode, found["removed"], found["stored"]) == (1, [], 1)
        assert found["queues"] == {names[0]: 1, names[1]: 0}
        assert len(found["problems"]) == 2
        (message,) = await receive(client, names[0], 1)
        assert message.body == b"late"
        store.server.execute(store.url, store.statement('DELETE FROM "SalesTimeoutData"'))

        async def inspect_before_a_message(*arguments: str) -> Retirement:
            found = await inspect_timeout_manager(*arguments)
            if not found.problems:
                await client.publish(b"late", exchange=names[0])
            return found

        # A sender that is still there: its message comes while the queues are watched.
        with monkeypatch.context() as patched:
            patched.setattr("bide.timeouts.retire.inspect_timeout_manager", inspect_before_a_message)
            watched = await retire_timeout_manager(store.url, vhost.url, "Sales", watch=timedelta(milliseconds=1))
        assert (watched.queues[names[0]], watched.removed) == (1, [])
        await receive(client, names[0], 1)
        async with client.consume(names[1]) as messages:
            waiter = asyncio.ensure_future(anext(aiter(messages)))

            async def is_consumed() -> bool:
                found = await inspect_timeout_manager(store.url, vhost.url, "Sales")
                return any("1 consumer" in one for one in found.problems)

            await eventually(is_consumed)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        found = json.loads(program.ok(*retire))
        assert found["removed"] == [
            *(f"exchange {name}" for name in names),
            *(f"queue {name}" for name in names),
            "table SalesTimeoutData",
        ]
        assert not await client.exists(names[0])
        again = json.loads(program.ok(*retire))
        assert (again["queues"], again["table"], again["removed"]) == ({}, None, [])


async def test_a_killed_dispatcher_loses_nothing_and_repeats_at_most_a_batch(
    program: Program, vhost: Vhost, store: Store
) -> None:
    number, command = 2000, ("timeouts", "dispatch", "--endpoint", "Sales", "--allow", "Sales", *LAYOUT, "--json")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales") as client:
        due = fill(store, number, later(minutes=-10), timedelta(minutes=5))
        for left in (1600, 800):
            process = program.start(*command)
            await until_left(process, store, left)
            process.kill()
            await asyncio.to_thread(process.communicate)
        process = program.start(*command)
        counts = await receive_all(client, due)
        await until_left(process, store, 0)
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["left"] == 0
    assert counts.total() - number <= 2 * DISPATCH_BATCH
