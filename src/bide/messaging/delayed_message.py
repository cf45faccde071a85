"""A publisher for the ``x-delay`` header of the delayed-message plugin, without the plugin.

For programs that were written for the plugin rabbitmq_delayed_message_exchange and have to run where it does not. The
exchange that they publish to is one of the plain type then: direct, topic, fanout or headers.
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
"""Header with the delay in milliseconds. Receivers see it negative, as the plugin leaves it: the wait is over."""


class DelayedMessagePublisher:
    """Takes messages with an ``x-delay`` header and delays them by the client's delay infrastructure.

    What it does as the plugin does: integers, texts and floats count; a delay of zero or less, as on a message that was
    delayed before, means now; receivers get the header with the sign turned; the message fans out at its due time, by
    the bindings of that time.

    What it does better: the wait is replicated, and outlives a node; ``mandatory`` works at once, and what has no match
    at its due time goes to the undeliverable queue; more than 49 days are delayed, where the plugin sends them at once;
    a header that cannot be read is an error, where the plugin sends at once.

    Args:
        client: with ``Clock``, which delays by steps of 10 ms and reaches every type of exchange.
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
        """Send a message, delayed if it has an ``x-delay`` header, and wait until the broker has it.

        Args:
            exchange: the exchange; empty for the default exchange, with the queue as routing key.
            headers: with ``x-delay``: milliseconds, whole or not, as a number or as text.
            properties: more arguments of :meth:`bide.Client.publish`, but ``delay`` and ``deliver_at``.

        Raises:
            InvalidDelayError: the header is not a number, or more than the infrastructure can hold.
            BideError: as :meth:`bide.Client.publish`.
        """
        for name in ("delay", "deliver_at", "to"):
            if name in properties:
                raise InvalidInputError(
                    f"{name}= is given to a publisher that takes the delay from the header {DELAY_HEADER!r} and goes "
                    "to an exchange: use Client.publish for that"
                )
        wait = delay_of(headers)
        kept = dict(headers or {})
        if wait is not None:
            kept[DELAY_HEADER] = -math.ceil(wait / timedelta(milliseconds=1))
        target: dict[str, Any] = {"exchange": exchange, "routing_key": routing_key} if exchange else {"to": routing_key}
        return await self._client.publish(body, **target, headers=kept, delay=wait, **properties)


def delay_of(headers: Mapping[str, Any] | None) -> timedelta | None:
    """The delay that an ``x-delay`` header asks for, rounded up to the microsecond; None for now.

    Raises:
        InvalidDelayError: it is not a number.
        InvalidInputError: the headers are no mapping.
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
        # Python's own notation, which no other sender's library has.
        raise ValueError(value)
    try:
        return int(value)
    except ValueError:
        return float(value)
