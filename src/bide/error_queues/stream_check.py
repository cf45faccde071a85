"""Recognition of streams, from which no message can be removed."""

from __future__ import annotations

from bide.amqp import reply_codes
from bide.amqp.connection import Connection
from bide.errors import BrokerError


async def is_stream(connection: Connection, queue: str) -> bool:
    """Whether a queue is a stream.

    A stream reports any number of messages, and a consumer without an offset receives only new ones. But a stream
    refuses ``basic.get``, and RabbitMQ's reply says that the queue is a stream.

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
            # A message arrived just now: requeue it.
            channel.nack(delivery.delivery_tag)
        return False


def stream_error(queue: str, *, hint: str = "") -> BrokerError:
    """The error for a stream where another type of queue is needed.

    Args:
        hint: what to do instead.
    """
    return BrokerError(
        f"{queue!r} is a stream: nothing can be taken out of it{hint and f', and {hint}'}",
        reply_code=reply_codes.NOT_IMPLEMENTED,
    )
