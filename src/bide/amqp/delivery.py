"""Deliveries, assembled from their method, header and body frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Delivery:
    """A message as the broker sent it.

    Attributes:
        consumer_tag: the tag of the consumer; empty for a delivery by ``get``.
        values: the properties by their AMQP names; absent ones are left out.
        message_count: the number of messages left in the queue, for a delivery by ``get``; otherwise None.
    """

    exchange: str
    routing_key: str
    redelivered: bool
    delivery_tag: int
    consumer_tag: str = ""
    message_count: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""


@dataclass(slots=True, kw_only=True)
class Return:
    """A published message that the broker returned, because no queue takes it."""

    reply_code: int
    reply_text: str
    exchange: str
    routing_key: str
    values: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""


class Assembly:
    """A message that is being received: its content header and body frames are still to come."""

    __slots__ = ("_has_header", "_parts", "_remaining", "message")

    def __init__(self, message: Delivery | Return) -> None:
        self.message = message
        self._parts: list[bytes] = []
        self._remaining = 0
        self._has_header = False

    def header(self, size: int, values: Mapping[str, Any]) -> bool:
        """Add the content header, and return whether the message is complete.

        Raises:
            ValueError: the message has a content header already.
        """
        if self._has_header:
            raise ValueError("a second content header")
        self._has_header = True
        self._remaining = size
        self.message.values = values
        return not size

    def body(self, payload: bytes) -> bool:
        """Add a body frame, and return whether the message is complete.

        Raises:
            ValueError: the body is longer than the content header announced.
        """
        self._remaining -= len(payload)
        if self._remaining < 0 or not self._has_header:
            raise ValueError("more of a body than announced")
        self._parts.append(payload)
        if self._remaining:
            return False
        self.message.body = payload if len(self._parts) == 1 else b"".join(self._parts)
        return True
