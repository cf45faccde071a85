"""A message to be sent, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import update_wrapper
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from bide.durations import DelayLike, DueTimeLike


# Not frozen, because making a frozen one takes five times as long, and bulk publishing makes millions.
@dataclass(slots=True)
class OutgoingMessage:
    """A message to be sent: the parameters of :meth:`bide.Client.publish`, as a value for ``publish_many``.

    It is read when it is taken from the iterable. Do not change it after that.

    Args:
        body: bytes, or text that is sent as UTF-8.
        json: instead of a body: anything that serialises as JSON.
        to: the queue that it goes to.
        exchange: instead of a queue: the exchange that it goes to, with its ``routing_key``.
        delay: how long from now; at least this long, rounded up to the infrastructure's resolution.
        deliver_at: instead of a delay: the due time, with a time zone. One in the past is delivered at once.
        isolated: reach the queue through a release queue of its own (one hop more), so that only its own messages wait
            if it refuses them. Exchanges always have one. Only for delayed messages.
        mandatory: an undelayed message that no queue takes is an error rather than dropped.
        message_id: kept; made if it is None.
        timestamp: an aware ``datetime``; whole seconds on the wire.
        persistent: survive a restart of the broker in classic queues (quorum queues always do).
        priority: 0 to 255. A delayed message carries it in a header, and bide's consumer restores it.
        expiration: how long the message is of use in its queue. A delayed message carries it in a header; see
            :attr:`bide.Message.expired`.
    """

    body: bytes | str | None = None
    _: KW_ONLY
    json: Any = None
    to: str | None = None
    exchange: str | None = None
    routing_key: str = ""
    delay: DelayLike | None = None
    deliver_at: DueTimeLike | None = None
    isolated: bool = False
    mandatory: bool = True
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


_Fields = ParamSpec("_Fields")
_Self = TypeVar("_Self")
_Sent = TypeVar("_Sent")
_Value = TypeVar("_Value")


def takes(
    kind: Callable[_Fields, _Value],
) -> Callable[[Callable[[_Self, _Value], _Sent]], Callable[Concatenate[_Self, _Fields], _Sent]]:
    """Give a method the parameters of a class, instead of one parameter of that class.

    So the fields of a message are listed once, and type checkers and ``help`` know them everywhere.
    """

    def decorate(method: Callable[[_Self, _Value], _Sent]) -> Callable[Concatenate[_Self, _Fields], _Sent]:
        def taking(self: _Self, /, *args: _Fields.args, **fields: _Fields.kwargs) -> _Sent:
            return method(self, kind(*args, **fields))

        update_wrapper(taking, method)
        own, fields = signature(method), signature(kind)
        first = next(iter(own.parameters.values()))
        taking.__signature__ = own.replace(parameters=[first, *fields.parameters.values()])  # type: ignore[attr-defined]
        return taking

    return decorate
