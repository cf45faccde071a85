"""Received messages, restored to what was sent, without their settlement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from bide.amqp.delivery import Delivery
from bide.delay.protocol import HEADER_KEY, HEADER_SCHEDULE
from bide.delay.received import SentMessage, restore, sent_expiration
from bide.errors import BideError, DeliveryLostError, InvalidInputError, UndecodableMessageError
from bide.recoverability.history import (
    HEADER_SENT_BY,
    NSERVICEBUS_SENT,
    History,
    nservicebus_delivery_due,
    nservicebus_due,
    read_nservicebus_time,
)
from bide.runtime.logs import logger

if TYPE_CHECKING:
    from bide.amqp.channel import Channel
    from bide.client.conversation import Conversation
    from bide.client.subscription import DeliveryChannel

log = logger(__name__)

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
"""The properties that a forwarded message keeps, by the names of attributes and arguments."""

_EXPIRATION: Final = re.compile(r"[0-9]{1,13}")


class ReceivedMessage:
    """What :class:`Message` and :class:`bide.SyncMessage` have in common: everything except settling.

    Attributes:
        body: the body.
        received_at: when this process received it.
        redelivered: whether the queue delivered it before.
        raw: the delivery with all properties and headers, as the broker sent it.
    """

    __slots__ = (
        "_conversation",
        "_history",
        "_restored_message",
        "_sent_message",
        "_subscription",
        "body",
        "raw",
        "received_at",
        "redelivered",
    )

    def __init__(
        self,
        delivery: Delivery,
        subscription: DeliveryChannel | None,
        received_at: datetime,
        conversation: Conversation | None = None,
    ) -> None:
        self.raw = delivery
        self._conversation = conversation
        self.body = delivery.body
        self.received_at = received_at
        self.redelivered = delivery.redelivered
        self._restored_message: SentMessage | None = None
        self._sent_message: SentMessage | None = None
        self._history: History | None = None
        self._subscription = subscription

    def _restored(self) -> SentMessage:
        """The message as it was sent, computed at the first use."""
        if self._restored_message is None:
            self._restored_message = restore(self.raw.exchange, self.raw.routing_key, self.raw.values)
        return self._restored_message

    @property
    def _values(self) -> Mapping[str, Any]:
        return self._restored().values

    @property
    def exchange(self) -> str:
        """The exchange that it was sent to; empty for a message sent to a queue."""
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
        """The due time, or None if neither bide nor an NServiceBus endpoint delayed the message."""
        due = self._restored().due
        return due if due is not None else nservicebus_delivery_due(self.raw.values.get("headers") or {})

    @property
    def key(self) -> str | None:
        """The key of the schedule, if the message was scheduled."""
        return self._own_text(HEADER_KEY)

    @property
    def schedule_id(self) -> str | None:
        """The id of the schedule, if the message was scheduled."""
        return self._own_text(HEADER_SCHEDULE)

    @property
    def sent_at(self) -> datetime | None:
        """The sending time, or None if the message has none.

        Its resolution is a millisecond from bide, a microsecond from NServiceBus, and a second from the ``timestamp``
        property.
        """
        sent = self._restored().sent_at
        return sent or read_nservicebus_time(self.headers.get(NSERVICEBUS_SENT)) or self.timestamp

    @property
    def history(self) -> History:
        """The earlier attempts, if an :class:`bide.Endpoint` retried the message."""
        if self._history is None:
            self._history = History.read(self.raw.values.get("headers") or {})
        return self._history

    @property
    def lateness(self) -> timedelta | None:
        """The time from the due time to the receipt, or None without a due time. It depends on the clocks of sender and
        receiver."""
        return None if self.due is None else self.received_at - self.due

    @property
    def delivery_count(self) -> int:
        """The number of earlier deliveries by a quorum queue; 0 if the queue does not count them."""
        headers = self.raw.values.get("headers") or {}
        value = headers.get("x-delivery-count", 0)
        return value if isinstance(value, int) else 0

    @property
    def counted(self) -> bool:
        """Whether the message has a delivery count, which quorum queues add from the second delivery."""
        headers = self.raw.values.get("headers") or {}
        return "x-delivery-count" in headers or "x-acquired-count" in headers

    @property
    def message_id(self) -> str | None:
        """The sender's id of the message."""
        return self._text_property("message_id")

    @property
    def correlation_id(self) -> str | None:
        """The id of the message or request that it belongs to."""
        return self._text_property("correlation_id")

    @property
    def content_type(self) -> str | None:
        """The MIME type of the body."""
        return self._text_property("content_type")

    @property
    def content_encoding(self) -> str | None:
        """The MIME encoding of the body."""
        return self._text_property("content_encoding")

    @property
    def reply_to(self) -> str | None:
        """The queue for replies."""
        return self._text_property("reply_to")

    @property
    def type(self) -> str | None:
        """The sender's name for this kind of message."""
        return self._text_property("type")

    @property
    def user_id(self) -> str | None:
        """The sender's user name, which the broker checked."""
        return self._text_property("user_id")

    @property
    def app_id(self) -> str | None:
        """The sending application."""
        return self._text_property("app_id")

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
        """How long the message stays valid after its due time, or after its sending if it was not delayed."""
        value = sent_expiration(self.raw.values)
        return timedelta(milliseconds=int(value)) if isinstance(value, str) and _EXPIRATION.fullmatch(value) else None

    @property
    def expired(self) -> bool:
        """Whether a delayed message came later than its due time plus its ``expiration``.

        The broker does not enforce the expiration of a delayed message. For a copy, such as a retry, see
        ``history.expires_at``: it counts from the sender's due time, or from the sending if there was none.
        """
        if self.history.expires_at is not None:
            return self.received_at > self.history.expires_at
        if (expiration := self.expiration) is None:
            return False
        lateness = self.lateness
        return lateness is not None and lateness > expiration

    def _text_property(self, name: str) -> str | None:
        # A delay changes no text property but the expiration, so nothing has to be restored.
        value = self.raw.values.get(name)
        return value if isinstance(value, str) else None

    def _own_text(self, name: str) -> str | None:
        """A header of bide's own."""
        value = (self.raw.values.get("headers") or {}).get(name)
        return value if isinstance(value, str) else None

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            UndecodableMessageError: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UndecodableMessageError(
                f"the body of the message {self.message_id!r} ({len(self.body)} bytes) is not JSON: {error}"
            ) from error

    @property
    def settled(self) -> bool:
        """Whether the message was acknowledged, requeued or rejected."""
        return self._subscription is None

    @property
    def lost(self) -> bool:
        """Whether the connection was lost before the message was settled: the broker delivers it again."""
        return self._subscription is not None and not self._subscription.channel.is_open

    @property
    def sent_by(self) -> str | None:
        """The publisher according to the message: a header, or else the application id, or else the user name."""
        kept = (self.raw.values.get("headers") or {}).get(HEADER_SENT_BY)
        named = kept or self.headers.get("NServiceBus.OriginatingEndpoint") or self.app_id or self.user_id
        return named if isinstance(named, str) else None

    def as_sent(self) -> SentMessage:
        """The target and the properties of the original message, for making copies of it.

        They include a due time that an NServiceBus endpoint set.
        """
        if self._sent_message is None:
            due = self.due if self.due is not None else nservicebus_due(self.raw.values.get("headers") or {})
            self._sent_message = replace(self._restored(), due=due, sent_at=self.sent_at)
        return self._sent_message

    @property
    def _sender(self) -> Conversation:
        """The sender of messages that this message causes.

        Raises:
            InvalidInputError: no consumer received the message, so that it has no client to send with.
        """
        if self._conversation is None:
            raise InvalidInputError(
                f"the message {self.message_id!r} was not received by a consumer: send with client.publish"
            )
        return self._conversation

    async def _ack(self) -> None:
        await self._settle(lambda channel: channel.ack(self.raw.delivery_tag))

    async def _reject(self, *, requeue: bool) -> None:
        await self._settle(lambda channel: channel.reject(self.raw.delivery_tag, requeue=requeue))

    async def _settle(self, how: Callable[[Channel], None]) -> None:
        # Drop the reference, so that settled messages that are kept do not keep the consumer's channel open.
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            raise InvalidInputError(f"the message {self.message_id!r} was settled already: settle a message once")
        subscription.settled()
        channel = subscription.channel
        try:
            how(channel)
            # Acknowledgements are written in the background; this only holds back a caller that settles too fast.
            await channel.connection.drained()
        except BideError as error:
            raise DeliveryLostError(
                f"the message {self.message_id!r} can no longer be settled: the broker delivers it again ({error})"
            ) from error

    async def _end(self, error: BaseException | None, *, requeue: bool) -> None:
        """Settle the message after a block of :meth:`process`, unless the block has settled it."""
        if self.settled:
            return
        if error is None:
            await self._ack()
            return
        try:
            # A block that was interrupted has not failed: the message is handled again.
            await self._reject(requeue=requeue or not isinstance(error, Exception))
        except DeliveryLostError as lost:
            log.info("%s", lost)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.message_id!r} {len(self.body)} bytes, exchange {self.exchange!r}, "
            f"routing key {self.routing_key!r}>"
        )
