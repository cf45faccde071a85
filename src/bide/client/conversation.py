"""Replies, commands and events that a received message causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from bide.delay.message_type import MessageType, message_type_of
from bide.delay.recognition import refuse_target
from bide.errors import InvalidInputError, TargetNotFoundError, UnsupportedTargetError
from bide.messages.outgoing import OutgoingMessage
from bide.recoverability.message_types import ENCLOSED_TYPES
from bide.runtime.host import HOST, host_id

if TYPE_CHECKING:
    from bide.client.publisher import Publisher, Receipt
    from bide.delay.protocol import DelayInfrastructure
    from bide.runtime.bounded_cache import BoundedCache
    from bide.topology import Topology

_MESSAGE_ID: Final = "NServiceBus.MessageId"
_CONVERSATION: Final = "NServiceBus.ConversationId"
_CORRELATION: Final = "NServiceBus.CorrelationId"
_CALLBACK_QUEUE: Final = "NServiceBus.RabbitMQ.CallbackQueue"
_REPLY_TO: Final = "NServiceBus.ReplyToAddress"
_SAGA: Final = {
    "NServiceBus.SagaId": "NServiceBus.OriginatingSagaId",
    "NServiceBus.SagaType": "NServiceBus.OriginatingSagaType",
}
"""The reply's headers that find the saga of the request, each with the request's header that it is copied from."""

Intent = Literal["Send", "Publish", "Reply"]


class ConversationClient(Protocol):
    """The part of a client that conversations use."""

    _publisher: Publisher
    _publications: BoundedCache[MessageType, None]

    async def infrastructure(self) -> DelayInfrastructure:
        """See :meth:`bide.Client.infrastructure`."""

    async def declare(self, topology: Topology) -> object:
        """See :meth:`bide.Client.declare`."""

    async def _send(self, message: OutgoingMessage) -> Receipt: ...


class CausingMessage(Protocol):
    """The part of a received message that its replies, commands and events depend on."""

    @property
    def message_id(self) -> str | None:
        """The sender's id of the message."""

    @property
    def correlation_id(self) -> str | None:
        """The id of the message or request that it belongs to."""

    @property
    def reply_to(self) -> str | None:
        """The queue for replies."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """The sender's headers."""


class Conversation:
    """Sends the replies, commands and events that received messages cause.

    With the layout ``NServiceBus`` they have the headers that .NET endpoints add in a handler: the conversation, the
    related message, the origin, the intent, the address for replies and, in a reply, the saga that sent the request.
    With other layouts, only the correlation id of the request is added, to replies.

    Args:
        client: the client that received the messages.
        endpoint: the name of the endpoint that receives them.
        queue: the queue that they come from, which is also the address for replies.
    """

    def __init__(self, client: ConversationClient, *, endpoint: str, queue: str) -> None:
        self._client = client
        self._endpoint = endpoint
        self._queue = queue

    async def reply(self, message: CausingMessage, answer: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Message.reply`."""
        if answer.exchange is not None:
            raise InvalidInputError(
                f"a reply goes to a queue, and not to the exchange {answer.exchange!r}: leave it out"
            )
        address = reply_address(message)
        if answer.to is None and address is None:
            raise InvalidInputError(
                f"the message {message.message_id!r} has no address for replies: name a queue with to=..."
            )
        if answer.to is None and address is not None:
            # Any sender can write the address.
            refuse_target(address)
        saga = {name: value for name, asked in _SAGA.items() if isinstance(value := message.headers.get(asked), str)}
        to = answer.to or address
        correlation_id = answer.correlation_id or message.correlation_id or message.message_id
        return await self._send(message, replace(answer, to=to, correlation_id=correlation_id), "Reply", saga)

    async def send(self, message: CausingMessage, command: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Message.send`."""
        return await self._send(message, command, "Send", {})

    async def publish(self, message: CausingMessage, kind: MessageType | str, event: OutgoingMessage) -> Receipt:
        """See :meth:`bide.Message.publish`."""
        kind = message_type_of(kind)
        infrastructure = await self._client.infrastructure()
        routing = infrastructure.event_routing()
        if routing is None:
            raise UnsupportedTargetError(
                f"the layout {infrastructure.name!r} does not say where events of the type {kind.name!r} go: connect "
                "with infrastructure=bide.NServiceBus(), or publish to an exchange with client.publish(exchange=...)"
            )
        exchange, routing_key = routing.event_address(kind)
        event = replace(event, exchange=exchange, routing_key=routing_key, type=kind.name, mandatory=False)
        headers = {ENCLOSED_TYPES: kind.enclosed}
        declared = self._client._publications  # noqa: SLF001 (of the same package)
        while True:
            is_known = kind in declared
            if not is_known:
                if self._client._publisher.declare:  # noqa: SLF001 (of the same package)
                    await self._client.declare(routing.publication(kind))
                declared[kind] = None
            try:
                return await self._send(message, event, "Publish", headers)
            except TargetNotFoundError:
                if not is_known:
                    raise
                # The exchange was deleted since it was declared.
                declared.pop(kind, None)

    async def _send(
        self, message: CausingMessage, outgoing: OutgoingMessage, intent: Intent, headers: Mapping[str, str]
    ) -> Receipt:
        infrastructure = await self._client.infrastructure()
        if infrastructure.writes_nservicebus_headers:
            outgoing = self._in_conversation(message, outgoing, intent, headers)
        return await self._client._send(outgoing)  # noqa: SLF001 (of the same package)

    def _in_conversation(
        self, message: CausingMessage, outgoing: OutgoingMessage, intent: Intent, headers: Mapping[str, str]
    ) -> OutgoingMessage:
        before = message.headers
        message_id = _text(before, _MESSAGE_ID) or message.message_id
        correlation_id = outgoing.correlation_id or message.correlation_id or _text(before, _CORRELATION) or message_id
        reply_to = outgoing.reply_to or self._queue
        own = {
            "NServiceBus.MessageIntent": intent,
            _CORRELATION: correlation_id,
            _CONVERSATION: _text(before, _CONVERSATION),
            "NServiceBus.RelatedTo": message_id,
            "NServiceBus.OriginatingMachine": HOST,
            "NServiceBus.OriginatingEndpoint": self._endpoint,
            "$.diagnostics.originating.hostid": host_id(self._endpoint),
            _REPLY_TO: reply_to,
            ENCLOSED_TYPES: outgoing.type,
            **headers,
        }
        known = {name: value for name, value in own.items() if value is not None}
        return replace(
            outgoing,
            headers={**known, **(outgoing.headers or {})},
            correlation_id=correlation_id,
            reply_to=reply_to,
        )


def reply_address(message: CausingMessage) -> str | None:
    """The queue for replies to a message, as an NServiceBus endpoint finds it; None if it has none."""
    return _text(message.headers, _CALLBACK_QUEUE) or message.reply_to or _text(message.headers, _REPLY_TO)


def _text(headers: Mapping[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) and value else None
