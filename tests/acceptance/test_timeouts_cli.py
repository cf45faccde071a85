"""``bide timeouts`` as processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import bide
from bide.migration import Migration
from bide.timeouts import TimeoutMigration, inspect_timeout_manager, retire_timeout_manager
from bide.timeouts.claims import Batch, ClaimedTable
from bide.timeouts.dispatcher import BATCH as DISPATCH_BATCH
from bide.timeouts.migration import BATCH
from bide.timeouts.retire import Retirement
from bide.topology import Binding, Exchange, Queue, Topology
from tests.acceptance.test_cli import Program
from tests.broker.receiving import eventually, receive
from tests.databases import DatabaseServer
from tests.faults.cutting import Proxy
from tests.stored_timeouts import Store, endpoints, later
from tests.support import NUMBER, Vhost
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


@pytest.fixture
async def held_program(vhost: Vhost, program: Program) -> AsyncIterator[Program]:
    """The command line, with a proxy in this process before the broker, for commands that are stopped on their way.

    While the test gets no processor time, they make no progress either.
    """
    async with Proxy(vhost.url) as proxy:
        program.environment["BIDE_URL"] = proxy.url
        yield program


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
            await asyncio.sleep(0.01)  # between two looks at the progress


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


def body_of(place: int) -> bytes:
    """The body of a numbered timeout: 200 bytes that no other one has."""
    return f"{place} ".encode() + hashlib.sha256(str(place).encode()).digest() * 6


def headers_of(place: int) -> dict[str, str]:
    return {
        "NServiceBus.MessageId": f"m-{place}",
        "NServiceBus.EnclosedMessageTypes": "Shop.Remind, Shop",
        "Place": f"Größe {place}",
    }


ENDPOINTS = ("Billing", "Sales")


def destination_of(place: int) -> str:
    """The endpoint that a numbered timeout is for. Its table is that of either endpoint."""
    return ENDPOINTS[place // 2 % 2]


@dataclass
class Arrivals:
    """What arrives from a migration, compared with what was stored.

    Attributes:
        due: the due times by number.
        counts: how often each number arrived.
        wrong: a description of each early, changed or misdirected message.
        late: how late each first arrival was, in seconds.
    """

    due: list[datetime]
    counts: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[float] = field(default_factory=list)

    async def receive(self, client: bide.Client, queue: str) -> None:
        """Receive from the queue of an endpoint until the message ``end`` comes."""
        async with client.consume(queue, prefetch=1000) as messages:
            async for message in messages:
                await message.ack()
                if message.body == b"end":
                    return
                self._add(message, queue)

    def _add(self, message: bide.Message, queue: str) -> None:
        place = int(message.body.partition(b" ")[0])
        stored = headers_of(place)
        found = {
            "early": message.received_at < self.due[place],
            "at the wrong endpoint": queue != destination_of(place),
            "changed": message.body != body_of(place)
            or {name: message.headers.get(name) for name in stored} != stored
            or message.message_id != stored["NServiceBus.MessageId"],
        }
        self.wrong += [f"{place} is {what}" for what, is_found in found.items() if is_found]
        if not self.counts[place]:
            self.late.append((message.received_at - self.due[place]).total_seconds())
        self.counts[place] += 1


async def while_progressing(count: Callable[[], int], is_done: Callable[[int], bool], until: datetime) -> None:
    """Wait for a condition: until a time, and longer while a number changes."""
    last = count()
    # Counting the rows of a large table takes the database as long as moving hundreds of them.
    pause = min(1.0, max(0.01, last / 1_000_000))
    deadline = time.monotonic() + max(0.0, (until - datetime.now(UTC)).total_seconds()) + TIMEOUT
    while not is_done(last):
        assert time.monotonic() < deadline, last
        await asyncio.sleep(pause)  # between two looks at the progress
        if (now := count()) != last:
            last, deadline = now, max(deadline, time.monotonic() + TIMEOUT)


LONG_NUMBER = NUMBER or 30_000


@pytest.mark.parametrize(
    ("database_server", "infrastructure", "layout"),
    [
        pytest.param("postgresql", INFRASTRUCTURE, LAYOUT, id="postgresql to nservicebus"),
        pytest.param("mysql", bide.Clock(), ("--to-layout", "clock"), marks=pytest.mark.long, id="mysql to clock"),
    ],
    indirect=["database_server"],
)
@pytest.mark.parametrize(
    ("number", "kills", "ahead", "period"),
    [
        pytest.param(4_000, 2, 60, 30, marks=pytest.mark.slow, id="4000"),
        pytest.param(
            LONG_NUMBER,
            10,
            max(120, LONG_NUMBER // 1250),
            max(60, LONG_NUMBER // 600),  # a thousand in a second are late through a cascade on two cores
            marks=[pytest.mark.long, pytest.mark.timeout(max(1800, LONG_NUMBER // 100))],
            id=f"{LONG_NUMBER}",
        ),
    ],
)
async def test_a_killed_migration_loses_nothing_and_counts_what_may_come_twice(
    held_program: Program,
    vhost: Vhost,
    store: Store,
    infrastructure: bide.NServiceBus | bide.Clock,
    layout: tuple[str, ...],
    number: int,
    kills: int,
    ahead: int,
    period: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("timeouts", "migrate", "--all", *layout, "--past", "send", "--json")
    store.create("Billing")

    with store.counting("Billing") as billing, store.counting("Sales") as sales:

        def stored() -> int:
            return billing() + sales()

        async with endpoints(vhost, infrastructure, *ENDPOINTS) as client:
            first = later(seconds=ahead)
            due = [first + timedelta(seconds=period * place // number) for place in range(number)]
            for start in range(0, number, 10_000):
                for table, endpoint in enumerate(ENDPOINTS):
                    places = range(start + table, min(start + 10_000, number), 2)
                    store.add(endpoint, *((destination_of(n), due[n], headers_of(n), body_of(n)) for n in places))
            arrivals = Arrivals(due)
            receivers = [asyncio.create_task(arrivals.receive(client, one)) for one in ENDPOINTS]
            begun = time.monotonic()
            for left in sorted(random.sample(range(BATCH, number - BATCH), kills), reverse=True):
                process = held_program.start(*command)
                await while_progressing(stored, left.__ge__, later())
                assert process.poll() is None
                process.kill()
                await asyncio.to_thread(process.communicate)
            before, restarted = stored(), time.monotonic()
            process = held_program.start(*command)
            await while_progressing(stored, lambda _: process.poll() is not None, later())
            out, err = process.communicate()
            ended = time.monotonic()
            assert process.returncode == 0, err
            is_in_time = datetime.now(UTC) < first
            assert json.loads(out)["finished"]
            assert stored() == 0
            (run,) = json.loads(await asyncio.to_thread(held_program.ok, "timeouts", "status", "--json"))
            sent, claimed, counted = (
                sum(one[key] for one in run["endpoints"]) for key in ("sent", "claimed", "repeated")
            )
            assert (run["status"], sent, claimed) == ("completed", number, 0)
            assert not any(one["left"] for one in run["endpoints"])
            await while_progressing(arrivals.counts.total, lambda _: len(arrivals.counts) == number, due[-1])
            # It only counts. Its target has to be another infrastructure.
            waiting = Migration(vhost.url, infrastructure, bide.Celery(), allow=[])

            async def is_empty() -> bool:
                return not any(one.messages for one in await waiting.count())

            # What was sent twice may come a little later than the first copy.
            await eventually(is_empty)
            for endpoint in ENDPOINTS:
                await client.publish(b"end", to=endpoint)
            await asyncio.gather(*receivers)
    repeated = arrivals.counts.total() - number
    assert arrivals.wrong == []
    assert max(arrivals.counts.values()) <= 1 + kills
    assert repeated <= counted <= kills * 2 * BATCH
    late = sorted(arrivals.late)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{number} timeouts from {store.server.scheme} to {infrastructure.name}, {kills} kills: none lost, "
            f"early, changed or at the wrong endpoint; {repeated} came twice, {counted} counted as perhaps sent twice; "
            f"{number / (ended - begun):.0f}/s with the kills, {before / (ended - restarted):.0f}/s in the last run, "
            f"which moved {before}; all sent {'before' if is_in_time else 'AFTER'} the first was due; late by "
            f"{late[number // 2]:.1f} s (median), {late[number * 99 // 100]:.1f} s (99 %), {late[-1]:.1f} s (at most)\n"
        )


async def test_a_stopped_migration_repeats_nothing_and_prints_the_command_that_continues(
    held_program: Program, vhost: Vhost, store: Store
) -> None:
    command = ("timeouts", "migrate", "--endpoint", "Sales", *LAYOUT, "--json")
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        fill(store, 10_000, later(hours=2), timedelta(hours=1))
        process = held_program.start(*command)
        await until_left(process, store, 9_000)
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        assert process.returncode == 1
        first = json.loads(out)
        assert not first["finished"]
        assert err.splitlines()[-1] == f"bide: go on with: bide {' '.join(command)}"
        assert store.count("Sales") == 10_000 - sum(first["sent"].values())
        second = json.loads(await asyncio.to_thread(held_program.ok, *command))
        assert (sum(first["sent"].values()) + sum(second["sent"].values()), second["repeated"]) == (10_000, 0)


async def test_an_abort_restores_what_was_claimed_and_keeps_what_was_sent(
    program: Program, vhost: Vhost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ClaimedTable.finish

    def die_in_the_second_batch(self: ClaimedTable, batch: Batch, *rest: Any) -> None:
        if batch.number > 1:
            raise InterruptedError
        finish(self, batch, *rest)

    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        fill(store, BATCH, later(hours=2), timedelta(hours=1))
        claimed = store.add("Sales", *[("Sales", later(hours=4), {"n": str(n)}, b"\xff") for n in range(5)])
        before = store.contents()["SalesTimeoutData"]
        with monkeypatch.context() as patched:
            patched.setattr(ClaimedTable, "finish", die_in_the_second_batch)
            with pytest.raises(InterruptedError):
                await TimeoutMigration(store.url, vhost.url, INFRASTRUCTURE).run()
        interrupted = program.run("timeouts", "status", "--json")
        (run,) = json.loads(interrupted.stdout)
        assert (interrupted.returncode, run["status"], store.count("Sales")) == (1, "running", 0)
        assert [run["endpoints"][0][name] for name in ("sent", "claimed", "repeated")] == [BATCH, 5, 0]

        aborted = json.loads(program.ok("timeouts", "abort", "--yes", "--json"))
        assert (aborted["run"], aborted["status"]) == (run["run"], "aborted")
        assert [aborted["endpoints"][0][name] for name in ("sent", "claimed", "repeated")] == [BATCH, 0, 5]
        assert store.stored("Sales") == set(claimed)
        contents = store.contents()
        assert set(contents["SalesTimeoutData"]) <= set(before)
        assert len(contents[f"bide_timeouts_{run['run']}_0"]) == BATCH
        assert json.loads(program.ok("timeouts", "status", "--json")) == [aborted]
        shown = program.ok("timeouts", "status").splitlines()
        assert shown[0].startswith(f"run {run['run']}: aborted, started ")
        assert shown[1].split() == f"{BATCH} of Sales sent, 5 perhaps sent twice".split()

        done = json.loads(program.ok("timeouts", "migrate", "--all", *LAYOUT, "--json"))
        assert (done["run"] != run["run"], done["sent"]) == (True, {"Sales": 5})


async def test_the_commands_show_and_refuse(program: Program, vhost: Vhost, store: Store) -> None:
    async with endpoints(vhost, INFRASTRUCTURE, "Sales"):
        store.add("Sales", *[("Sales", later(hours=2, seconds=30), {}, b"x") for _ in range(3)])
        store.add("Sales", ("Gone", later(hours=3), {}, b"x"))
        missing = f"the queue 'Gone' does not exist on the virtual host '{vhost.name}'"
        before = store.contents()
        done = program.run("timeouts", "preview", *LAYOUT)
        assert store.contents() == before
        assert [*before] == ["SalesTimeoutData"]
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
        assert program.ok("timeouts", "status") == "no runs\n"
        migrate = ("timeouts", "migrate", *LAYOUT)
        assert "give one of --endpoint, --all and --table" in program.fails(2, *migrate)
        assert "no time zone" in program.fails(2, *migrate, "--all", "--cutoff", "2026-01-01T00:00:00")
        assert "'Nowhere' has no table" in program.fails(1, *migrate, "--endpoint", "Nowhere")
        password = "postgresql://bide:secret@127.0.0.1:1/x"
        assert "secret" not in program.fails(1, *migrate, "--all", "--database", password)
        error = program.fails(2, *migrate, "--all", "--database", "oracle://x/y")
        assert "starts with 'oracle:'" in error
        assert "--to-column" in error
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
