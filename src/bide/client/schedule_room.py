"""Room in the schedule log for records that no gate has carried forward yet."""

from __future__ import annotations

import asyncio

from bide.amqp.channel import Channel
from bide.errors import BideError, PublishRefusedError, ScheduleLogError
from bide.schedules.names import RECORD_OVERHEAD, RESERVATION_BYTES, ScheduleNames


class ScheduleRoom:
    """The room that a client has reserved in one partition.

    The broker counts: each reservation in the room queue stands for 64 KB of records, and the queue refuses
    reservations beyond a quarter of the retention. A gate purges the queue when it has carried the state forward.
    """

    def __init__(self, names: ScheduleNames, partition: int) -> None:
        self._names = names
        self._partition = partition
        self._left = 0
        self._lock = asyncio.Lock()

    def take_now(self, size: int) -> bool:
        """Take room for a record if enough is left and no other record waits for it; returns whether it was taken."""
        size += RECORD_OVERHEAD
        if self._lock.locked() or self._left < size:
            return False
        self._left -= size
        return True

    async def take(self, channel: Channel, size: int) -> None:
        """Take room for a record. If not enough is left, publish reservations and wait for their confirms.

        Args:
            channel: a channel with confirms.
            size: the size of the record in bytes.

        Raises:
            ScheduleLogError: the room queue is full.
            UnroutableError: the room queue is missing.
            BideError: the channel was closed, or the connection lost.
        """
        size += RECORD_OVERHEAD
        async with self._lock:
            reservations = -(-(size - self._left) // RESERVATION_BYTES)
            if reservations > 0:
                await self._fetch(channel, reservations)
            self._left -= size

    async def _fetch(self, channel: Channel, reservations: int) -> None:
        confirms = [
            channel.publish(
                exchange=self._names.operations,
                routing_key=f"room.{self._partition}",
                values={"delivery_mode": 2},
                body=b"",
            )
            for _ in range(reservations)
        ]
        results = await asyncio.gather(*confirms, return_exceptions=True)
        self._left += RESERVATION_BYTES * results.count(None)
        for one in results:
            if isinstance(one, PublishRefusedError):
                raise ScheduleLogError(
                    f"the schedule log has no room for {reservations * RESERVATION_BYTES:,} more bytes: the queue "
                    f"{self._names.room(self._partition)!r} is full, because no gate has carried the state of this "
                    "partition forward for a long time; start a gate, and schedule again"
                ) from one
            if isinstance(one, BideError):
                raise one
