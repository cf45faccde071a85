"""What the index of a partition reports of the records that it applies."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import pytest

from bide.errors import ScheduleIndexError
from bide.gate import index as gate_index
from bide.gate import partition_index
from bide.gate.log_reader import LogRecord
from bide.gate.partition_index import PartitionIndex
from bide.schedules import snapshot
from bide.schedules.encoding import encode
from bide.schedules.entries import WaitingSchedule
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import PARTITIONS, ScheduleNames, partition_of
from bide.schedules.records import (
    AddSchedule,
    ChangeSchedule,
    Claim,
    Done,
    EndedOccurrence,
    ScheduleFilter,
    ScheduleRecord,
    Tick,
)
from bide.schedules.requests import RequestId
from bide.schedules.state import LogPosition

NAMES = ScheduleNames()
KEY = "invoice:42"
PARTITION = partition_of(KEY)
TURN = PARTITION / PARTITIONS * 5.0
"""The partitions commit in turns of five seconds: when that of the partition is."""
CHECKPOINT_THREAD = "bide-gate-checkpoint"

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def stored(offset: int, record: ScheduleRecord) -> LogRecord:
    exchange = NAMES.gates if isinstance(record, Claim | Done | Tick) else NAMES.operations
    return LogRecord(offset, exchange, encode(record))


def waiting(key: str) -> WaitingSchedule:
    return WaitingSchedule(
        key=key,
        id="5f2c-1",
        version="5f2c-1",
        target="q:mails",
        routing_key="",
        nominal=5_000,
        due=5_000,
        recurrence=None,
        message=ScheduledMessage(b"\0\0", b""),
    )


def schedule(number: int, *, key: str = KEY, due: int = 5_000, size: int = 10) -> LogRecord:
    return stored(
        number,
        AddSchedule(
            request=RequestId(session="5f2c", number=number + 1),
            key=key,
            target="q:mails",
            nominal=due,
            due=due,
            message=ScheduledMessage(b"\0\0", bytes(size)),
        ),
    )


def wait_for_checkpoint() -> None:
    """Wait until no checkpoint is under way. Until then nothing is committed."""
    for thread in threading.enumerate():
        if thread.name == CHECKPOINT_THREAD:
            thread.join()


class Clock:
    """A monotonic clock that a test sets."""

    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the index. Otherwise a batch would end after 50 ms on a busy machine."""
    clock = Clock()
    monkeypatch.setattr(partition_index, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class WatchedThread(ThreadPoolExecutor):
    """A thread that counts its calls, and that a test can hold up."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def submit(self, fn: Callable[_P, _Result], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_Result]:
        def call() -> _Result:
            self.may_go_on.wait()
            return fn(*args, **kwargs)

        self.calls += 1
        return super().submit(call)


async def test_an_end_that_another_gate_had_reported_is_reported_again(tmp_path: Path) -> None:
    """Otherwise the gate that reported it second would wait for its own report for ever."""
    index = PartitionIndex(tmp_path / "index.db", 0, NAMES, "mine")
    await index.open()
    items = (EndedOccurrence(occurrence="5f2c8a-17", outcome="delivered"),)
    records = [stored(0, Done(gate="other", items=items)), stored(1, Done(gate="mine", items=items))]
    applied = await index.apply(records, is_leading=False)
    await index.close()
    assert applied.ended == ["5f2c8a-17", "5f2c8a-17"]


async def test_a_claim_takes_what_is_due_soon_and_says_when_to_send_it(tmp_path: Path) -> None:
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine")
    await index.open()
    keys = islice((key for key in map(str, count()) if partition_of(key) == PARTITION), 3)
    records = [schedule(number, key=key, due=5_000 + 25 * number) for number, key in enumerate(keys)]
    await index.apply(records, is_leading=True)
    assert await index.claim(4_974, ahead=25) is None
    body = await index.claim(4_975, ahead=50)
    assert body is not None
    applied = await index.apply([LogRecord(3, NAMES.gates, body)], is_leading=True)
    assert [(one.occurrence, one.due) for one in applied.claimed] == [("5f2c-1", 5_000), ("5f2c-2", 5_025)]
    assert applied.next_due == 5_050
    assert await index.under_way() == applied.claimed
    await index.close()


async def test_what_a_client_asks_to_run_now_is_sent_before_it_is_due(tmp_path: Path) -> None:
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine")
    await index.open()
    run_now = ChangeSchedule(request=RequestId(session="5f2c", number=2), action="run-now", key=KEY)
    applied = await index.apply([schedule(0), stored(1, run_now)], is_leading=True)
    await index.close()
    assert [(one.occurrence, one.due) for one in applied.claimed] == [("5f2c-1", 0)]
    # A gate that takes over begins with what is under way.
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "other")
    await index.open()
    assert await index.under_way() == applied.claimed
    # A gate without an index begins with a snapshot.
    await index.begin_snapshot("cycle")
    chunk = await index.next_chunk()
    assert chunk is not None
    other = PartitionIndex(tmp_path / "other.db", PARTITION, NAMES, "third")
    await other.open()
    await other.put_chunk(chunk, index.position)
    assert await other.under_way() == applied.claimed
    await index.close()
    await other.close()


MANY = ChangeSchedule(request=RequestId(session="5f2c", number=1), action="cancel", filter=ScheduleFilter(prefix="in"))


@pytest.mark.parametrize(
    ("records", "is_in_thread"),
    [
        pytest.param([schedule(number) for number in range(16)], False, id="few and small"),
        pytest.param([LogRecord(0, NAMES.operations, b"not a record")], False, id="unreadable"),
        pytest.param([schedule(number) for number in range(17)], True, id="many"),
        pytest.param([schedule(0, size=16_000)], True, id="large"),
        pytest.param([stored(0, MANY)], True, id="a filter"),
        pytest.param([stored(0, Tick(number=1))], True, id="a tick"),
    ],
)
async def test_only_records_that_may_take_long_go_to_the_thread(
    tmp_path: Path, clock: Clock, records: Sequence[LogRecord], is_in_thread: bool
) -> None:
    clock.now = -1.0  # no commit is due
    thread = WatchedThread()
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine", executor=thread)
    await index.open()
    before = thread.calls
    applied = await index.apply(records, is_leading=False)
    assert thread.calls - before == is_in_thread
    assert (applied.count, index.position.count) == (len(records), len(records))
    await index.close()


async def test_a_record_waits_for_a_call_in_the_thread_whose_caller_was_cancelled(tmp_path: Path) -> None:
    """The connection to SQLite is for one thread at a time."""
    thread = WatchedThread()
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine", executor=thread)
    await index.open()
    thread.may_go_on.clear()
    try:
        cancelled = asyncio.create_task(index.size())
        await asyncio.sleep(0)  # starts the call
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        applying = asyncio.create_task(index.apply([schedule(0)], is_leading=False))
        for _ in range(10):  # turns of the loop in which it must not be applied
            await asyncio.sleep(0)
        assert index.position.count == 0
    finally:
        thread.may_go_on.set()
    assert (await applying).waiting == 1
    await index.close()


def committed(path: Path) -> int:
    """The offset of the last record that a killed gate would find in its index."""
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute("SELECT record FROM position").fetchone()[0]
        return found


@pytest.mark.parametrize("step", ["a snapshot", "the end"])
async def test_what_was_applied_is_committed_at_the_latest_with(tmp_path: Path, step: str) -> None:
    path = tmp_path / "index.db"
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    for number in range(2):
        await index.apply([schedule(number)], is_leading=False)
    assert committed(path) == 0
    if step == "a snapshot":
        assert (await index.begin_snapshot("c")).offset == 1
        assert committed(path) == 1
    await index.close()
    assert committed(path) == index.position.offset


async def test_a_snapshot_that_was_not_read_to_its_end_is_not_used(tmp_path: Path) -> None:
    """A gate that is killed while it reads a snapshot begins again without an index."""
    path = tmp_path / "index.db"
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    position = LogPosition(offset=7, count=8)
    entries = [waiting(f"{KEY}.{number}") for number in range(3)]
    chunks = [encode(one) for one in snapshot.cut("c", position, entries, most=1)]
    await index.clear()
    for body in chunks[:2]:
        await index.put_chunk(body, None)
    assert committed(path) == -1
    await index.clear()
    for body in chunks:
        await index.put_chunk(body, None if body is not chunks[-1] else position)
    assert committed(path) == index.position.offset == 7
    applied = await index.apply([], is_leading=False)
    assert applied.waiting == 3
    await index.close()


async def test_many_records_for_a_key_are_applied_in_their_order(tmp_path: Path) -> None:
    """Their keys are looked up together, and what is added is written later."""
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine")
    await index.open()
    cancel = ChangeSchedule(request=RequestId(session="5f2d", number=1), action="cancel", key=KEY)
    records = [schedule(0), *(schedule(number) for number in range(1, 30)), stored(30, cancel), schedule(31)]
    applied = await index.apply(records, is_leading=True)
    assert [one.how for one in applied.dropped] == ["superseded"] * 29 + ["cancelled"]
    assert (applied.waiting, applied.next_due) == (1, 5_000)
    await index.close()


def allow_texts(index: PartitionIndex, size: int) -> None:
    """Let SQLite refuse texts and messages that are longer, as it refuses them when there is no memory."""
    index._index._sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, size)


async def test_no_schedule_is_missing_after_an_error_while_new_ones_are_committed(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    await index.apply([schedule(0)], is_leading=False)
    allow_texts(index, 1_000)
    keys = islice((key for key in map(str, count()) if partition_of(key) == PARTITION), 20)
    many = [schedule(number, key=key, size=10 if number < 15 else 2_000) for number, key in enumerate(keys, 1)]
    with pytest.raises(ScheduleIndexError):
        await index.apply(many, is_leading=False)
    await index.close()
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    applied = await index.apply([], is_leading=False)
    assert (applied.position.offset, applied.waiting) == (0, 1)
    await index.close()


async def test_an_index_is_closed_even_if_its_changes_cannot_be_kept(tmp_path: Path) -> None:
    """The gate reads them in the log again."""
    path = tmp_path / "index.db"
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    for number in range(2):
        await index.apply([schedule(number)], is_leading=False)
    allow_texts(index, 20)
    await index.close()
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    assert index.position.offset == 0
    await index.close()


async def test_batches_are_committed_every_five_seconds_in_the_thread(tmp_path: Path, clock: Clock) -> None:
    """A commit writes many pages and may wait for the disk: messages would be late, also those of other partitions."""
    thread, found = WatchedThread(), list[tuple[int, int]]()
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine", executor=thread)
    await index.open()
    for number, (seconds, is_leading) in enumerate(
        ((0.0, False), (0.1, True), (4.9, True), (5.0, True), (5.1, True), (10.0, False))
    ):
        clock.now = TURN + seconds
        before = thread.calls
        await index.apply([schedule(number)], is_leading=is_leading)
        found.append((thread.calls - before, committed(tmp_path / "index.db")))
        wait_for_checkpoint()
    assert found == [(1, 0), (0, 0), (0, 0), (1, 3), (0, 3), (1, 5)]
    await index.close()


async def test_no_batch_is_committed_while_a_checkpoint_waits_for_the_disk(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit would wait as well, for a tenth of a second and more on a busy disk."""
    path, synced = tmp_path / "index.db", threading.Event()
    connect = gate_index._connect

    def connect_late(path: Path) -> sqlite3.Connection:
        if threading.current_thread().name == CHECKPOINT_THREAD:
            synced.wait()
        return connect(path)

    monkeypatch.setattr(gate_index, "_connect", connect_late)
    index = PartitionIndex(path, PARTITION, NAMES, "mine")
    await index.open()
    await index.apply([schedule(0)], is_leading=True)
    clock.now = 60.0
    await index.apply([schedule(1)], is_leading=True)
    assert committed(path) == 0
    synced.set()
    wait_for_checkpoint()
    await index.apply([schedule(2)], is_leading=True)
    assert committed(path) == 2
    await index.close()


async def test_the_due_times_of_a_snapshot_are_read_in_the_thread(tmp_path: Path) -> None:
    """The first batch after it may be applied in the event loop."""
    queries = list[str]()
    index = PartitionIndex(tmp_path / "index.db", PARTITION, NAMES, "mine")
    await index.open()
    await index.clear()
    (chunk,) = snapshot.cut("c", position := LogPosition(offset=7, count=8), [waiting(KEY)])
    await index.put_chunk(encode(chunk), position)
    index._index._sql.set_trace_callback(queries.append)
    applied = await index.apply([schedule(8)], is_leading=False)
    assert applied.waiting == 1
    assert not [one for one in queries if one.startswith("SELECT target, due FROM waiting INDEXED")]
    await index.close()
