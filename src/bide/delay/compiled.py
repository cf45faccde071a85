"""Compiled routes: the keys and headers that messages to one target share, encoded once.

An infrastructure knows its headers and keys; the AMQP codec knows how to encode them. The codec is in a higher layer,
so callers pass it as a :class:`WireFormat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol


class WireFormat(Protocol):
    """Encodes names and values of headers. The module :mod:`bide.amqp.codec` implements it."""

    def short_string(self, text: str) -> bytes:
        """Encode the name of a header."""

    def field_value(self, value: Any) -> bytes:
        """Encode the value of a header, or one item of a list."""

    def array(self, items: bytes) -> bytes:
        """Encode a list, from its encoded items."""

    def table_items(self, items: Mapping[str, Any]) -> bytes:
        """Encode headers: each name before its value."""


class CompiledRoute(Protocol):
    """:meth:`DelayInfrastructure.route` for one target and many messages."""

    @property
    def routing_key(self) -> str | None:
        """The routing key, if it does not depend on the delay."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the headers from :meth:`after` that senders may also set, without bide's own headers."""

    def after(self, wait: int, message_id: str) -> tuple[str, str, bytes, int] | None:
        """The route of a message that is due after a wait.

        Args:
            wait: microseconds, at least one.
            message_id: spreads messages over parallel queues.

        Returns:
            The exchange, the routing key, the encoded headers to add and the number of hops, as ``route`` gives them.
            None if the caller has to use ``route``: the wait is too long, or a queue that it needs is not known to
            exist.
        """


class CompiledHeaders(Protocol):
    """:meth:`DelayInfrastructure.sender_headers` for many messages with mostly the same properties."""

    def encode(self, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]) -> bytes | None:
        """The encoded headers; None if the message sets one of them itself, or cannot be sent."""


class SenderHeaders(Protocol):
    """The method :meth:`DelayInfrastructure.sender_headers`."""

    def __call__(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]: ...


class UncompiledHeaders:
    """The headers of an infrastructure that does not compile them: made and encoded for each message."""

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
