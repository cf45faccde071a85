"""What messages to one target have in common on the wire, encoded once: the form of a route for bulk publishing.

An infrastructure knows what its headers and keys are, and the AMQP codec how they are encoded. The codec lies in a
higher layer, so it is handed in, as a :class:`WireFormat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol


class WireFormat(Protocol):
    """Encodes names and values of headers. The module :mod:`bide.amqp.codec` is one."""

    def short_string(self, text: str) -> bytes:
        """The name of a header."""

    def field_value(self, value: Any) -> bytes:
        """The value of a header, or one item of a list."""

    def array(self, items: bytes) -> bytes:
        """A list, from its encoded items."""

    def table_items(self, items: Mapping[str, Any]) -> bytes:
        """Headers, the name of each before its value."""


class CompiledRoute(Protocol):
    """:meth:`DelayInfrastructure.route` for one target and many messages."""

    @property
    def routing_key(self) -> str | None:
        """The routing key, if it is the same after every delay."""

    @property
    def names(self) -> frozenset[str]:
        """Of the headers that :meth:`after` adds, the names that a sender may use too: bide's own are refused."""

    def after(self, wait: int, message_id: str) -> tuple[str, str, bytes, int] | None:
        """How to publish a message that is due after a wait.

        Args:
            wait: microseconds, at least one.
            message_id: spreads messages over parallel queues.

        Returns:
            The exchange, the routing key, the encoded headers to add and the number of hops, as ``route`` gives them.
            None where ``route`` has to be asked: the wait is too long, or what it needs is not known to be there.
        """


class CompiledHeaders(Protocol):
    """:meth:`DelayInfrastructure.sender_headers` for messages that share most of their properties."""

    def encode(self, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]) -> bytes | None:
        """The encoded headers; None if the message has one of them itself, or cannot be sent."""


class SenderHeaders(Protocol):
    """The method of that name."""

    def __call__(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]: ...


class UncompiledHeaders:
    """The headers of an infrastructure that does not compile them: asked for and encoded with every message."""

    def __init__(self, sender_headers: SenderHeaders, wire: WireFormat) -> None:
        self._sender_headers = sender_headers
        self._wire = wire

    def encode(self, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]) -> bytes | None:
        """See :class:`CompiledHeaders`."""
        found = self._sender_headers(message_id=message_id, now=now, due=due, values=values)
        if not found:
            return b""
        own = values.get("headers")
        return None if own and not own.keys().isdisjoint(found) else self._wire.table_items(found)
