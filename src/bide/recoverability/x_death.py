"""Dead-lettering of a message, as recorded in the broker's ``x-death`` header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

_DIGITS: Final = re.compile(r"[0-9]{1,13}")
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDeaths:
    """How often and why a message was dead-lettered from one queue.

    Attributes:
        reason: ``rejected``, ``expired``, ``maxlen`` or ``delivery_limit``, the latest time.
        count: how often it was dead-lettered from the queue.
        exchange: the exchange that it was first published to.
        routing_key: the routing key that it was first published with, or None if unknown.
        expiration: the sender's ``expiration``, which the broker removes when it dead-letters, or None.
    """

    reason: str
    count: int
    exchange: str
    routing_key: str | None
    expiration: timedelta | None = None

    @classmethod
    def read(cls, headers: Mapping[str, Any], queue: str) -> Self | None:
        """Read the ``x-death`` entries of a queue; None without any. Publishers can forge them below RabbitMQ 4.0.1.

        The header has an entry for each pair of queue and reason. An entry keeps the exchange, the routing keys and the
        time of the first dead-lettering, but the entries are ordered by their latest dead-lettering. So for a message
        that was dead-lettered repeatedly, the oldest entry need not be the last. RabbitMQ 3.10 only puts the latest
        entry first, and changes the order of the others.
        """
        deaths = headers.get("x-death")
        found = [
            one
            for one in (deaths if isinstance(deaths, list) else ())
            if isinstance(one, Mapping) and one.get("queue") == queue
        ]
        if not found:
            return None
        # Entries have times in whole seconds; the x-first-death headers say exactly which one was first, if present.
        reason = headers.get("x-first-death-reason") if headers.get("x-first-death-queue") == queue else None
        first = next((one for one in found if one.get("reason") == reason), None) or min(found, key=_time)
        keys, exchange = first.get("routing-keys"), first.get("exchange")
        return cls(
            reason=str(found[0].get("reason")),
            count=sum(_count(one.get("count")) for one in found),
            exchange=exchange if isinstance(exchange, str) else "",
            routing_key=keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else None,
            expiration=_duration(first.get("original-expiration")),
        )


def _time(death: Mapping[str, Any]) -> datetime:
    time = death.get("time")
    return time if isinstance(time, datetime) and time.tzinfo is not None else _NEVER


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _duration(value: object) -> timedelta | None:
    return timedelta(milliseconds=int(value)) if isinstance(value, str) and _DIGITS.fullmatch(value) else None
