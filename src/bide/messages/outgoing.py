"""Outgoing messages, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import update_wrapper
from inspect import signature
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from bide.durations import DelayLike, DueTimeLike
from bide.errors import InvalidInputError


# Not frozen, like its subclasses: a frozen instance takes five times as long, and bulk publishing creates millions.
@dataclass(slots=True)
class MessageFields:
    """The fields of :class:`OutgoingMessage` that a schedule has too. The subclasses document them."""

    body: bytes | str | None = None
    _: KW_ONLY
    json: Any = None
    to: str | None = None
    exchange: str | None = None
    routing_key: str = ""
    delay: DelayLike | None = None
    deliver_at: DueTimeLike | None = None
    headers: Mapping[str, Any] | None = None
    message_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    timestamp: datetime | None = None
    persistent: bool = True
    priority: int | None = None
    expiration: DelayLike | None = None


@dataclass(slots=True)
class OutgoingMessage(MessageFields):
    """An outgoing message: the parameters of :meth:`bide.Client.publish`, as a value for ``publish_many``.

    ``publish_many`` reads a message when it takes it from the iterable. Do not change the message after that.

    Args:
        body: bytes, or text that is sent as UTF-8.
        json: instead of a body, any value that serialises as JSON.
        to: the target queue.
        exchange: instead of a queue, the target exchange; used with ``routing_key``.
        delay: the minimum time until delivery, from now on; rounded up to the infrastructure's resolution.
        deliver_at: instead of a delay, the due time with a time zone. A due time in the past means delivery at once.
        message_id: the message id; None generates one.
        timestamp: an aware ``datetime``, sent in whole seconds.
        persistent: survive a restart of the broker in classic queues (quorum queues always persist messages).
        priority: 0 to 255. A delayed message carries it in a header, and bide's consumer restores it.
        expiration: how long the message stays valid in its queue. A delayed message carries it in a header; see
            :attr:`bide.Message.expired`.
        isolated: reach the queue through its own release queue (one more hop), so that no other messages wait if the
            queue refuses a message. Exchanges always have a release queue. Applies to delayed messages only.
        mandatory: raise an error for an undelayed message that no queue takes, instead of dropping it.
    """

    _: KW_ONLY
    isolated: bool = False
    mandatory: bool = True


@dataclass(slots=True)
class MessageCopy(OutgoingMessage):
    """A copy of a message that was sent before, with all of its headers, bide's own included."""


_Fields = ParamSpec("_Fields")
_Self = TypeVar("_Self")
_Sent = TypeVar("_Sent")
_Value = TypeVar("_Value")


def takes(
    kind: Callable[_Fields, _Value], *, advice: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[[_Self, _Value], _Sent]], Callable[Concatenate[_Self, _Fields], _Sent]]:
    """Let a method take the fields of a class instead of an instance of that class.

    The fields of a message are thus listed once, and type checkers and ``help`` show them for each method.

    Args:
        kind: the class.
        advice: names that belong to another method, each with advice for the :class:`InvalidInputError` of a call.
    """

    def decorate(method: Callable[[_Self, _Value], _Sent]) -> Callable[Concatenate[_Self, _Fields], _Sent]:
        def taking(self: _Self, /, *args: _Fields.args, **fields: _Fields.kwargs) -> _Sent:
            try:
                value = kind(*args, **fields)
            except TypeError as error:
                misplaced = next((name for name in fields if name in advice), None)
                if misplaced is None:
                    raise
                raise InvalidInputError(f"{misplaced}={fields[misplaced]!r} {advice[misplaced]}") from error
            return method(self, value)

        update_wrapper(taking, method)
        own, fields = signature(method), signature(kind)
        first = next(iter(own.parameters.values()))
        made = own.replace(parameters=[first, *fields.parameters.values()])
        taking.__signature__ = made  # type: ignore[attr-defined]  # read by inspect, and not in typeshed
        return taking

    return decorate
