"""What the index of a partition reports of the records that it applies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import pytest

from bide.gate import partition_index
from bide.gate.log_reader import LogRecord
from bide.gate.partition_index import PartitionIndex
from bide.schedules.encoding import encode
from bide.schedules.message import ScheduledMessage
from bide.schedules.names import ScheduleNames, partition_of
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

NAMES = ScheduleNames()
KEY = "invoice:42"
PARTITION = partition_of(KEY)

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def stored(offset: int, record: ScheduleRecord) -> LogRecord:
    exchange = NAMES.gates if isinstance(record, Claim | Done | Tick) else NAMES.operations
    return LogRecord(offset, exchange, encode(record))


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


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a batch would end after 50 ms on a busy machine."""
    monkeypatch.setattr(partition_index, "time", SimpleNamespace(monotonic=lambda: 0.0))


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
    tmp_path: Path, records: Sequence[LogRecord], is_in_thread: bool
) -> None:
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
