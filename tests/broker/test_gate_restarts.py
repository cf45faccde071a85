"""Gates that stop, start, take over, and build their index anew on a real broker."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from subprocess import Popen

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import FolderInUseError, NewerRecordError, NotAppliedError, ScheduleLogError
from bide.gate.log_reader import LogReader
from bide.schedules.encoding import decode
from bide.schedules.names import PARTITIONS, partition_of
from bide.schedules.questions import CountQuestion, KeyQuestion
from bide.schedules.records import ScheduleFilter, SnapshotChunk
from bide.topology import Queue, Topology
from tests.broker.receiving import eventually, ready, ready_at, receive
from tests.broker.schedule_log import NAMES, LogClient, gating, log_client
from tests.leaks import no_leaks
from tests.relay_process import gate
from tests.support import Vhost
from tests.timeouts import TIMEOUT

RETENTION = 4_000_000
KILLED_AFTER_ITS_FIRST_COMMIT = """
import asyncio, os, signal, sys
import bide
from bide.gate.index import ScheduleIndex

commit = ScheduleIndex.commit

def commit_and_die(index):
    commit(index)
    # No signal from outside would always hit the time between the first commit and the last.
    if index.state.waiting_count:
        os.kill(os.getpid(), signal.SIGKILL)

ScheduleIndex.commit = commit_and_die
asyncio.run(bide.Gate(sys.argv[1], allow=["*"], state=sys.argv[2]).run())
"""
SMALL = {"max-length-bytes": RETENTION, "stream-max-segment-size-bytes": 100_000}


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[None]:
    """A gate may leave neither a task nor an unhandled error behind."""
    async with no_leaks():
        yield


@pytest.fixture
def small_log(vhost: Vhost) -> None:
    """A retention of 4 MB, by a policy."""
    policy = {"pattern": r"\.schedule\.[0-9]$", "definition": SMALL, "apply-to": "all"}
    vhost.broker.management.call("PUT", "policies", vhost.name, "small", body=policy)


@pytest.fixture
async def client(vhost: Vhost, request: pytest.FixtureRequest, quiet: None) -> AsyncIterator[bide.Client]:
    """A client, with a target and the schedule log."""
    if "small_log" in request.fixturenames:
        request.getfixturevalue("small_log")
    async with bide.connect(vhost.url) as client:
        await client.declare(NAMES.topology() | Topology(queues=[Queue.quorum("mails")]))
        yield client


@pytest.fixture
async def log(vhost: Vhost, client: bide.Client) -> AsyncIterator[LogClient]:
    """A client of the log. Some tests are blocked while the process of a gate starts."""
    async with log_client(vhost.idle_url) as log:
        yield log


async def leading(*gates: tuple[bide.Gate, int]) -> None:
    """Wait until each gate leads this number of partitions, or more."""

    async def are_leading() -> bool:
        return all(len(one.leads) >= number for one, number in gates)

    await eventually(are_leading, step=0.01)


async def waiting(log: LogClient) -> int:
    """How many schedules wait, by the leading gates."""
    counts = [await log.ask(CountQuestion(filter=ScheduleFilter()), one) for one in range(PARTITIONS)]
    return sum(one.count or 0 for one in counts)


def suffer(folder: Path, fate: str) -> None:
    """Let something happen to an index."""
    for path in folder.glob("*.db*"):
        match fate:
            case "deleted":
                path.unlink()
            case "garbled":
                path.write_bytes(b"garbled" * 1000)
            case "cut short":
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            case _:
                pass


@pytest.mark.parametrize("fate", ["kept", "deleted", "garbled", "cut short"])
async def test_a_restarted_gate_knows_what_waits_whatever_became_of_its_index(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path, fate: str
) -> None:
    async with gating(vhost.url, tmp_path):
        for number in range(100):
            await log.add(f"later{number}", "q:mails", 3_600_000)
        await log.add("soon", "q:mails", body=b"soon")
        await receive(client, "mails", 1)
        assert await waiting(log) == 100
    suffer(tmp_path, fate)
    await log.add("while it was away", "q:mails", body=b"away")
    async with gating(vhost.url, tmp_path):
        assert [one.body for one in await receive(client, "mails", 1)] == [b"away"]
        assert await waiting(log) == 100
        assert (await log.change("cancel", "soon")).outcome == "too-late"
    assert await ready_at(vhost.url, "mails") == 0


def indexed(folder: Path) -> int:
    """How many schedules a killed gate has left in its index."""
    found = 0
    for path in folder.glob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            found += connection.execute("SELECT count(*) FROM waiting").fetchone()[0]
    return found


async def test_a_gate_that_is_killed_while_it_builds_its_index_goes_on(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    keys = [f"later{number}" for number in range(20_000)]
    made = (bide.OutgoingSchedule(b"", key=key, to="mails", delay="1h") for key in keys)
    assert (await client.publish_many(made)).confirmed == len(keys)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_AFTER_ITS_FIRST_COMMIT, vhost.url, str(tmp_path)
    )
    assert await asyncio.wait_for(killed.wait(), TIMEOUT) == -signal.SIGKILL
    assert 0 < indexed(tmp_path) < len(keys)
    async with gating(vhost.url, tmp_path):
        assert await waiting(log) == len(keys)
        assert (await log.change("cancel", keys[0])).outcome == "cancelled"
        assert (await log.change("cancel", keys[-1])).outcome == "cancelled"
        assert await waiting(log) == len(keys) - 2


async def test_an_index_of_another_log_is_replaced(
    client: bide.Client, log: LogClient, vhost: Vhost, vhost_connection: Connection, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path):
        for number in range(100):
            await log.add(f"lost{number}", "q:mails", 3_600_000)
        assert await waiting(log) == 100
    channel = await vhost_connection.channel()
    for number in range(PARTITIONS):
        await channel.delete_queue(NAMES.log(number))
    async with gating(vhost.url, tmp_path):
        await log.add("a", "q:mails", 3_600_000)
        assert (await log.change("run-now", "a")).outcome == "running"
        assert await waiting(log) == 0


@pytest.mark.parametrize("deleted", [NAMES.log(3), NAMES.queries(3), NAMES.gates])
async def test_a_gate_ends_if_a_part_of_the_log_was_deleted(
    client: bide.Client, vhost: Vhost, vhost_connection: Connection, tmp_path: Path, deleted: str
) -> None:
    """It would interrupt all partitions again and again, and only a start declares the log."""
    gate = bide.Gate(vhost.url, allow=["*"], state=tmp_path)
    work = asyncio.create_task(gate.run())
    await leading((gate, PARTITIONS))
    async with await vhost_connection.channel() as channel:
        await (channel.delete_exchange(deleted) if deleted == NAMES.gates else channel.delete_queue(deleted))
    with pytest.raises(NotAppliedError, match=r"was deleted .*start the gate again to declare it"):
        await asyncio.wait_for(work, TIMEOUT)


async def test_two_gates_do_not_share_a_folder(client: bide.Client, vhost: Vhost, tmp_path: Path) -> None:
    async with gating(vhost.url, tmp_path):
        with pytest.raises(FolderInUseError):
            await bide.Gate(vhost.url, allow=["*"], state=tmp_path).run()


async def test_a_record_of_a_later_release_stops_the_gate(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    await log.channel.publish(
        exchange=NAMES.operations, routing_key="3", values={}, body=b'{"v":2,"kind":"schedule"}\n'
    )
    with pytest.raises(NewerRecordError, match="upgrade the gates"):
        await bide.Gate(vhost.url, allow=["*"], state=tmp_path).run()


async def test_partitions_spread_over_two_gates_and_each_message_is_delivered_once(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    async with gating(vhost.url, tmp_path / "a") as first, gating(vhost.url, tmp_path / "b") as second:
        await leading((first, PARTITIONS // 2), (second, PARTITIONS // 2))

        async def has_one_leader_each() -> bool:
            return sorted([*first.leads, *second.leads]) == list(range(PARTITIONS))

        # Until the first gate has read that the second one leads a partition, both think so.
        await eventually(has_one_leader_each)
        for number in range(200):
            await log.add(f"{number}", "q:mails", 500, body=b"%d" % number)
        bodies = [one.body for one in await receive(client, "mails", 200)]
        assert len(set(bodies)) == 200

        async def are_counted() -> bool:
            # Their confirms can come after the messages.
            return first.done.delivered + second.done.delivered == 200

        await eventually(are_counted)
        assert min(first.done.delivered, second.done.delivered) > 0


async def test_another_gate_takes_over_from_a_killed_one(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    keys = {partition_of(str(number)): str(number) for number in range(100)}
    with gate(vhost, tmp_path / "killed") as killed:
        assert await waiting(log) == 0
        async with gating(vhost.url, tmp_path / "other") as other:
            await leading((other, PARTITIONS // 2))
            killed.kill()
            for key in keys.values():
                await log.add(key, "q:mails", body=key.encode())
            bodies = [one.body for one in await receive(client, "mails", len(keys))]
    assert sorted(bodies) == sorted(key.encode() for key in keys.values())


async def test_a_gate_that_is_stopped_hands_over_at_once(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gating(vhost.url, tmp_path / "other") as other:
        async with gating(vhost.url, tmp_path / "stopped") as stopped:
            await leading((stopped, PARTITIONS // 2))
            # From now on, no gate takes over because another one is silent.
            monkeypatch.setattr("bide.gate.leadership.TAKE_OVER_AFTER", 10 * TIMEOUT)
        await leading((other, PARTITIONS))


async def append_much(log: LogClient, key: str, megabytes: int) -> None:
    """Replace a schedule again and again, and wait for the gate after each half megabyte."""
    for _ in range(megabytes * 2):
        records = [log.add_record(key, "q:mails", 3_600_000, body=bytes(20_000)) for _ in range(25)]
        await asyncio.gather(*(log.append(one) for one in records[:-1]))
        assert (await log.call(records[-1])).outcome == "scheduled"


async def first_offset(connection: Connection, partition: int) -> int:
    reader = await LogReader.open(connection, NAMES.log(partition), "first")
    offset = (await reader.batch())[0].offset
    reader.close()
    return offset


async def test_state_is_carried_beyond_the_retention_and_room_is_freed(
    client: bide.Client, log: LogClient, vhost: Vhost, vhost_connection: Connection, tmp_path: Path, small_log: None
) -> None:
    partition = partition_of("busy")
    kept = [key for key in map(str, range(400)) if partition_of(key) == partition]
    async with gating(vhost.url, tmp_path / "a", retention=RETENTION):
        for key in kept:
            await log.add(key, "q:mails", 3_600_000, body=key.encode())
        for _ in range(5):
            await log.channel.publish(
                exchange=NAMES.operations, routing_key=f"room.{partition}", values={}, body=b"reservation"
            )
        await append_much(log, "busy", 12)

        async def have_left() -> bool:
            # Retention removes segments a moment after their last record.
            return await first_offset(vhost_connection, partition) > len(kept)

        await eventually(have_left)

        async def room_is_freed() -> bool:
            # On a busy machine, too much was appended during each snapshot so far.
            await log.add("busy", "q:mails", 3_600_000, body=bytes(20_000))
            return await ready(vhost_connection, NAMES.room(partition)) == 0

        await eventually(room_is_freed, step=0.3)
    # Without an index, from the snapshot alone.
    async with gating(vhost.url, tmp_path / "b", retention=RETENTION):
        assert await waiting(log) == len(kept) + 1
        (found,) = (await log.ask(KeyQuestion(key=kept[7]), partition)).waiting
        assert found.message.body == kept[7].encode()
        # With an index that retention has overtaken.
        await append_much(log, "busy", 8)
    async with gating(vhost.url, tmp_path / "a", retention=RETENTION):
        assert await waiting(log) == len(kept) + 1
        assert (await log.change("run-now", kept[0])).outcome == "running"
        assert [one.body for one in await receive(client, "mails", 1)] == [kept[0].encode()]


async def test_a_log_that_lost_records_stops_the_gate(
    client: bide.Client, log: LogClient, vhost: Vhost, vhost_connection: Connection, tmp_path: Path, small_log: None
) -> None:
    records = [log.add_record("a", "q:mails", 3_600_000, body=bytes(20_000)) for _ in range(500)]
    await asyncio.gather(*(log.append(one) for one in records))
    partition = partition_of("a")

    async def has_lost() -> bool:
        # On a fast machine the records are one chunk, which retention removes as a whole: leave one to be read.
        await log.add("a", "q:mails", 3_600_000)
        return await first_offset(vhost_connection, partition) > 0

    await eventually(has_lost)
    with pytest.raises(ScheduleLogError, match="records are lost"):
        await bide.Gate(vhost.url, allow=["*"], state=tmp_path, retention=RETENTION).run()


async def first_chunk(reader: LogReader, process: Popen[bytes], known: set[str]) -> SnapshotChunk | None:
    """The first chunk of a snapshot that is not known; None if the gate has ended, or appends no more."""
    deadline = time.monotonic() + (30 if known else TIMEOUT)
    while process.poll() is None and time.monotonic() < deadline:
        try:
            async with asyncio.timeout(1):
                records = [decode(one.body) for one in await reader.batch()]
        except TimeoutError:
            continue
        for one in records:
            if isinstance(one, SnapshotChunk) and one.cycle not in known:
                return one
    return None


@pytest.mark.long
async def test_gates_that_are_killed_while_they_carry_lose_nothing(
    client: bide.Client, log: LogClient, vhost: Vhost, vhost_connection: Connection, tmp_path: Path, small_log: None
) -> None:
    """They stop with an error before retention takes what was not carried. A higher retention lets them go on."""
    partition = partition_of("busy")
    kept = [key for key in map(str, range(20_000)) if partition_of(key) == partition]
    # Five chunks of 500 schedules, of which a gate appends four before it has read the first one back.
    await asyncio.gather(*(log.add(key, "q:mails", 3_600_000, body=key.encode()) for key in kept))
    await asyncio.gather(*(log.add("busy", "q:mails", 3_600_000, body=bytes(20_000)) for _ in range(30)))
    cycles = set[str]()
    for _ in range(12):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        reader = await LogReader.open(vhost_connection, NAMES.log(partition), "last")
        with gate(vhost, tmp_path / "killed", "--retention", str(RETENTION)) as process:
            chunk = await first_chunk(reader, process.process, cycles)
            process.kill()
        reader.close()
        if chunk is None:
            break
        cycles.add(chunk.cycle)
    assert cycles
    async with gating(vhost.url, tmp_path / "last", retention=10 * RETENTION):
        assert await waiting(log) == len(kept) + 1


async def test_a_gate_stops_before_the_log_is_full_and_a_higher_retention_lets_it_go_on(
    client: bide.Client, log: LogClient, vhost: Vhost, tmp_path: Path
) -> None:
    records = [log.add_record("a", "q:mails", 3_600_000, body=bytes(20_000)) for _ in range(35)]
    await asyncio.gather(*(log.append(one) for one in records))
    for _ in range(2):
        with pytest.raises(ScheduleLogError, match="raise 'max-length-bytes'"):
            await bide.Gate(vhost.url, allow=["*"], state=tmp_path, retention=1_000_000).run()
    async with gating(vhost.url, tmp_path):
        assert (await log.change("run-now", "a")).outcome == "running"
        await receive(client, "mails", 1)
