"""What the index of a partition reports of the records that it applies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    exchange = NAMES.gates if isinstance(record, Done | Tick) else NAMES.operations
    return LogRecord(offset, exchange, encode(record))


def schedule(number: int, *, size: int = 10) -> LogRecord:
    return stored(
        number,
        AddSchedule(
            request=RequestId(session="5f2c", number=number + 1),
            key=KEY,
            target="q:mails",
            nominal=5_000,
            due=5_000,
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
