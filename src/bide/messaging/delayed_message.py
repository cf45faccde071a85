"""A publisher for the ``x-delay`` header of the delayed-message plugin, without the plugin.

It is for programs that were written for rabbitmq_delayed_message_exchange and have to run without it. A plain direct,
topic, fanout or headers exchange then replaces their exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from bide.client.client import Client
from bide.client.publisher import Receipt
from bide.errors import InvalidDelayError, InvalidInputError

DELAY_HEADER: Final = "x-delay"
"""Header with the delay in milliseconds. As with the plugin, receivers see it with a negative sign."""


class DelayedMessagePublisher:
    """Publishes messages with an ``x-delay`` header through the client's delay infrastructure.

    Like the plugin, it accepts integers, text and floats, delivers at once for a delay of zero or less (as on a message
    that was delayed before), reverses the sign of the header for receivers, and routes by the bindings that exist when
    the message is due.

    Unlike the plugin, it keeps waiting messages in replicated queues, so they survive the loss of a node. It supports
    ``mandatory``. Messages without a matching binding when they are due go to the undeliverable queue. It delays
    messages by more than 49 days and refuses unreadable headers; the plugin sends both at once.

    Args:
        client: a client with ``Clock``, which delays in steps of 10 ms and supports every exchange type.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def publish(
        self,
        body: bytes | str | None = None,
        *,
        exchange: str,
        routing_key: str = "",
        headers: Mapping[str, Any] | None = None,
        **properties: Any,
    ) -> Receipt:
        """Publish a message, delayed if it has an ``x-delay`` header, and wait for the broker's confirm.

        Args:
            body: as for :meth:`bide.Client.publish`.
            exchange: the exchange; empty for the default exchange, with the queue as routing key.
            routing_key: the routing key.
            headers: headers, with the delay in ``x-delay``: milliseconds as an integer, a float or text.
            properties: other arguments of :meth:`bide.Client.publish`, except ``to``, ``delay`` and ``deliver_at``.

        Raises:
            InvalidDelayError: the header is not a number, or longer than the infrastructure can hold.
            BideError: as :meth:`bide.Client.publish`.
        """
        for name in ("delay", "deliver_at", "to"):
            if name in properties:
                raise InvalidInputError(
                    f"{name}= cannot be used here, because the delay is in the header {DELAY_HEADER!r} and the target "
                    "is an exchange: use Client.publish"
                )
        wait = delay_of(headers)
        kept = dict(headers or {})
        if wait is not None:
            kept[DELAY_HEADER] = -math.ceil(wait / timedelta(milliseconds=1))
        target: dict[str, Any] = {"exchange": exchange, "routing_key": routing_key} if exchange else {"to": routing_key}
        return await self._client.publish(body, **target, headers=kept, delay=wait, **properties)


def delay_of(headers: Mapping[str, Any] | None) -> timedelta | None:
    """Read the delay of an ``x-delay`` header, rounded up to the microsecond; None for no delay.

    Raises:
        InvalidDelayError: the header is not a number.
        InvalidInputError: the headers are not a mapping.
    """
    if not isinstance(headers, Mapping | None):
        raise InvalidInputError(f"the headers are of type {type(headers).__name__}: give a mapping")
    value = (headers or {}).get(DELAY_HEADER)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        number = _number(value)
        wait = timedelta(microseconds=math.ceil(number * 1000))
    except (TypeError, ValueError):
        raise InvalidDelayError(
            f"the header {DELAY_HEADER} is {value!r}, but must be a number of milliseconds: give 1500, '1500' or 1500.5"
        ) from None
    except OverflowError:
        raise InvalidDelayError(f"the header {DELAY_HEADER} is {value!r}, longer than any delay: give less") from None
    return wait if wait > timedelta(0) else None


def _number(value: float | str) -> float:
    if not isinstance(value, str):
        return value
    if not value.isascii() or "_" in value:
        # Python accepts other digits and underscores, which no other client would write.
        raise ValueError(value)
    try:
        return int(value)
    except ValueError:
        return float(value)
