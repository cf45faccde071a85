"""The index of a gate, built anew from the snapshots in the log."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Final, Literal

from bide.amqp.connection import Connection
from bide.durations import to_milliseconds
from bide.errors import ScheduleIndexError, ScheduleLogError, ScheduleRecordError
from bide.gate.log_reader import LogReader, LogRecord
from bide.gate.partition_index import PartitionIndex
from bide.gate.snapshot_finder import FoundSnapshot, SnapshotFinder
from bide.runtime.logs import logger
from bide.schedules.encoding import decode, encode
from bide.schedules.names import ScheduleNames
from bide.schedules.records import Beat
from bide.schedules.state import LogPosition

log = logger(__name__)

_RECORD_WAIT: Final = 5.0
"""Seconds to wait for the last record of the index. The log may be a new one, in which there is no such record."""

_FENCE_AGAIN_AFTER: Final = 5.0
"""Seconds after which the end is marked again: retention may have removed the mark before this gate has read it."""

_Start = int | Literal["first"]


class LogOpener:
    """Opens the log of a partition after the last record of the index. Builds the index anew if that is not possible.

    Args:
        gate: the name of this gate.
    """

    def __init__(
        self, connection: Connection, partition: int, names: ScheduleNames, index: PartitionIndex, gate: str
    ) -> None:
        self._connection = connection
        self._partition = partition
        self._names = names
        self._index = index
        self._gate = gate

    async def open(self) -> tuple[LogReader, list[LogRecord]]:
        """A reader, and the records that it has already read.

        Raises:
            ScheduleLogError: the log begins too late, and has no complete snapshot.
            ScheduleIndexError: retention removes the log faster than this gate reads it.
            BrokerError: the log cannot be read.
        """
        await self._index.begin()
        if self._index.position.offset >= 0:
            found = await self._behind(self._index.position)
            if found is not None:
                return found
            log.warning("the index of %s is built anew: its last record is not in the log", self._log)
        await self._rebuild()
        await self._index.begin()
        position = self._index.position
        reader = await LogReader.open(self._connection, self._log, position.offset)
        try:
            # There is a record: at least the beat that was appended to find the end.
            records = await reader.batch()
            if records[0].offset != max(position.offset, 0):
                raise self._overtaken()
        except BaseException:
            reader.close()
            raise
        return reader, records if position.offset < 0 else records[1:]

    @property
    def _log(self) -> str:
        return self._names.log(self._partition)

    async def _behind(self, position: LogPosition) -> tuple[LogReader, list[LogRecord]] | None:
        reader = await LogReader.open(self._connection, self._log, position.offset)
        try:
            async with asyncio.timeout(_RECORD_WAIT):
                records = await reader.batch()
        except TimeoutError:
            reader.close()
            return None
        except BaseException:
            reader.close()
            raise
        if records[0].offset != position.offset or zlib.crc32(records[0].body) != position.checksum:
            reader.close()
            return None
        return reader, records[1:]

    async def _rebuild(self) -> None:
        await self._index.clear()
        end, hint = await self._end()
        cycle = None if hint is None else (await self._search(hint, end))[0]
        # From the first record on, the state follows from all records, and a search would read them twice.
        if cycle is None and await self._first() > 0:
            cycle, first = await self._search("first", end)
            if cycle is None:
                if first > end or await self._first() != first:
                    raise self._overtaken()
                raise ScheduleLogError(
                    f"the schedule log {self._log} begins at offset {first} and has no complete snapshot: records are "
                    "lost. Delete the stream to begin with an empty one; the schedules in it are lost, too"
                )
        if cycle is not None:
            await self._take(cycle)

    async def _end(self) -> tuple[int, int | None]:
        """Append a beat and find it. Returns its offset, and the offset of a snapshot if other beats name one."""
        reader = await LogReader.open(self._connection, self._log, "last")
        # The other gates ignore this beat, because it says that its gate has read nothing.
        fence = encode(Beat(gate=self._gate, clock=to_milliseconds(self._connection.now()), after=-1, count=0))
        hint = None
        try:
            await self._append(fence)
            appended_at = self._connection.monotonic()
            while True:
                for one in await reader.batch():
                    if one.exchange != self._names.gates:
                        continue
                    if one.body == fence:
                        return one.offset, hint
                    if isinstance(beat := _decode(one), Beat) and beat.snapshot is not None:
                        hint = beat.snapshot
                if self._connection.monotonic() - appended_at > _FENCE_AGAIN_AFTER:
                    await self._append(fence)
                    appended_at = self._connection.monotonic()
        finally:
            reader.close()

    async def _append(self, body: bytes) -> None:
        async with await self._connection.channel(confirms=True) as channel:
            await channel.publish(
                exchange=self._names.gates,
                routing_key=str(self._partition),
                values={"delivery_mode": 2},
                body=body,
            )

    async def _first(self) -> int:
        """The first offset in the log."""
        reader = await LogReader.open(self._connection, self._log, "first")
        try:
            return (await reader.batch())[0].offset
        finally:
            reader.close()

    def _overtaken(self) -> ScheduleIndexError:
        return ScheduleIndexError(f"retention removed the beginning of {self._log} while it was read")

    async def _read(self, start: _Start, end: int) -> AsyncIterator[LogRecord]:
        reader = await LogReader.open(self._connection, self._log, start)
        try:
            while True:
                for one in await reader.batch():
                    yield one
                    if one.offset >= end:
                        return
        finally:
            reader.close()

    async def _search(self, start: _Start, end: int) -> tuple[FoundSnapshot | None, int]:
        """The latest complete snapshot from an offset on, and the first offset there."""
        finder, first = SnapshotFinder(), -1
        found: FoundSnapshot | None = None
        async for one in self._read(start, end):
            first = one.offset if first < 0 else first
            cycle = finder.add(one.offset, one.body) if one.exchange == self._names.gates else None
            if cycle is not None and (found is None or found.position.offset < cycle.position.offset):
                found = cycle
        return found, first

    async def _take(self, cycle: FoundSnapshot) -> None:
        """Read the chunks of a snapshot into the index."""
        missing = set(cycle.numbers)
        assert cycle.position.snapshot is not None
        reader = await LogReader.open(self._connection, self._log, cycle.position.snapshot)
        try:
            while missing:
                for one in await reader.batch():
                    if missing and one.offset > cycle.end:
                        raise self._overtaken()
                    number = cycle.number_of(one.body) if one.exchange == self._names.gates else None
                    if number in missing:
                        missing.discard(number)
                        await self._index.put_chunk(one.body, None if missing else cycle.position)
        finally:
            reader.close()


def _decode(one: LogRecord) -> object:
    try:
        return decode(one.body)
    except ScheduleRecordError:
        return None
