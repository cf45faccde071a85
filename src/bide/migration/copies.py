"""Copies of waiting messages, for another delay infrastructure or to be set aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bide.amqp.delivery import Delivery
from bide.delay.forwarding import carry_user_id, set_aside_values
from bide.delay.nservicebus import is_blank
from bide.delay.protocol import (
    HEADER_DUE,
    HEADER_EXPIRATION,
    HEADER_PICK_UP_KEY,
    HEADER_PRIORITY,
    HEADER_SET_ASIDE,
    HEADER_TO,
    ExchangeTarget,
    Target,
)
from bide.delay.received import DEATH_HEADERS, OWN_PREFIX, restore
from bide.delay.waiting_hall import HEADER_REST
from bide.durations import from_milliseconds, to_milliseconds
from bide.errors import InvalidInputError
from bide.messages.prepared import PreparedMessage, new_message_id
from bide.relay.decision import HEADER_CC, HEADER_REFUSALS

HEADER_QUEUE: Final = "bide-set-aside-from"
"""Header of a set-aside message: the queue in which it waited."""

HEADER_AT: Final = "bide-set-aside-at"
"""Header of a set-aside message: the time at which it was taken from that queue, in milliseconds since 1970."""

_OF_THE_WAIT: Final = frozenset(
    {
        HEADER_TO,
        HEADER_DUE,
        HEADER_EXPIRATION,
        HEADER_PRIORITY,
        HEADER_PICK_UP_KEY,
        HEADER_SET_ASIDE,
        HEADER_REST,
        HEADER_REFUSALS,
        HEADER_QUEUE,
        HEADER_AT,
    }
)
"""Headers of bide for the wait in the old infrastructure. Copies keep its others, such as the number of retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenMessage:
    """A message that was taken from a delay queue, in this run or in an earlier one that set it aside.

    Attributes:
        queue: the delay queue.
        at: the time at which it was taken from the delay queue.
    """

    delivery: Delivery
    queue: str
    at: datetime

    @classmethod
    def read_set_aside(cls, delivery: Delivery) -> TakenMessage | None:
        """Read a message that an earlier run set aside; None if its headers do not name its delay queue and time."""
        headers = delivery.values.get("headers") or {}
        queue, at = headers.get(HEADER_QUEUE), headers.get(HEADER_AT)
        moment = from_milliseconds(at) if isinstance(at, int) else None
        return cls(delivery=delivery, queue=queue, at=moment) if isinstance(queue, str) and moment else None

    @property
    def headers(self) -> Mapping[str, Any]:
        """All headers."""
        found: Mapping[str, Any] = self.delivery.values.get("headers") or {}
        return found


def onward_copy(taken: TakenMessage, target: Target, due: datetime, *, user: str) -> PreparedMessage:
    """Copy a message as its sender published it, for another infrastructure.

    The copy has the body, properties and headers of the message, except the headers of the old infrastructure and of
    the broker. A message without an id gets one. A second copy, made after a kill, gets another id.

    Args:
        user: the user of the publishing connection; the broker refuses a message with another ``user_id``.

    Raises:
        InvalidInputError: the message has a CC or BCC header, which the keys of the delay would replace.
    """
    delivery = taken.delivery
    values = dict(restore(delivery.exchange, delivery.routing_key, delivery.values).values)
    headers = {name: value for name, value in (values.get("headers") or {}).items() if name not in DEATH_HEADERS}
    headers |= {name: value for name, value in taken.headers.items() if _is_kept(name)}
    for name in ("CC", "BCC", HEADER_CC):
        if name in headers:
            raise InvalidInputError(f"the message has a header {name}, which a delayed message cannot carry")
    carry_user_id(values, headers, user)
    values["headers"] = headers
    if is_blank(values.get("message_id")):
        values["message_id"] = new_message_id()
    return PreparedMessage(
        target=target, body=delivery.body, message_id=values["message_id"], due=due, values=values, is_copy=True
    )


def set_aside_copy(taken: TakenMessage, exchange: str, reason: str | None, *, user: str) -> PreparedMessage:
    """Copy a message as it was taken, with the reason in a header, for the exchange of set-aside messages.

    Without a reason, its expiration is lost: see :func:`bide.delay.forwarding.set_aside_values`.
    """
    delivery = taken.delivery
    values = set_aside_values(delivery.values, reason, user=user)
    values["headers"] |= {HEADER_QUEUE: taken.queue, HEADER_AT: to_milliseconds(taken.at)}
    return PreparedMessage(
        target=ExchangeTarget(exchange, delivery.routing_key),
        body=delivery.body,
        message_id=values.get("message_id", ""),
        values=values,
        is_copy=True,
    )


def _is_kept(name: str) -> bool:
    return name.startswith(OWN_PREFIX) and name not in _OF_THE_WAIT
