"""Streams, which look like queues and cannot be emptied."""

from __future__ import annotations

from bide.amqp import reply_codes
from bide.amqp.connection import Connection
from bide.errors import BrokerError


async def is_stream(connection: Connection, queue: str) -> bool:
    """Whether a queue is a stream, which is full of messages and has none to give.

    A stream says that it is empty, or counts what it likes, and sends only what comes from now on. But it does not know
    ``basic.get``, and RabbitMQ's answer says why.

    Raises:
        BrokerError: the broker cannot be asked, or refuses for another reason.
    """
    async with await connection.channel() as channel:
        try:
            delivery = await channel.get(queue)
        except BrokerError as error:
            if "stream" in str(error):
                return True
            raise
        if delivery is not None:
            # It came this moment.
            channel.nack(delivery.delivery_tag)
        return False


def stream_error(queue: str, *, hint: str = "") -> BrokerError:
    """The error for a stream where a queue is wanted.

    Args:
        hint: what to do instead.
    """
    return BrokerError(
        f"{queue!r} is a stream: nothing can be taken out of it{hint and f', and {hint}'}",
        reply_code=reply_codes.NOT_IMPLEMENTED,
    )
