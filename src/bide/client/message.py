"""A received message, and what may be done with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from bide.amqp.delivery import Delivery
from bide.delay.received import SentMessage, restore
from bide.errors import BideError, DeliveryLostError, InvalidInputError, UndecodableMessageError
from bide.recoverability.history import (
    HEADER_SENT_BY,
    NSERVICEBUS_SENT,
    History,
    nservicebus_due,
    read_nservicebus_time,
)

if TYPE_CHECKING:
    from bide.amqp.channel import Channel
    from bide.client.subscription import Subscription


KEPT_PROPERTIES: Final = (
    "message_id",
    "correlation_id",
    "reply_to",
    "content_type",
    "content_encoding",
    "type",
    "app_id",
    "timestamp",
    "persistent",
)
"""What a message that is sent on keeps of the one that was received, by the names of attributes and of arguments."""

_DIGITS: Final = re.compile(r"[0-9]{1,13}")


class Message:
    """A message as it was sent, without what carried it here.

    Settle it once: :meth:`ack`, :meth:`requeue` or :meth:`reject`. What is not settled returns to its queue when the
    consumer or its connection closes, or when nothing refers to either of them any more.

    Attributes:
        body: the bytes.
        received_at: when this process got it.
        redelivered: whether the queue delivered it before.
        raw: the delivery with all properties and headers, as the broker sent it.
    """

    __slots__ = ("_history", "_restored_once", "_sent", "_subscription", "body", "raw", "received_at", "redelivered")

    def __init__(self, delivery: Delivery, subscription: Subscription | None, received_at: datetime) -> None:
        self.raw = delivery
        self.body = delivery.body
        self.received_at = received_at
        self.redelivered = delivery.redelivered
        self._restored_once: SentMessage | None = None
        self._sent: SentMessage | None = None
        self._history: History | None = None
        self._subscription = subscription

    def _restored(self) -> SentMessage:
        """The message as it was sent, worked out at the first use."""
        if self._restored_once is None:
            self._restored_once = restore(self.raw.exchange, self.raw.routing_key, self.raw.values)
        return self._restored_once

    @property
    def _values(self) -> Mapping[str, Any]:
        return self._restored().values

    @property
    def exchange(self) -> str:
        """The exchange that it was sent to; empty for one sent to a queue."""
        return self._restored().exchange

    @property
    def routing_key(self) -> str:
        """The routing key that it was sent with."""
        return self._restored().routing_key

    @property
    def headers(self) -> Mapping[str, Any]:
        """The sender's headers."""
        return self._values.get("headers") or {}

    @property
    def due(self) -> datetime | None:
        """When it was due, or None if it was not delayed by bide."""
        return self._restored().due

    @property
    def sent_at(self) -> datetime | None:
        """When it was sent, as far as its sender says; None where nothing says it.

        bide tells it to the millisecond, NServiceBus to the microsecond, a ``timestamp`` to the second.
        """
        sent = self._restored().sent_at
        return sent or read_nservicebus_time(self.headers.get(NSERVICEBUS_SENT)) or self.timestamp

    @property
    def history(self) -> History:
        """The attempts behind it, where an :class:`bide.Endpoint` retried it."""
        if self._history is None:
            self._history = History.read(self.raw.values.get("headers") or {})
        return self._history

    @property
    def lateness(self) -> timedelta | None:
        """Time from the due time to the receipt, or None without a due time. The clocks of both machines count."""
        return None if self.due is None else self.received_at - self.due

    @property
    def delivery_count(self) -> int:
        """How often a quorum queue delivered it before; 0 where the queue does not count."""
        headers = self.raw.values.get("headers") or {}
        value = headers.get("x-delivery-count", 0)
        return value if isinstance(value, int) else 0

    @property
    def counted(self) -> bool:
        """Whether the queue counts its deliveries, as quorum queues do from the second one on."""
        headers = self.raw.values.get("headers") or {}
        return "x-delivery-count" in headers or "x-acquired-count" in headers

    @property
    def message_id(self) -> str | None:
        """The sender's id of the message."""
        return self._text("message_id")

    @property
    def correlation_id(self) -> str | None:
        """The id of the message or request that it belongs to."""
        return self._text("correlation_id")

    @property
    def content_type(self) -> str | None:
        """The MIME type of the body."""
        return self._text("content_type")

    @property
    def content_encoding(self) -> str | None:
        """The MIME encoding of the body."""
        return self._text("content_encoding")

    @property
    def reply_to(self) -> str | None:
        """The queue for answers."""
        return self._text("reply_to")

    @property
    def type(self) -> str | None:
        """The sender's name for this kind of message."""
        return self._text("type")

    @property
    def user_id(self) -> str | None:
        """The sender's user name, which the broker checked."""
        return self._text("user_id")

    @property
    def app_id(self) -> str | None:
        """The sending application."""
        return self._text("app_id")

    @property
    def priority(self) -> int | None:
        """The sender's priority."""
        value = self._values.get("priority")
        return value if isinstance(value, int) else None

    @property
    def persistent(self) -> bool:
        """Whether the message survives a restart of the broker in a durable classic queue."""
        return self._values.get("delivery_mode") == 2

    @property
    def timestamp(self) -> datetime | None:
        """The sender's timestamp, in whole seconds."""
        value = self._values.get("timestamp")
        return value if isinstance(value, datetime) else None

    @property
    def expiration(self) -> timedelta | None:
        """How long after its due time, or its sending, the sender cares for it."""
        value = self._values.get("expiration")
        return timedelta(milliseconds=int(value)) if isinstance(value, str) and _DIGITS.fullmatch(value) else None

    @property
    def expired(self) -> bool:
        """Whether a delayed message came later than its due time plus its ``expiration``.

        The broker cannot watch over the expiration of a delayed message once that waited for its due time. Of a copy,
        such as one that is being retried, ``history.expires_at`` tells: the time counts from the due time that the
        sender gave, or else from the sending.
        """
        if self.history.expires_at is not None:
            return self.received_at > self.history.expires_at
        lateness, expiration = self.lateness, self.expiration
        return lateness is not None and expiration is not None and lateness > expiration

    def _text(self, name: str) -> str | None:
        value = self._values.get(name)
        return value if isinstance(value, str) else None

    def json(self) -> Any:
        """The body read as JSON.

        Raises:
            UndecodableMessageError: it is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UndecodableMessageError(
                f"the body of the message {self.message_id!r} ({len(self.body)} bytes) is not JSON: {error}"
            ) from error

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, requeued or rejected."""
        return self._subscription is None

    @property
    def lost(self) -> bool:
        """Whether the connection that delivered it is gone before it was settled: the broker delivers it again."""
        return self._subscription is not None and not self._subscription.channel.is_open

    @property
    def sent_by(self) -> str | None:
        """Who published it, as far as the message says: the application, or else the user name."""
        kept = (self.raw.values.get("headers") or {}).get(HEADER_SENT_BY)
        named = kept or self.headers.get("NServiceBus.OriginatingEndpoint") or self.app_id or self.user_id
        return named if isinstance(named, str) else None

    def as_sent(self) -> SentMessage:
        """Where it was sent to, and its properties, without its body: what copies of it are made from.

        It has the due time that an NServiceBus endpoint gave, too.
        """
        if self._sent is None:
            due = self.due if self.due is not None else nservicebus_due(self.raw.values.get("headers") or {})
            self._sent = replace(self._restored(), due=due, sent_at=self.sent_at)
        return self._sent

    async def ack(self) -> None:
        """Done: the queue forgets the message.

        Raises:
            DeliveryLostError: the connection that delivered it is gone; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._settle(lambda channel: channel.ack(self.raw.delivery_tag))

    async def requeue(self) -> None:
        """Back to the queue, to be delivered again. On a quorum queue it counts towards the delivery limit.

        Raises:
            DeliveryLostError: the connection that delivered it is gone; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._settle(lambda channel: channel.reject(self.raw.delivery_tag, requeue=True))

    async def reject(self) -> None:
        """Away with it: to the queue's dead-letter exchange, or dropped where the queue has none.

        Raises:
            DeliveryLostError: the connection that delivered it is gone; the broker delivers it again.
            InvalidInputError: it was settled before.
        """
        await self._settle(lambda channel: channel.reject(self.raw.delivery_tag, requeue=False))

    async def _settle(self, how: Callable[[Channel], None]) -> None:
        # Given up with the settling, so that messages that are kept do not keep the consumer's channel open.
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            raise InvalidInputError(f"the message {self.message_id!r} was settled already: settle a message once")
        subscription.settled()
        channel = subscription.channel
        try:
            how(channel)
            # What is settled is written in the background; this only holds a caller back who settles too fast.
            await channel.connection.drained()
        except BideError as error:
            raise DeliveryLostError(
                f"the message {self.message_id!r} cannot be settled any more: the broker delivers it again ({error})"
            ) from error

    def __repr__(self) -> str:
        return (
            f"<Message {self.message_id!r} {len(self.body)} bytes, exchange {self.exchange!r}, "
            f"routing key {self.routing_key!r}>"
        )
