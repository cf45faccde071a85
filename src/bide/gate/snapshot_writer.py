"""Snapshots that a leader appends, so that retention may remove the records before them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Final

from bide.amqp.connection import Connection
from bide.gate.partition_index import PartitionIndex
from bide.gate.room import LogRoom
from bide.runtime.logs import logger
from bide.schedules.state import LogPosition
from bide.topology import Queue

log = logger(__name__)

_UNREAD_CHUNKS: Final = 4
"""The maximum number of chunks that were sent and not read back, so that the gate knows how full the log is."""

_LOOK_EVERY: Final = 10.0
"""Seconds between two looks at the room queue."""


class SnapshotWriter:
    """Carries the state of a partition forward in its log, and frees the room of applications.

    Args:
        gate: the name of this gate.
        queue: the room queue.
        append: appends a record to the log.
    """

    def __init__(
        self,
        connection: Connection,
        index: PartitionIndex,
        room: LogRoom,
        *,
        gate: str,
        queue: str,
        append: Callable[[bytes], None],
    ) -> None:
        self._connection = connection
        self._index = index
        self._room = room
        self._gate = gate
        self._queue = queue
        self._append = append
        self._cycle: str | None = None
        self._begun_at = LogPosition()
        self._is_cut = False
        self._unread = 0
        self._looked_at = -_LOOK_EVERY

    async def step(self, now: float) -> None:
        """Append the next chunks, or begin a snapshot if it is time."""
        if self._cycle is None:
            await self._look(now)
            if not self._room.needs_snapshot(self._index.position):
                return
            self._cycle, self._is_cut, self._unread = f"{self._gate}.{secrets.token_hex(4)}", False, 0
            self._room.state_size = await self._index.size()
            self._begun_at = await self._index.begin_snapshot(self._cycle)
            log.info("carrying the state as of offset %d forward", self._begun_at.offset)
        while not self._is_cut and self._unread < _UNREAD_CHUNKS:
            chunk = await self._index.next_chunk()
            if chunk is None:
                self._is_cut = True
            else:
                self._unread += 1
                self._append(chunk)

    async def read(self, chunks: Iterable[str], completed: Iterable[str], *, is_leading: Callable[[], bool]) -> None:
        """Take note of chunks that were read back, and free the room when this gate's cycle is complete.

        Args:
            is_leading: whether this gate still leads. A gate that was frozen does not know what was appended meanwhile.
        """
        self._unread -= sum(one == self._cycle for one in chunks)
        if self._cycle is None or self._cycle not in completed:
            return
        self._cycle = None
        appended = self._index.position.size - self._begun_at.size
        self._room.last_cycle = appended
        if not self._room.may_purge(appended):
            log.warning("%s is not purged: %d bytes were appended since the snapshot", self._queue, appended)
            return
        channel = await self._connection.channel()
        async with channel:
            if not is_leading():
                return
            await channel.purge_queue(self._queue)
        self._room.reservations = 0

    async def stop(self) -> None:
        """Give up a snapshot that is not complete: another gate leads."""
        if self._cycle is not None:
            self._cycle = None
            await self._index.end_snapshot()

    async def _look(self, now: float) -> None:
        """Count the reservations. Many clients that append little fill the room queue long before the log."""
        if now - self._looked_at < _LOOK_EVERY:
            return
        self._looked_at = now
        async with await self._connection.channel() as channel:
            reply = await channel.declare_queue(Queue(self._queue), passive=True)
        self._room.reservations = reply.message_count
        if self._room.is_too_large_to_free:
            self._room.state_shrank(await self._index.size())
