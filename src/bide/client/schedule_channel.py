"""The channel for operations on schedules, and for the answers of gates by direct reply-to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from bide.amqp.channel import Channel
from bide.amqp.connection import Connection
from bide.amqp.delivery import Delivery
from bide.errors import BideError
from bide.patterns.rpc import DIRECT_REPLY_TO


class ScheduleChannel:
    """A channel with confirms that consumes from direct reply-to. Open it with :meth:`open`.

    Records of a stream need a channel on which nothing else is published. When a stream gets another leader, RabbitMQ
    below 4.0.1 sends unconfirmed messages again with their numbers on the channel instead of their numbers in the
    stream. If these differ, the leader takes later messages for duplicates: it confirms them and does not store them
    (https://github.com/rabbitmq/rabbitmq-server/pull/12236). A returned message makes them differ too.

    Answers to requests that were sent on a channel come on that channel, and are lost with it.

    Attributes:
        ended: done when no more answers come.
    """

    def __init__(self, connection: Connection, channel: Channel) -> None:
        self.connection = connection
        self.channel = channel
        self.ended: asyncio.Future[None] = connection.loop.create_future()

    @classmethod
    async def open(cls, connection: Connection, on_answer: Callable[[Delivery], None]) -> Self:
        """Open a channel.

        Raises:
            BideError: the connection was lost.
        """
        self = cls(connection, await connection.channel(confirms=True))
        try:
            await self.channel.consume(DIRECT_REPLY_TO, on_message=on_answer, on_end=self._on_end, no_ack=True)
        except BaseException:
            self.channel.abandon()
            raise
        return self

    def _on_end(self, _: BideError) -> None:
        self.channel.abandon()
        if not self.ended.done():
            self.ended.set_result(None)
