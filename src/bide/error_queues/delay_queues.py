"""Refusal of delay queues by operations on the messages of a queue."""

from __future__ import annotations

from bide.amqp.delivery import Delivery
from bide.client.client import Client
from bide.delay import recognition
from bide.error_queues.delivery_count import DeliveryCountReset


async def refuse_delay_queue(
    client: Client, queue: str, management_url: str | None, *, sends: bool = False
) -> DeliveryCountReset:
    """Refuse a queue of a delay infrastructure; returns the arguments and delivery limit of any other queue.

    Args:
        client: an open client.
        queue: the queue's name.
        management_url: URL of the management API, for reading the queue's arguments; see :class:`bide.Endpoint`.
        sends: whether the operation sends messages to the queues that they failed on.

    Raises:
        DelayQueueError: the name or the arguments are those of a delay queue; see also :func:`holds_waiting`.
        BrokerError: the broker cannot be reached.
    """
    found = await DeliveryCountReset.of(client, queue, management_url)
    recognition.refuse(queue, found.arguments, sends=sends)
    return found


def holds_waiting(delivery: Delivery) -> bool:
    """Whether a message comes from a delay queue, where it waited for its due time."""
    return recognition.is_waiting(delivery.exchange, delivery.routing_key, delivery.values.get("headers") or {})
