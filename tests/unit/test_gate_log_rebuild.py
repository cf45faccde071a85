"""A gate that builds its index anew while retention removes the beginning of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import bide.testing
from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.errors import ScheduleIndexError, ScheduleLogError
from bide.gate import log_reader, log_rebuild
from bide.gate.log_reader import LogReader, LogRecord
from bide.gate.log_rebuild import LogOpener
from bide.gate.partition_index import PartitionIndex
from bide.gate.snapshot_finder import FoundSnapshot
from bide.schedules import snapshot
from bide.schedules.encoding import encode
from bide.schedules.entries import ScheduleSession
from bide.schedules.names import ScheduleNames
from bide.schedules.state import LogPosition
from bide.topology import Queue
from tests.timeouts import TIMEOUT

NAMES = ScheduleNames()
LOG = NAMES.log(0)
RETENTION, SEGMENT, BODY = 20_000, 2_000, 1_000


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    connection = await Connection.open(bide.testing.broker().url)
    yield connection
    await connection.close()


@pytest.fixture
async def channel(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Channel:
    """A channel to a broker with a small log, which sends two records ahead."""
    monkeypatch.setattr(log_reader, "PREFETCH", 2)
    channel = await connection.channel(confirms=True)
    topology = NAMES.topology(partitions=1)
    for exchange in topology.exchanges:
        await channel.declare_exchange(exchange)
    sizes = {"x-max-length-bytes": RETENTION, "x-stream-max-segment-size-bytes": SEGMENT}
    for queue in topology.queues:
        arguments = {**queue.arguments, **(sizes if queue.name == LOG else {})}
        await channel.declare_queue(Queue(queue.name, arguments=arguments))
    for binding in topology.bindings:
        await channel.bind(binding)
    return channel


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[PartitionIndex]:
    index = PartitionIndex(tmp_path / "0.db", 0, NAMES, "gate", executor=None)
    await index.open()
    yield index
    await index.close()


async def append(channel: Channel, *bodies: bytes) -> None:
    for body in bodies:
        await channel.publish(exchange=NAMES.gates, routing_key="0", values={}, body=body)


async def append_retention(channel: Channel) -> None:
    """Append so much that everything before is removed."""
    await append(channel, *[bytes(BODY)] * (2 * RETENTION // BODY))


async def last_offset(connection: Connection) -> int:
    reader = await LogReader.open(connection, LOG, "last")
    try:
        return (await reader.batch())[-1].offset
    finally:
        reader.close()


def chunks(cycle: str, position: LogPosition) -> list[bytes]:
    """A snapshot of two chunks."""
    entries = [ScheduleSession(session=name) for name in ("a", "b")]
    return [encode(one) for one in snapshot.cut(cycle, position, entries, most=1)]


class OvertakenOpener(LogOpener):
    """Retention removes what this one looks for, just after a step."""

    def __init__(self, channel: Channel, connection: Connection, index: PartitionIndex, step: str) -> None:
        super().__init__(connection, 0, NAMES, index, "gate")
        self.channel = channel
        self.step = step

    async def _overtake(self, step: str) -> None:
        if step == self.step:
            self.step = "none"
            await append_retention(self.channel)

    async def _end(self) -> tuple[int, int | None]:
        found = await super()._end()
        await self._overtake("end")
        return found

    async def _read(self, start: log_rebuild._Start, end: int) -> AsyncIterator[LogRecord]:
        async for one in super()._read(start, end):
            yield one
            await self._overtake("first record")

    async def _search(self, start: log_rebuild._Start, end: int) -> tuple[FoundSnapshot | None, int]:
        found = await super()._search(start, end)
        await self._overtake("search")
        return found


@pytest.mark.parametrize("step", ["none", "end", "first record", "search"])
async def test_a_log_that_is_removed_while_it_is_read_is_read_again(
    connection: Connection, channel: Channel, index: PartitionIndex, step: str
) -> None:
    await append_retention(channel)
    await append(channel, *chunks("c", LogPosition(offset=await last_offset(connection), count=40)))
    opener = OvertakenOpener(channel, connection, index, step)
    async with asyncio.timeout(TIMEOUT):
        if step == "none":
            await opener.open()
            assert index.position.snapshot is not None
            return
        with pytest.raises(ScheduleIndexError, match="while it was read"):
            await opener.open()
        # A gate would append a snapshot of its own now. This one only shows that the error is not a lasting one.
        await append(channel, *chunks("d", LogPosition(offset=await last_offset(connection), count=80)))
        await opener.open()


async def test_a_mark_of_the_end_that_is_removed_before_it_is_read_is_appended_again(
    connection: Connection, channel: Channel, index: PartitionIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "PREFETCH", 1)
    monkeypatch.setattr(log_rebuild, "_FENCE_AGAIN_AFTER", -1.0)
    await append_retention(channel)
    batch = LogReader.batch

    async def overtaken(self: LogReader) -> list[LogRecord]:
        monkeypatch.setattr(LogReader, "batch", batch)
        await append_retention(channel)
        await append(channel, *chunks("c", LogPosition(offset=await last_offset(connection), count=80)))
        return await batch(self)

    monkeypatch.setattr(LogReader, "batch", overtaken)
    async with asyncio.timeout(TIMEOUT):
        await LogOpener(connection, 0, NAMES, index, "gate").open()
    assert index.position.snapshot is not None


async def test_a_complete_log_is_not_searched_for_a_snapshot(
    connection: Connection, channel: Channel, index: PartitionIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state follows from all of its records. A search would read each of them twice."""
    await append(channel, *[bytes(BODY)] * 5)

    async def search(self: LogOpener, start: object, end: int) -> None:
        pytest.fail(f"the log is searched from {start} to {end}")

    monkeypatch.setattr(LogOpener, "_search", search)
    async with asyncio.timeout(TIMEOUT):
        _, records = await LogOpener(connection, 0, NAMES, index, "gate").open()
    assert records[0].offset == 0


async def test_a_log_that_begins_late_and_has_no_snapshot_is_an_error(
    connection: Connection, channel: Channel, index: PartitionIndex
) -> None:
    await append_retention(channel)
    with pytest.raises(ScheduleLogError, match="records are lost"):
        await LogOpener(connection, 0, NAMES, index, "gate").open()
