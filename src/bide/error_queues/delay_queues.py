"""Refusal of delay queues, for whatever takes messages out of a queue for an operator."""

from __future__ import annotations

from bide.amqp.delivery import Delivery
from bide.client.client import Client
from bide.delay import recognition
from bide.error_queues.delivery_count import DeliveryCountReset


async def refuse_delay_queue(
    client: Client, queue: str, management_url: str | None, *, sends: bool = False
) -> DeliveryCountReset:
    """See that a queue does not belong to a delay infrastructure, and return what a look at it needs to know.

    Args:
        client: connected to the broker.
        queue: the queue's name.
        management_url: of the management API, which has the queue's arguments; see :class:`bide.Endpoint`.
        sends: whether its messages are to be sent where they failed.

    Raises:
        DelayQueueError: it does. See :func:`holds_waiting` for a queue that neither name nor arguments give away.
        BrokerError: the broker cannot be reached.
    """
    found = await DeliveryCountReset.of(client, queue, management_url)
    recognition.refuse(queue, found.arguments, sends=sends)
    return found


def holds_waiting(delivery: Delivery) -> bool:
    """Whether the queue that a message was delivered from is a delay queue, where the message waits to be due."""
    return recognition.is_waiting(delivery.exchange, delivery.routing_key, delivery.values.get("headers") or {})
