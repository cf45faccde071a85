"""Room in the schedule log for records that no gate has carried forward yet."""

from __future__ import annotations

import asyncio

from bide.amqp.channel import Channel
from bide.errors import BideError, PublishRefusedError, ScheduleLogError
from bide.schedules.names import RECORD_OVERHEAD, TICKET_BYTES, ScheduleNames


class ScheduleRoom:
    """The room that a client has taken in one partition.

    The broker counts: each ticket in the room queue stands for 64 KB of records, and the queue refuses tickets when a
    quarter of the retention would be used. A gate purges the queue when it has carried the state forward.
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
        """Take room for a record, which publishes tickets and waits for their confirms if there is not enough left.

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
            tickets = -(-(size - self._left) // TICKET_BYTES)
            if tickets > 0:
                await self._fetch(channel, tickets)
            self._left -= size

    async def _fetch(self, channel: Channel, tickets: int) -> None:
        confirms = [
            channel.publish(
                exchange=self._names.operations,
                routing_key=f"room.{self._partition}",
                values={"delivery_mode": 2},
                body=b"",
            )
            for _ in range(tickets)
        ]
        results = await asyncio.gather(*confirms, return_exceptions=True)
        self._left += TICKET_BYTES * results.count(None)
        for one in results:
            if isinstance(one, PublishRefusedError):
                raise ScheduleLogError(
                    f"the schedule log has no room for {tickets * TICKET_BYTES:,} more bytes: the queue "
                    f"{self._names.room(self._partition)!r} is full, because no gate has carried the state of this "
                    "partition forward for long; start a gate, and schedule again"
                ) from one
            if isinstance(one, BideError):
                raise one
