"""``NServiceBus``: the delay infrastructure of NServiceBus.RabbitMQ.

.NET endpoints on the same broker can receive messages that bide delays, and bide can receive messages that they delay:
exchanges, queues, arguments, keys and headers are those of NServiceBus.RabbitMQ (version 2 since its release 7, version
1 since 4.3). bide differs in three ways that .NET does not notice: its bindings match exactly one address, it checks
addresses before it sends, and it has a guard for messages whose endpoint was deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from bide.delay.cascade import RESOLUTION, BoundTarget, Cascade, CascadeInfrastructure, check_address
from bide.delay.cascade_keys import HEADER_DELAY, LEVELS
from bide.delay.protocol import HEADER_TO, ExchangeTarget, Target, check_topic_key, round_up
from bide.delay.routes import DelayRoute, Step
from bide.errors import InvalidDueTimeError, InvalidInputError
from bide.topology import Argument, Binding, DestinationType, Exchange, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bide.delay.cascade_route import CascadeRoute
    from bide.delay.compiled import WireFormat
    from bide.delay.event_routing import EventRouting
    from bide.delay.growing import ReadyDigits
    from bide.delay.levels import DelayLevels

Routing = Literal["conventional", "direct"]

NATIVE_MESSAGE_ID: Final = "NServiceBus.MessageId"
"""The header with the message id. Every NServiceBus message has it."""

_CORRELATION_ID: Final = "NServiceBus.CorrelationId"
_CONVERSATION_ID: Final = "NServiceBus.ConversationId"
_INTENT: Final = {"NServiceBus.MessageIntent": "Send"}
_TIME_SENT: Final = "NServiceBus.TimeSent"
_CONTENT_TYPE: Final = "NServiceBus.ContentType"
_DELIVER_AT: Final = "NServiceBus.DeliverAt"
_REPLY_TO: Final = "NServiceBus.ReplyToAddress"

_QUEUE_ARGUMENTS: Final[dict[int, dict[str, Argument]]] = {
    1: {"x-queue-mode": "lazy"},
    2: {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NServiceBus(CascadeInfrastructure):
    """Delays in whole seconds, of up to 3106 d 21:24:15, through the levels of NServiceBus.RabbitMQ.

    Messages reach the queue of an endpoint in the same way as messages of .NET. The endpoint must exist. If it does
    not, declaring ``route(...).requires`` fails with the broker's error, as it does for a .NET sender.

    Messages reach exchanges of any type, and isolated queues, through a release queue (:mod:`bide.delay.release`),
    which .NET does not have. The .NET commands ``delays migrate`` and ``delays transfer`` stop at messages that wait
    for such a target.

    Version 1 has classic queues and can lose messages when the broker stops: use it only together with endpoints that
    use it. Its queues have ``x-queue-mode: lazy``, which RabbitMQ accepts but ignores since 3.12 (declared on 4.0.5 and
    4.3.6 without an error): all classic queues write to disk since then.

    .NET declares TTLs as 64-bit integers. RabbitMQ compares integers of any width by value, so the width in which bide
    declares them does not matter.

    Args:
        version: 2 (quorum queues, exchanges ``nsb.v2.*``) or 1 (classic queues, ``nsb.*``).
        routing: the endpoints' routing topology: ``conventional`` (a fanout exchange per endpoint) or ``direct``.
        levels: 28. Fewer are for explanations and experiments only, never for a broker that NServiceBus uses.

    Raises:
        InvalidInputError: an argument has another value.
    """

    version: Literal[1, 2] = 2
    routing: Routing = "conventional"
    levels: int = LEVELS

    def __post_init__(self) -> None:
        if self.version not in _QUEUE_ARGUMENTS:
            raise InvalidInputError(f"NServiceBus has no delay infrastructure of version {self.version!r}: give 1 or 2")
        if self.routing not in ("conventional", "direct"):
            raise InvalidInputError(f"the routing {self.routing!r} is unknown: give 'conventional' or 'direct'")
        if not 1 <= self.levels <= LEVELS:
            raise InvalidInputError(f"{self.levels} levels: give 1 to {LEVELS}")

    @property
    def name(self) -> str:
        """The layout's name on the command line."""
        return "nservicebus" if self.version == 2 else "nservicebus-v1"

    @property
    def cascade(self) -> Cascade:
        """The levels as a binary cascade."""
        return _cascade(self.version, self.levels)

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        """The route by which a message reaches the endpoint after ``delay``.

        The delay is rounded up to the second. As with NServiceBus, a delay of zero goes through level 00. The message
        needs a ``message_id`` property and the headers of :func:`nservicebus_headers`.

        Args:
            delay: zero or more.
            target: the endpoint's queue.
            message_id: not used, because there is one queue per level.

        Raises:
            InvalidDelayError: the delay is negative, or longer than ``max_delay``.
            InvalidNameError: the address is empty, takes over 199 bytes, or has ``*`` or ``#`` as a word.
            UnsupportedTargetError: the target is the default exchange, or a topic exchange with an empty routing key.
        """
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        headers = {HEADER_DELAY: seconds, HEADER_TO: str(target)}
        return self.cascade.route(seconds, _bound(self, target), headers=headers)

    def sender_headers(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See :func:`nservicebus_headers`."""
        given = values.get("headers") or {}
        if NATIVE_MESSAGE_ID in given:
            # The caller sets the headers, or forwards an NServiceBus message.
            return {}
        return nservicebus_headers(
            message_id,
            now,
            content_type=values.get("content_type"),
            reply_to=values.get("reply_to"),
            correlation_id=values.get("correlation_id"),
            deliver_at=due,
        )

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> CascadeRoute:
        """See :meth:`DelayInfrastructure.compile`."""
        headers = {HEADER_TO: str(target)}
        return self.cascade.compile(_bound(self, target), wire, headers=headers, delay_header=HEADER_DELAY)

    def compile_headers(self, values: Mapping[str, Any], wire: WireFormat) -> CompiledNServiceBusHeaders:
        """See :func:`nservicebus_headers`."""
        return CompiledNServiceBusHeaders(values, wire)

    def delay_levels(self) -> DelayLevels:
        """The powers of two, each with one queue."""
        from bide.delay.levels import DelayLevel, DelayLevels

        levels = (
            DelayLevel(name=f"{level:02}", unit=1000 << level, highest=1, queue=name, has_queue_per_digit=False)
            for level, name in enumerate(self.cascade.level_names)
        )
        return DelayLevels(levels=tuple(levels)[::-1])

    @property
    def writes_nservicebus_headers(self) -> bool:
        """True: endpoints write these headers so that .NET and its tools can read them."""
        return True

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        """Every exchange on the route of a message, in order."""
        seconds = round_up(delay, RESOLUTION, maximum=self.max_delay)
        return tuple(self.cascade.steps(seconds, _bound(self, target), target))

    def endpoint_topology(self, queue: str) -> Topology:
        """The topology of a bide endpoint besides its queue: .NET endpoints can then send to it, delayed or not.

        With conventional routing, this is a durable fanout exchange of the queue's name, which is bound to the queue
        and to the delivery exchange. With direct routing, it is a binding of the queue to the delivery exchange. The
        endpoint declares the queue itself, with the type that it chooses.

        A .NET sender adds the binding ``#.<queue>`` at its first delayed send, even if the queue is bound already.

        Raises:
            InvalidNameError: the name cannot be an address.
        """
        return self.address_topology(queue) | Topology(bindings=[self.delivery_binding(queue)])

    def address_topology(self, queue: str) -> Topology:
        """The topology through which undelayed messages reach a queue: with conventional routing, an exchange.

        Raises:
            InvalidNameError: the name cannot be an address.
        """
        check_address("queue", queue, levels=self.levels)
        if self.routing == "direct":
            return Topology()
        return Topology([Exchange(queue, "fanout")], bindings=[Binding(queue, queue)])

    def address_exchange(self, queue: str) -> str | None:
        """With conventional routing, the exchange of the queue's name, which every endpoint of NServiceBus has.

        Messages then follow its bindings, also while ``queue migrate-to-quorum`` of .NET has bound another queue.
        """
        return queue if self.routing == "conventional" else None

    def event_routing(self) -> EventRouting:
        """Events by exchanges for each type with conventional routing, by ``amq.topic`` with direct routing."""
        from bide.delay.event_routing import ConventionalEvents, DirectEvents

        return ConventionalEvents() if self.routing == "conventional" else DirectEvents()

    def delivery_binding(self, address: str) -> Binding:
        """The binding for the delayed messages of one endpoint, and no others. The address is not checked."""
        kind: DestinationType = "exchange" if self.routing == "conventional" else "queue"
        return Binding(self.cascade.delivery, address, self.cascade.exact_key(address), kind)


@lru_cache(maxsize=64)
def _cascade(version: int, levels: int) -> Cascade:
    family = "nsb.v2" if version == 2 else "nsb"
    return Cascade(
        family=family,
        level_names=tuple(f"{family}.delay-level-{level:02}" for level in range(levels)),
        delivery=f"{family}.delay-delivery",
        queue_arguments=_QUEUE_ARGUMENTS[version],
    )


DELIVERY_EXCHANGES: Final = (NServiceBus().delivery_exchange, NServiceBus(version=1).delivery_exchange)
"""Every .NET endpoint declares one of these when it starts, unless its delayed delivery is disabled."""


@lru_cache(maxsize=4096)
def _bound(infrastructure: NServiceBus, target: Target) -> BoundTarget:
    check_topic_key(target)
    if isinstance(target, ExchangeTarget) or target.isolated:
        return infrastructure.cascade.released(target)
    check_address("queue", target.queue, levels=infrastructure.levels)
    binding = infrastructure.delivery_binding(target.queue)
    return BoundTarget(address=target.queue, routed_to=target.queue, requires=Topology(bindings=[binding]))


def is_blank(message_id: Any) -> bool:
    """Whether NServiceBus refuses a message with this id: it is missing, or has nothing but white space."""
    return not isinstance(message_id, str) or not message_id.strip()


def nservicebus_headers(
    message_id: str,
    now: datetime,
    *,
    message_types: Sequence[str] = (),
    content_type: str | None = None,
    reply_to: str | None = None,
    correlation_id: str | None = None,
    conversation_id: str | None = None,
    originating_endpoint: str | None = None,
    deliver_at: datetime | None = None,
) -> dict[str, str]:
    """The headers that NServiceBus endpoints and tools expect of a message from another system.

    The message must also have the ``message_id`` property with the same value: an endpoint moves a message without it
    to its error queue. ``delays migrate`` computes the due time of a waiting message as ``TimeSent`` plus
    ``DelayInSeconds``. Make these headers anew for each publish, because a copied ``TimeSent`` makes the message early.

    Args:
        message_id: the message id; not blank.
        now: the time of the publish, with a time zone.
        message_types: the names of the .NET types of the body, the most specific first.
        content_type: the content type of the body, for example ``application/json``.
        reply_to: the queue for replies.
        correlation_id: by default the message id, as for a message that starts a conversation.
        conversation_id: by default the message id.
        originating_endpoint: the name of the sender.
        deliver_at: the due time; NServiceBus measures the critical time from it.

    Raises:
        InvalidInputError: the message id is blank.
        InvalidDueTimeError: a time has no time zone.
    """
    if is_blank(message_id):
        raise InvalidInputError("the message id is blank: NServiceBus refuses a message without one; give it an id")
    given = {
        _CONTENT_TYPE: content_type,
        _DELIVER_AT: None if deliver_at is None else format_timestamp(deliver_at),
        "NServiceBus.EnclosedMessageTypes": ";".join(message_types),
        "NServiceBus.OriginatingEndpoint": originating_endpoint,
        _REPLY_TO: reply_to,
    }
    return {
        NATIVE_MESSAGE_ID: message_id,
        _CORRELATION_ID: correlation_id or message_id,
        _CONVERSATION_ID: conversation_id or message_id,
        **_INTENT,
        _TIME_SENT: format_timestamp(now),
        **{name: value for name, value in given.items() if value},
    }


class CompiledNServiceBusHeaders:
    """:meth:`NServiceBus.sender_headers` for many messages.

    Args:
        values: the properties that the messages share.
    """

    def __init__(self, values: Mapping[str, Any], wire: WireFormat) -> None:
        names = (NATIVE_MESSAGE_ID, _CORRELATION_ID, _CONVERSATION_ID, _TIME_SENT, _DELIVER_AT)
        content_type, reply_to = values.get("content_type"), values.get("reply_to")
        self._header_names = frozenset({*names, *_INTENT, _CONTENT_TYPE, _REPLY_TO})
        self._message_id, self._correlation_id, self._conversation_id, sent, self._due = map(wire.short_string, names)
        self._sent_headers = wire.table_items(_INTENT) + sent
        self._content_type = wire.table_items({_CONTENT_TYPE: content_type} if content_type else {})
        self._reply_to = wire.table_items({_REPLY_TO: reply_to} if reply_to else {})
        self._field_value = wire.field_value

    def encode(self, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]) -> bytes | None:
        """See :class:`bide.delay.compiled.CompiledHeaders`."""
        own = values.get("headers")
        if (own and not self._header_names.isdisjoint(own)) or not message_id.strip():
            return None
        text = self._field_value
        correlation_id = values.get("correlation_id")
        id_value = text(message_id)
        return b"".join(
            (
                self._message_id,
                id_value,
                self._correlation_id,
                text(correlation_id) if correlation_id else id_value,
                self._conversation_id,
                id_value,
                self._sent_headers,
                text(format_timestamp(now)),
                self._content_type,
                b"" if due is None else self._due + text(format_timestamp(due)),
                self._reply_to,
            )
        )


def format_timestamp(moment: datetime) -> str:
    """A time in the format of NServiceBus headers: UTC, ``2026-12-24 17:00:00:000000 Z``.

    Raises:
        InvalidDueTimeError: the time has no time zone.
    """
    if moment.utcoffset() is None:
        raise InvalidDueTimeError(f"{moment.isoformat()} has no time zone: give one, UTC for example")
    # The same as strftime("%Y-%m-%d %H:%M:%S:%f Z"), but faster.
    text = moment.astimezone(UTC).isoformat(" ", "microseconds")
    return f"{text[:19]}:{text[20:26]} Z"
