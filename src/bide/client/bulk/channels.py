"""The channels of a bulk publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from bide.amqp.channel import Channel
from bide.amqp.confirms import Unconfirmed
from bide.amqp.connection import Connection
from bide.schedules.names import PARTITIONS


class BulkChannels:
    """A channel for messages, and one for the records of each partition of the schedule log, if there are schedules.

    Why records need channels of their own is explained at :class:`bide.client.schedule_channel.ScheduleChannel`.

    Attributes:
        has_schedules: whether there are schedules.
    """

    def __init__(self) -> None:
        self.has_schedules = False
        self._channels: dict[int | None, Channel] = {}

    def __getitem__(self, partition: int | None) -> Channel:
        """The latest channel of a partition, or of messages (None)."""
        return self._channels[partition]

    def is_open(self, partition: int | None) -> bool:
        """Whether there is an open channel of a partition, or of messages."""
        return partition in self._channels and self._channels[partition].is_open

    def closed(self) -> list[int | None]:
        """The partitions, and None for messages, whose channels are needed and not open."""
        needed = (None, *range(PARTITIONS)) if self.has_schedules else (None,)
        return [one for one in needed if not self.is_open(one)]

    async def open(self, connection: Connection, which: Iterable[int | None]) -> None:
        """Open channels instead of those that were closed."""
        for one in which:
            self._channels[one] = await connection.channel(confirms=True)

    def waiting(self) -> Iterator[Unconfirmed]:
        """The unconfirmed messages on all channels."""
        return chain.from_iterable(one.confirms.waiting for one in self._channels.values())

    def abandon(self) -> None:
        """Close all channels without waiting."""
        for one in self._channels.values():
            one.abandon()
