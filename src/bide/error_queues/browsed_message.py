"""A failed message that is browsed in its queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bide.amqp.delivery import Delivery
from bide.recoverability.failed import FailedMessage


@dataclass(frozen=True, slots=True)
class BrowsedMessage:
    """A failed message while its queue is browsed. It is requeued at the end unless it was acknowledged.

    Attributes:
        message: the failed message.
        delivery: the message as the broker sent it.
        deliveries: how often it was requeued before; 0 if the queue does not count deliveries.
    """

    message: FailedMessage
    delivery: Delivery
    deliveries: int

    @classmethod
    def of(cls, delivery: Delivery) -> Self:
        """Read the message of a delivery."""
        message = FailedMessage.read(delivery.exchange, delivery.routing_key, delivery.values, delivery.body)
        return cls(message, delivery, deliveries_of(delivery))

    @property
    def tag(self) -> int:
        """The delivery tag."""
        return self.delivery.delivery_tag


def deliveries_of(delivery: Delivery) -> int:
    """How often a message was requeued before; 0 if the queue does not count deliveries."""
    count = (delivery.values.get("headers") or {}).get("x-delivery-count", 0)
    return count if isinstance(count, int) else 0
