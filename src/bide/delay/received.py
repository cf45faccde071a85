"""Received messages, restored to what was sent.

Delay infrastructures change a message: they add transport keys and headers, and some put the delay before the routing
key. This module undoes these changes for all infrastructures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from bide.delay.cascade_keys import HEADER_DELAY, original_key
from bide.delay.clock_keys import is_transport_key
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXCHANGE,
    HEADER_EXPIRATION,
    HEADER_KEY,
    HEADER_PICK_UP_KEY,
    HEADER_PRIORITY,
    HEADER_ROUTING_KEY,
    HEADER_SCHEDULE,
    HEADER_SENT,
    HEADER_TO,
)
from bide.durations import from_milliseconds

_FIRST_AND_LAST_DEATH: Final = tuple(
    (f"x-{which}-death-exchange", f"x-{which}-death-queue", f"x-{which}-death-reason") for which in ("first", "last")
)

DEATH_HEADERS: Final = frozenset({"x-death", *(name for names in _FIRST_AND_LAST_DEATH for name in names)})
"""The headers that RabbitMQ adds when it dead-letters a message."""

OWN_PREFIX: Final = "bide-"
"""The start of the names of bide's own headers."""

SERVICECONTROL_RETRY: Final = "ServiceControl.Retry.UniqueMessageId"
"""Header of a message that ServiceControl retried: the id of its failure."""

SERVICECONTROL_EDIT: Final = "ServiceControl.EditOf"
"""Header of a message that was edited and retried in ServicePulse: the id of the failure of the original."""

TRANSPORT_HEADERS: Final = frozenset(
    {
        HEADER_DELAY,
        "x-delivery-count",
        "x-acquired-count",
    }
)
"""Headers of other systems that describe the delivery, not the message."""

_CASCADE_QUEUE: Final = re.compile(
    r"nsb(?:\.v2)?\.delay-level-\d\d|(?:.+_)?celery_delayed_\d+"
    r"|bide\.release\.(?:nsb(?:\.v2)?|(?:.+_)?celery):.*",
    re.DOTALL,
)
_NSERVICEBUS_EXCHANGE: Final = re.compile(r"nsb(?:\.v2)?\.delay-(?:level-\d\d|delivery)")
_CLOCK_EXCHANGE: Final = re.compile(r"(.+\.v1\.)(?:(?:in\.)?[edhmsc]|released)", re.DOTALL)
_CLOCK_QUEUE: Final = re.compile(r"[edhmsc]\d{1,2}(?:/\d+)?|release\..*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A message as it was sent, and its due time.

    Attributes:
        exchange: the exchange that it was sent to; empty for a message sent to a queue.
        values: its properties by their AMQP names, without the headers of a delay infrastructure.
        due: its due time; :func:`restore` sets it only for a message that bide delayed.
        sent_at: when bide sent it; None for a message of another sender.
        schedule: the headers with key and id of its schedule; empty for a message that was not scheduled.
    """

    exchange: str
    routing_key: str
    values: Mapping[str, Any]
    due: datetime | None
    sent_at: datetime | None = None
    schedule: Mapping[str, str] = field(default_factory=dict)


def restore(exchange: str, routing_key: str, values: Mapping[str, Any]) -> SentMessage:
    """Undo the changes that a delay infrastructure made to a message."""
    headers = values.get("headers")
    if not headers:
        # A message from NServiceBus or Celery always has headers.
        return SentMessage(exchange=exchange, routing_key=routing_key, values=values, due=None)
    restored = dict(values)
    if (expiration := sent_expiration(values)) is not None:
        restored["expiration"] = expiration
    if isinstance(priority := headers.get(HEADER_PRIORITY), int):
        restored["priority"] = priority
    target = headers.get(HEADER_TO)
    if isinstance(target, str) and target[:2] in ("q:", "x:"):
        exchange = target[2:] if target[0] == "x" else ""
    elif HEADER_DELAY in headers and _NSERVICEBUS_EXCHANGE.fullmatch(exchange):
        # NServiceBus delays messages to queues only.
        exchange = ""
    routing_key = original_key(routing_key)
    if isinstance(own_key := headers.get(HEADER_PICK_UP_KEY), str):
        routing_key = own_key
    # A retried or parked copy has the target of the original message in its headers.
    if isinstance(first_exchange := headers.get(HEADER_EXCHANGE), str):
        exchange = first_exchange
    if isinstance(first_key := headers.get(HEADER_ROUTING_KEY), str):
        routing_key = first_key
    due, sent = headers.get(HEADER_DUE), headers.get(HEADER_SENT)
    restored["headers"] = _sender_headers(headers)
    return SentMessage(
        exchange=exchange,
        routing_key=routing_key,
        values=restored,
        due=from_milliseconds(due) if isinstance(due, int) else None,
        sent_at=from_milliseconds(sent) if isinstance(sent, int) else None,
        schedule=schedule_headers(headers),
    )


def sent_expiration(values: Mapping[str, Any]) -> Any:
    """The ``expiration`` property that a message was sent with; None without one."""
    headers = values.get("headers") or {}
    expiration = headers.get(HEADER_EXPIRATION)
    if isinstance(expiration, str) and not is_retried_by_servicecontrol(headers):
        # As with a retry by "bide errors", the operator's decision takes precedence over the sender's expiration.
        return expiration
    return values.get("expiration")


def is_retried_by_servicecontrol(headers: Mapping[str, Any]) -> bool:
    """Whether an operator retried the message in ServicePulse, with these headers or edited ones."""
    return SERVICECONTROL_RETRY in headers or SERVICECONTROL_EDIT in headers


def schedule_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers with key and id of the schedule of a message, for its copies."""
    found = {name: headers.get(name) for name in (HEADER_KEY, HEADER_SCHEDULE)}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _sender_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in headers.items()
        if name not in TRANSPORT_HEADERS and not name.startswith(OWN_PREFIX)
    }
    for name in ("CC", "BCC"):
        keys = kept.get(name)
        if isinstance(keys, list):
            kept[name] = [key for key in keys if not (isinstance(key, str) and is_transport_key(key))]
            if not kept[name]:
                del kept[name]
    deaths = kept.get("x-death")
    if isinstance(deaths, list):
        kept["x-death"] = [
            death
            for death in deaths
            if not (isinstance(death, dict) and _is_delay_death(death.get("exchange"), death.get("queue")))
        ]
        if not kept["x-death"]:
            del kept["x-death"]
    for exchange, queue, reason in _FIRST_AND_LAST_DEATH:
        if _is_delay_death(kept.get(exchange), kept.get(queue)):
            for name in (exchange, queue, reason):
                kept.pop(name, None)
    return kept


def _is_delay_death(exchange: Any, queue: Any) -> bool:
    """Whether a death with this exchange and this queue belongs to a delay infrastructure."""
    return isinstance(exchange, str) and isinstance(queue, str) and _is_delay_queue(exchange, queue)


@lru_cache(maxsize=4096)
def _is_delay_queue(exchange: str, queue: str) -> bool:
    # Cached: this is called four times per delayed message, for the same few hundred names.
    if _CASCADE_QUEUE.fullmatch(queue):
        return True
    # Both names are needed: an application may have a queue named "orders.v1.release.eu".
    found = _CLOCK_EXCHANGE.fullmatch(exchange)
    return (
        found is not None
        and queue.startswith(found[1])
        and _CLOCK_QUEUE.fullmatch(queue.removeprefix(found[1])) is not None
    )
