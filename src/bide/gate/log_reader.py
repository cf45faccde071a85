"""Reading of a stream over AMQP 0-9-1 in batches, from an offset on."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.errors import BideError

PREFETCH: Final = 1000
"""The number of records that the broker sends ahead."""

_OFFSET: Final = "x-stream-offset"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A message of a stream.

    Attributes:
        exchange: the exchange that the message was published to. The broker keeps it with the message.
        reply_to: the address for the answer; None if the sender wants none.
    """

    offset: int
    exchange: str
    body: bytes = field(repr=False)
    reply_to: str | None = None


class LogReader:
    """A consumer of a stream. Open it with :meth:`open`.

    The broker sends more records only when a batch is taken, so a slow reader does not fill the memory.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._received = deque[Delivery]()
        self._ended: BideError | None = None
        self._has_changed = asyncio.Event()

    @classmethod
    async def open(cls, connection: Connection, stream: str, offset: int | Literal["first", "last"]) -> Self:
        """Start at an offset, or at the next record if retention has removed that one; or at the first or last chunk.

        Raises:
            BideError: the stream does not exist, or may not be read, or the connection is lost.
        """
        reader = cls(await connection.channel())
        start = max(offset, 0) if isinstance(offset, int) else offset
        try:
            await reader._channel.qos(PREFETCH)
            await reader._channel.consume(
                stream, on_message=reader._put, on_end=reader._end, arguments={_OFFSET: start}
            )
        except BaseException:
            reader.close()
            raise
        return reader

    async def batch(self) -> list[LogRecord]:
        """All records that have arrived, at least one. They are not delivered again by this reader.

        Raises:
            BideError: the stream was deleted, or the channel or the connection is lost.
        """
        while not self._received:
            if self._ended is not None:
                raise self._ended
            self._has_changed.clear()
            await self._has_changed.wait()
        found = list(self._received)
        self._received.clear()
        if self._channel.is_open:
            # Below 4.0 a stream takes no negative acknowledgement.
            self._channel.ack(found[-1].delivery_tag, multiple=True)
        return [
            LogRecord(one.values["headers"][_OFFSET], one.exchange, one.body, one.values.get("reply_to"))
            for one in found
        ]

    def close(self) -> None:
        """End the consumer."""
        self._channel.abandon()

    def _put(self, delivery: Delivery) -> None:
        self._received.append(delivery)
        self._has_changed.set()

    def _end(self, error: BideError) -> None:
        self._ended = error
        self._has_changed.set()
