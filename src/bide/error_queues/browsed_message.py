"""A message that is being looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bide.amqp.delivery import Delivery
from bide.recoverability.failed import FailedMessage


@dataclass(frozen=True, slots=True)
class BrowsedMessage:
    """A message of the queue, as long as we look: it goes back at the end, unless it is acknowledged.

    Attributes:
        tag: the broker's name for this delivery.
        deliveries: how often it was given back before, where the queue counts that.
    """

    message: FailedMessage
    tag: int
    deliveries: int

    @classmethod
    def of(cls, delivery: Delivery) -> Self:
        """The message that was delivered."""
        message = FailedMessage.read(delivery.exchange, delivery.routing_key, delivery.values, delivery.body)
        return cls(message, delivery.delivery_tag, deliveries_of(delivery))


def deliveries_of(delivery: Delivery) -> int:
    """How often a message was given back before; 0 where the queue does not count."""
    count = (delivery.values.get("headers") or {}).get("x-delivery-count", 0)
    return count if isinstance(count, int) else 0
