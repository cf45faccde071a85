"""Refusal of delay queues by operations on the messages of a queue."""

from __future__ import annotations

from bide.amqp.delivery import Delivery
from bide.client.client import Client
from bide.delay import recognition
from bide.delay.protocol import check_name
from bide.error_queues.delivery_count import DeliveryCountReset


async def refuse_delay_queue(
    client: Client, queue: str, management_url: str | None, *, sends: bool = False
) -> DeliveryCountReset:
    """Refuse a queue of a delay infrastructure. Returns the arguments and the delivery limit of any other queue.

    Args:
        client: an open client.
        queue: the queue's name.
        management_url: URL of the management API, for reading the queue's arguments; see :class:`bide.Endpoint`.
        sends: whether the operation sends messages to the queues that they failed on.

    Raises:
        DelayQueueError: the queue has the name or the arguments of a delay queue; see also :func:`refuse_waiting`.
        BrokerError: the broker cannot be reached.
    """
    found = await DeliveryCountReset.of(client, queue, management_url)
    recognition.refuse(queue, found.arguments, sends=sends)
    return found


async def refuse_delay_target(client: Client, queue: str, management_url: str | None) -> None:
    """Refuse a queue that an operation cannot send messages to.

    Args:
        client: an open client.
        queue: the queue's name.
        management_url: URL of the management API, for reading the queue's arguments; see :class:`bide.Endpoint`.

    Raises:
        InvalidNameError: *queue* cannot be the name of a queue.
        DelayQueueError: the queue belongs to a delay infrastructure.
        BrokerError: the broker cannot be reached.
    """
    check_name("queue", queue)
    found = await DeliveryCountReset.of(client, queue, management_url)
    recognition.refuse_target(queue, found.arguments)


def refuse_waiting(delivery: Delivery, count_reset: DeliveryCountReset) -> None:
    """Refuse a queue if one of its messages shows that it is a delay queue.

    From then on *count_reset* replaces no message of the queue, because a copy would start to wait again. Undeliverable
    queues are accepted: their messages do not wait, even if they still have the keys of delay queues.

    Args:
        delivery: a message of the queue.
        count_reset: the result of :func:`refuse_delay_queue` for the queue.

    Raises:
        DelayQueueError: the message waits for its due time.
    """
    if recognition.part_of(count_reset.queue) == "undeliverable":
        return
    headers = delivery.values.get("headers") or {}
    if recognition.is_waiting(delivery.exchange, delivery.routing_key, headers):
        count_reset.stop()
        raise recognition.refusal(count_reset.queue, "waiting")
